"""Answers held to a grammar by a tiny random model, which would say anything: they parse, or the request was refused."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from engine.messages import GrammarSpec, SamplingParams
from engine.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.engine_driver import Driver

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SPEC = GrammarSpec("json_schema", json.dumps(SCHEMA))


@pytest.fixture
def text(model: Path) -> Callable[[list[int]], str]:
    return load_tokenizer(model).decode


def held_to(spec: GrammarSpec, tokens: int = 200, **fields: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, grammar=spec, **fields)


def fields(count: int) -> dict[str, Any]:
    return {f"p{i}": {"type": "string", "maxLength": 2} for i in range(count)}


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 259, length).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_an_answer_follows_its_schema(
    engine: Callable[..., Driver], text: Callable[[list[int]], str], seed: int, temperature: float
) -> None:
    driver = engine()
    rid = driver.add(prompt(9, seed), sampling=held_to(SPEC, temperature=temperature, seed=seed))
    driver.run()
    answer = json.loads(text(driver.tokens[rid]))
    assert list(answer) == ["name", "age", "tags"]
    assert len(answer["name"]) <= 6
    assert 0 <= answer["age"] <= 150
    assert set(answer["tags"]) <= {"a", "b"}
    assert driver.last[rid].finish_reason == "stop"


@pytest.mark.parametrize(
    ("kind", "source", "pattern"),
    [
        ("regex", r"[0-9]{3}-[a-f]{2}", r"[0-9]{3}-[a-f]{2}"),
        ("regex", r"(yes|no|perhaps)", r"(yes|no|perhaps)"),
        ("ebnf", 'root ::= item ("," item){2}\nitem ::= [0-9] | "x"', r"[0-9x](,[0-9x]){2}"),
        ("json_schema", '{"enum": ["red", "blue"]}', r'"(red|blue)"'),
    ],
)
def test_an_answer_matches_its_pattern(
    engine: Callable[..., Driver], text: Callable[[list[int]], str], kind: Any, source: str, pattern: str
) -> None:
    driver = engine()
    rid = driver.add(prompt(9), sampling=held_to(GrammarSpec(kind, source), ignore_eos=True))
    driver.run()
    assert re.fullmatch(pattern, text([i for i in driver.tokens[rid] if i > 2]))
    assert driver.last[rid].finish_reason == "stop"


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("json_schema", "{"),
        GrammarSpec("json_schema", '{"type": "nope"}'),
        GrammarSpec("json_schema", '{"$ref": "#/nowhere"}'),
        GrammarSpec("json_schema", "[1]"),
        GrammarSpec("regex", "[0-9"),
        GrammarSpec("ebnf", "root ::= missing"),
        GrammarSpec("ebnf", "::="),
        GrammarSpec("ebnf", "root ::= " + "(" * 5000),
        GrammarSpec("regex", "a" * (2 << 20)),
    ],
)
def test_a_bad_grammar_is_refused_and_others_go_on(engine: Callable[..., Driver], spec: GrammarSpec) -> None:
    driver = engine()
    other = driver.add(prompt(9), 8)
    rid = driver.add(prompt(9), sampling=held_to(spec))
    driver.run()
    assert driver.failed[rid].status == 400
    assert spec.kind in driver.failed[rid].message or "grammar" in driver.failed[rid].message
    assert len(driver.tokens[other]) == 8


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": fields(10_000)},
        {"type": "object", "properties": fields(1000)},
        {"anyOf": [{"type": "object", "properties": fields(10)}] * 200},
    ],
)
def test_a_schema_that_would_slow_every_step_is_refused_before_the_first_token(
    engine: Callable[..., Driver], schema: dict[str, Any]
) -> None:
    driver = engine()
    rid = driver.add(prompt(9), sampling=held_to(GrammarSpec("json_schema", json.dumps(schema))))
    while not driver.core.idle:
        driver.step()
    assert driver.tokens[rid] == []
    assert driver.failed[rid].status == 400
    assert re.search("too big|items", driver.failed[rid].message)


@pytest.mark.parametrize("required", [0, 400])
def test_a_schema_may_have_hundreds_of_properties(
    engine: Callable[..., Driver], text: Callable[[list[int]], str], required: int
) -> None:
    driver = engine()
    schema = {"type": "object", "properties": fields(400), "required": list(fields(required)), "additionalProperties": False}
    rid = driver.add(prompt(9), sampling=held_to(GrammarSpec("json_schema", json.dumps(schema)), tokens=60, temperature=1.0))
    driver.run()
    assert not driver.failed
    assert text(driver.tokens[rid]).startswith("{")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_that_grows_too_costly_ends_its_request_with_an_error(
    engine: Callable[..., Driver], temperature: float
) -> None:
    driver = engine()
    wide = {"type": "object", "properties": fields(1000)}
    schema = {"type": "object", "properties": {"a": {"const": "x"}, "b": wide}, "required": ["a", "b"]}
    rid = driver.add(prompt(9), sampling=held_to(GrammarSpec("json_schema", json.dumps(schema)), temperature=temperature))
    other = driver.add(prompt(9, 1), 30)
    driver.run()
    assert driver.tokens[rid]
    assert driver.failed[rid].status == 400
    assert driver.failed[rid].message.endswith("items; max is 2000")
    assert len(driver.tokens[other]) == 30


def test_a_retracted_request_goes_on_where_its_grammar_stood(
    engine: Callable[..., Driver], text: Callable[[list[int]], str]
) -> None:
    tight = engine(max_total_tokens=256)
    spec = GrammarSpec("regex", "(abc){30}")
    ids = [tight.add(prompt(20, seed), sampling=held_to(spec, temperature=1.0)) for seed in range(6)]
    tight.run()
    assert tight.stats()["hicache_retracted_requests_total"] > 0
    assert [text(tight.tokens[rid]) for rid in ids] == ["abc" * 30] * 6


def test_the_loop_goes_on_while_a_grammar_compiles(engine: Callable[..., Driver]) -> None:
    driver = engine()
    large = {"properties": {f"k{i}": {"enum": [f"v{i}-{j}" for j in range(40)]} for i in range(100)}}
    driver.answer(prompt(9), 2)
    rid = driver.add(prompt(9), sampling=held_to(GrammarSpec("json_schema", json.dumps(large)), tokens=2))
    other = driver.add(prompt(12), 2)
    while other not in driver.last or driver.last[other].finish_reason is None:
        driver.step()
    driver.run()
    assert len(driver.tokens[rid]) == 2


def test_a_request_that_waits_for_its_grammar_can_be_aborted(engine: Callable[..., Driver]) -> None:
    driver = engine()
    rid = driver.add(prompt(9), sampling=held_to(SPEC))
    assert not driver.core.idle
    driver.core.abort(rid)
    assert driver.core.idle
    time.sleep(0.05)
    driver.run()
    assert driver.tokens[rid] == []


def test_grammars_do_not_change_their_neighbours(engine: Callable[..., Driver]) -> None:
    driver = engine()
    expected = driver.answer(prompt(30), 20)
    plain = driver.add(prompt(30), 20)
    driver.add(prompt(9), sampling=held_to(SPEC))
    driver.run()
    assert driver.tokens[plain] == expected


def test_min_new_tokens_can_not_break_a_grammar(engine: Callable[..., Driver], text: Callable[[list[int]], str]) -> None:
    driver = engine()
    rid = driver.add(prompt(9), sampling=held_to(GrammarSpec("regex", "ab?"), min_new_tokens=20))
    driver.run()
    assert text(driver.tokens[rid]) in ("a", "ab")


def test_a_grammar_library_that_breaks_ends_the_request_and_nothing_else(
    engine: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = engine()

    def broken(*args: Any, **kwargs: Any) -> None:
        raise OSError("broken")

    monkeypatch.setattr("engine.grammar.LLMatcher", broken)
    rid, other = driver.add(prompt(9), sampling=held_to(SPEC)), driver.add(prompt(9, 1))
    driver.run()
    assert driver.failed[rid].status == 400
    assert driver.tokens[other]
