"""SGLang's endpoints, and the admin ones, before a scripted engine."""

from __future__ import annotations

import json
import threading
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.server.native_schemas import NativeSampling
from engine.server.schemas import CompletionBody
from tests.scripted_engine import EOS_TOKEN_IDS

SLOW = {"text": "one two three " * 30, "extra_key": "slow"}


def wait_for(condition, what: str) -> None:
    """Wait until a condition holds; fail if it doesn't within seconds."""
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s, f"timed out: {what}"
        time.sleep(0.02)


def generate(http, **body):
    response = http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_generate_answers_in_sglangs_shape(http, tokenizer):
    answer = generate(http, text="one two three", rid="mine")
    assert answer["text"] == "one two three"
    assert answer["output_ids"] == tokenizer.encode("one two three")
    meta = answer["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == ("mine", 3, 3, 7)
    assert meta["finish_reason"] == {"type": "stop"}
    assert meta["e2e_latency"] > 0


def test_generate_takes_token_ids_and_batches(http, tokenizer):
    ids = tokenizer.encode("one two")
    assert generate(http, input_ids=ids)["text"] == "one two"
    batch = generate(http, input_ids=[ids, ids], sampling_params=[{"max_new_tokens": 1}, {}])
    assert [answer["text"] for answer in batch] == ["one", "one two"]
    assert batch[0]["meta_info"]["finish_reason"] == {"type": "length", "length": 1}
    assert [answer["text"] for answer in generate(http, text=["a"])] == ["a"]


def test_n_answers_make_a_list(http):
    assert [answer["text"] for answer in generate(http, text="one", sampling_params={"n": 2})] == ["one", "one"]


def test_a_stream_carries_the_text_so_far(http):
    with http.stream("POST", "/generate", json={"text": "one two three", "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    texts = [json.loads(line)["text"] for line in lines[:-1]]
    assert texts == ["one", "one two", "one two three"]
    assert [json.loads(line)["meta_info"]["finish_reason"] for line in lines[:-1]] == [None, None, {"type": "stop"}]


def test_stop_strings_are_trimmed_unless_asked_not_to_be(http):
    params = {"stop": " three"}
    trimmed = generate(http, text="one two three four", sampling_params=params)
    kept = generate(http, text="one two three four", sampling_params={**params, "no_stop_trim": True})
    assert (trimmed["text"], kept["text"]) == ("one two", "one two three")
    assert trimmed["meta_info"]["finish_reason"] == {"type": "stop", "matched": " three"}


def test_a_stop_token_is_reported_and_not_shown(http, tokenizer):
    ids = tokenizer.encode("one two three")
    answer = generate(http, input_ids=ids, sampling_params={"stop_token_ids": [ids[-1]]})
    assert answer["text"] == "one two"
    assert answer["output_ids"] == ids
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[-1]}


@pytest.mark.parametrize("end", EOS_TOKEN_IDS)
def test_every_end_token_of_the_model_is_reported_and_shown_only_on_demand(http, tokenizer, end):
    ids = [*tokenizer.encode("one two"), end]
    params = {"skip_special_tokens": False}
    trimmed = generate(http, input_ids=ids, sampling_params=params)
    kept = generate(http, input_ids=ids, sampling_params={**params, "no_stop_trim": True})
    assert trimmed["text"] == "one two"
    assert kept["text"] == "one two" + tokenizer.decode([end], skip_special_tokens=False)
    assert trimmed["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}


def test_log_probabilities_come_as_triples(http, tokenizer):
    ids = tokenizer.encode("one two")
    meta = generate(http, text="one two", return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=True)["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.25, ids[0], "one"], [-0.25, ids[1], " two"]]
    assert [len(top) for top in meta["output_top_logprobs"]] == [2, 2]


def test_log_probabilities_of_the_prompt_begin_after_the_start(http, tokenizer):
    ids = tokenizer.encode("one two three")
    body = {"text": "one two three", "return_logprob": True, "return_text_in_logprobs": True, "top_logprobs_num": 1}
    whole = generate(http, **body, logprob_start_len=0)["meta_info"]
    assert whole["input_token_logprobs"] == [[None, ids[0], "one"], [-0.125, ids[1], " two"], [-0.25, ids[2], " three"]]
    assert [top and len(top) for top in whole["input_top_logprobs"]] == [None, 1, 1]
    assert whole["normalized_prompt_logprob"] == -0.1875
    assert generate(http, **body, logprob_start_len=1)["meta_info"]["input_token_logprobs"] == [[-0.25, ids[2], " three"]]
    assert generate(http, **body, logprob_start_len=2)["meta_info"]["input_token_logprobs"] == []
    assert generate(http, **body)["meta_info"]["input_token_logprobs"] == []


def test_a_prompt_can_be_scored_without_an_answer(http):
    scored = {"return_logprob": [True, False], "logprob_start_len": [0, None], "sampling_params": {"max_new_tokens": 0}}
    first, second = generate(http, text=["one two", "one"], **scored)
    assert (first["text"], first["output_ids"], first["meta_info"]["output_token_logprobs"]) == ("", [], [])
    assert len(first["meta_info"]["input_token_logprobs"]) == 2
    assert first["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert "input_token_logprobs" not in second["meta_info"]


def test_the_split_by_tier_is_there_if_asked(http):
    meta = generate(http, text="one", return_cached_tokens_details=True)["meta_info"]
    assert meta["cached_tokens_details"] == {"device": 4, "host": 2, "storage": 1}
    assert "cached_tokens_details" not in generate(http, text="one")["meta_info"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "either text or input_ids"),
        ({"text": "a", "input_ids": [1]}, "either text or input_ids"),
        ({"text": "a", "sampling_params": {"temprature": 1}}, "temprature"),
        ({"text": "a", "sampling_params": {"regex": "a", "json_schema": "{}"}}, "at most one"),
        ({"text": ["a"], "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "in use"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"stop_token_ids": [10**6]}]}, "stop_token_ids"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"logit_bias": {"1000000": 1}}]}, "logit_bias"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": ["a", "b"], "return_logprob": [True]}, "return_logprob"),
        ({"text": "a " * 600}, "maximum context length"),
        ({"input_ids": []}, "input_ids"),
    ],
)
def test_bad_input_is_refused(http, body, says):
    response = http.post("/generate", json=body)
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]


def noting(method, calls):
    """A method that notes each call in `calls` before it does its work."""

    def noted(*args, **kwargs):
        calls.append(args)
        return method(*args, **kwargs)

    return noted


@pytest.mark.parametrize(
    ("path", "kind", "body", "prepared"),
    [
        ("generate", NativeSampling, {"text": ["a"] * 100, "sampling_params": {"n": 100}}, 0),
        ("generate", NativeSampling, {"text": "a", "sampling_params": {"n": 100}}, 1),
        ("v1/completions", CompletionBody, {"prompt": ["a"] * 100, "n": 100}, 0),
        ("v1/completions", CompletionBody, {"prompt": "a", "n": 100}, 1),
    ],
)
def test_how_answers_are_sampled_is_worked_out_once_and_for_too_many_not_at_all(http, monkeypatch, path, kind, body, prepared):
    calls: list[tuple] = []
    monkeypatch.setattr(kind, "sampling", noting(kind.sampling, calls))
    assert http.post(f"/{path}", json=body).status_code == (200 if prepared else 429)
    assert len(calls) == prepared


@pytest.mark.parametrize("path", ["tokenize", "v1/completions"])
def test_others_are_answered_while_many_prompts_are_tokenised(http, monkeypatch, tokenizer, path):
    begun, encode, calls = threading.Event(), tokenizer.encode, []

    def slow(text):
        calls.append(text)
        begun.set()
        time.sleep(0.01)
        return encode(text)

    monkeypatch.setattr(tokenizer, "encode", slow)
    batch = threading.Thread(target=http.post, args=(f"/{path}",), kwargs={"json": {"prompt": ["a"] * 150}})
    batch.start()
    assert begun.wait(10)
    assert http.get("/health").status_code == 200
    answered = len(calls)
    batch.join(30)
    assert answered < len(calls) == 150


def test_a_chat_of_many_messages_is_put_together_off_the_event_loop(http, monkeypatch, tokenizer):
    threads: list[str] = []
    encode = tokenizer.encode_chat

    def noted(*args, **kwargs):
        threads.append(threading.current_thread().name)
        return encode(*args, **kwargs)

    monkeypatch.setattr(tokenizer, "encode_chat", noted)
    for count in (1, 100):
        http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": ""}] * count})
    assert [name.split("_")[0] for name in threads] == ["http-server", "tokenize"]


def test_tokenize_and_detokenize_undo_each_other(http, tokenizer):
    got = http.post("/tokenize", json={"prompt": "one two"}).json()
    assert got == {"tokens": tokenizer.encode("one two"), "count": 2, "max_model_len": 512}
    assert http.post("/detokenize", json={"tokens": got["tokens"]}).json() == {"text": "one two"}
    assert http.post("/detokenize", json={"tokens": [got["tokens"]] * 2}).json() == {"text": ["one two"] * 2}
    assert http.post("/detokenize", json={"tokens": []}).json() == {"text": ""}


def test_health_and_info(http):
    assert http.get("/health").status_code == 200
    assert http.get("/health_generate").status_code == 200
    info = http.get("/get_model_info").json()
    assert (info["served_model_name"], info["is_generation"], info["context_length"]) == ("scripted", True, 512)
    assert http.get("/get_server_info").json()["engine"]["model"] == "scripted"


def test_flush_works_with_get_and_post(http):
    assert http.get("/flush_cache").json() == http.post("/flush_cache").json() == {"flushed_pages": 3}


def test_metrics_of_both_processes_parse_together(http):
    def value(name: str, **labels: str) -> float:
        families = text_string_to_metric_families(http.get("/metrics").text)
        return sum(s.value for f in families for s in f.samples if s.name == name and labels.items() <= s.labels.items())

    before = value("hicache_ttft_seconds_count")
    generate(http, text="one two three")
    assert value("hicache_ttft_seconds_count") == before + 1
    assert value("scripted_total") == 1
    assert value("hicache_http_requests_total", path="/generate", status="200") >= 1


def test_unknown_paths_are_one_label(http):
    for n in range(3):
        http.get(f"/scan/{n}")
    text = http.get("/metrics").text
    assert "/scan/" not in text
    assert 'path="unknown",status="404"' in text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts_its_request(http, stream):
    rid = f"gone-{stream}"
    body = {**SLOW, "stream": stream, "rid": rid}
    if stream:
        with http.stream("POST", "/generate", json=body) as response:
            next(response.iter_lines())
    else:
        with pytest.raises(Exception, match="timed out"):
            http.post("/generate", json=body, timeout=0.3)
    wait_for(lambda: rid in http.get("/cache/stats").json()["aborted"], "the abort")
    assert http.get("/cache/stats").json()["running"] == 0


def test_a_client_that_goes_away_before_the_first_token_aborts_its_request(http):
    body = {"text": "one", "extra_key": "mute", "stream": True, "rid": "impatient"}
    with pytest.raises(Exception, match="timed out"):
        http.post("/generate", json=body, timeout=0.3)
    wait_for(lambda: "impatient" in http.get("/cache/stats").json()["aborted"], "the abort")


def test_a_request_can_be_aborted_by_its_id(http):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(generate(http, **SLOW, rid="victim")))
    thread.start()
    wait_for(lambda: http.get("/get_server_info").json()["in_flight"], "the request")
    assert http.post("/abort_request", json={"rid": "victim"}).json() == {"aborted": 1}
    thread.join(10)
    assert answers[0]["meta_info"]["finish_reason"] == {"type": "abort"}
    assert http.post("/abort_request", json={"rid": "victim"}).json() == {"aborted": 0}
    assert http.post("/abort_request", json={}).status_code == 400


def test_a_request_id_comes_back_if_it_is_a_plain_one(http):
    assert http.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert http.get("/health", headers={"x-request-id": "a b"}).headers["x-request-id"] != "a b"
