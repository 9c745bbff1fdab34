"""OpenAI's endpoints over a real socket, before an engine that answers each prompt with the prompt."""

from __future__ import annotations

import json

import openai
import pytest

from engine.server import validation
from tests.scripted_engine import CONTEXT_LENGTH

HI = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def client(http):
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def events(http, path: str, body: dict) -> list[dict]:
    """The events of a stream, which must be framed as OpenAI frames them."""
    with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        raw = response.read().decode()
    assert raw.endswith("\n\n")
    lines = raw.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_completion_is_text_with_its_usage(client):
    answer = client.completions.create(model="any", prompt="one two three", max_tokens=10)
    assert answer.choices[0].text == "one two three"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 3, 6)
    assert answer.usage.prompt_tokens_details.cached_tokens == 7


def test_a_completion_is_cut_at_max_tokens(client):
    answer = client.completions.create(model="any", prompt="one two three", max_tokens=2)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one two", "length")


def test_a_chat_goes_through_the_template(client):
    answer = client.chat.completions.create(model="any", messages=HI)
    assert "user\nHello there\n" in answer.choices[0].message.content
    assert answer.choices[0].message.role == "assistant"
    assert answer.id.startswith("chatcmpl-")


def test_text_parts_of_a_message_are_joined(client):
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": " there"}]
    whole = client.chat.completions.create(model="any", messages=HI).choices[0].message.content
    assert (
        client.chat.completions.create(model="any", messages=[{"role": "user", "content": parts}]).choices[0].message.content
        == whole
    )


def test_a_streamed_chat_adds_up_to_the_whole_one(client):
    whole = client.chat.completions.create(model="any", messages=HI).choices[0]
    stream = list(client.chat.completions.create(model="any", messages=HI, stream=True))
    assert stream[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.message.content
    assert [chunk.choices[0].finish_reason for chunk in stream][-2:] == [None, "stop"]
    assert all(chunk.usage is None for chunk in stream)


def test_a_stream_ends_with_its_usage_if_asked(http):
    body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3}
    got = events(http, "/v1/chat/completions", body)
    assert got[-1]["choices"] == []
    assert got[-1]["usage"]["completion_tokens"] == 3
    assert all(event["usage"] is None for event in got[:-1])


def test_a_stream_without_usage_has_no_usage_field(http):
    assert all("usage" not in event for event in events(http, "/v1/completions", {"prompt": "a b", "stream": True}))


def test_streamed_characters_are_whole(http):
    got = events(http, "/v1/completions", {"prompt": "a 🦜 b 你好", "stream": True, "max_tokens": 40})
    texts = [event["choices"][0]["text"] for event in got]
    assert "".join(texts) == "a 🦜 b 你好"
    assert not any("\ufffd" in text for text in texts)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_is_not_shown(http, stream):
    before = http.get("/cache/stats").json()["aborted"]
    body = {"prompt": "one two three four five six", "stop": ["ee fo", "nothing"], "stream": stream}
    if stream:
        choices = [event["choices"][0] for event in events(http, "/v1/completions", body)]
    else:
        choices = http.post("/v1/completions", json=body).json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "one two thr"
    assert (choices[-1]["finish_reason"], choices[-1]["matched_stop"]) == ("stop", "ee fo")
    assert len(http.get("/cache/stats").json()["aborted"]) == len(before) + 1


def test_what_only_looked_like_a_stop_string_is_shown(client):
    answer = client.completions.create(model="any", prompt="one two three", stop=["three four"])
    assert answer.choices[0].text == "one two three"


def test_n_answers_and_batches_come_in_order(client):
    answer = client.completions.create(model="any", prompt=["one", "two two"], n=2, seed=5)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "one"),
        (1, "one"),
        (2, "two two"),
        (3, "two two"),
    ]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 6)


def test_streamed_answers_of_a_batch_keep_their_indexes(http):
    got = events(http, "/v1/completions", {"prompt": ["one two", "three four"], "stream": True})
    texts = ["", ""]
    for event in got:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == ["one two", "three four"]


def test_prompts_may_be_token_ids(http, tokenizer):
    ids = tokenizer.encode("one two")
    single = http.post("/v1/completions", json={"prompt": ids}).json()
    batch = http.post("/v1/completions", json={"prompt": [ids, ids]}).json()
    assert single["choices"][0]["text"] == "one two"
    assert [choice["text"] for choice in batch["choices"]] == ["one two", "one two"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_repeats_the_prompt_before_the_answer(http, stream):
    body = {"prompt": "one two", "echo": True, "stream": stream}
    if stream:
        text = "".join(event["choices"][0]["text"] for event in events(http, "/v1/completions", body))
    else:
        text = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert text == "one twoone two"


def test_log_probabilities_of_a_chat(client):
    answer = client.chat.completions.create(model="any", messages=HI, logprobs=True, top_logprobs=2, max_tokens=3)
    content = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == [-0.25] * 3
    assert [len(entry.top_logprobs) for entry in content] == [2] * 3
    assert all(bytes(entry.bytes).decode() == entry.token for entry in content)


def test_log_probabilities_of_a_completion(http):
    body = {"prompt": "one two three", "logprobs": 1}
    columns = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert columns["tokens"] == ["one", " two", " three"]
    assert columns["text_offset"] == [0, 3, 7]
    assert columns["token_logprobs"] == [-0.25] * 3
    assert [len(top) for top in columns["top_logprobs"]] == [1] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_has_log_probabilities_too(http, stream):
    body = {"prompt": "one two", "echo": True, "logprobs": 1, "max_tokens": 1, "stream": stream}
    if stream:
        columns = events(http, "/v1/completions", body)[0]["choices"][0]["logprobs"]
    else:
        columns = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert columns["tokens"] == ["one", " two", "one"]
    assert columns["token_logprobs"] == [None, -0.125, -0.25]
    assert columns["text_offset"] == [0, 3, 7]
    assert [top and len(top) for top in columns["top_logprobs"]] == [None, 1, 1]


def test_a_prompt_alone_can_be_scored(client):
    answer = client.completions.create(model="any", prompt="one two", max_tokens=0, echo=True, logprobs=1)
    assert answer.choices[0].text == "one two"
    assert answer.choices[0].logprobs.token_logprobs == [None, -0.125]
    assert answer.usage.completion_tokens == 0


def test_salt_and_priority_reach_the_engine(http):
    http.post("/v1/completions", json={"prompt": "one", "cache_salt": "s", "priority": 3}).raise_for_status()
    last = http.get("/cache/stats").json()["received"][-1]
    assert (last["salt"], last["priority"]) == ("s", 3)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "one"}),
        ("/v1/responses", {"input": "one", "max_output_tokens": 1}),
        ("/generate", {"text": "one"}),
    ],
)
def test_the_routing_key_is_the_bodys_or_else_the_headers(http, path, body):
    header = {"X-SMG-Routing-Key": "header"}
    for fields, headers, expected in (({}, {}, ""), ({}, header, "header"), ({"routing_key": "body"}, header, "body")):
        http.post(path, json=body | fields, headers=headers).raise_for_status()
        assert http.get("/cache/stats").json()["received"][-1]["routing_key"] == expected


def test_a_chat_without_a_limit_may_fill_the_context(http):
    body = {"messages": HI}
    answer = http.post("/v1/chat/completions", json=body).json()
    asked = http.get("/cache/stats").json()["received"][-1]["max_new_tokens"]
    assert asked == CONTEXT_LENGTH - answer["usage"]["prompt_tokens"]


def test_models_are_listed(client):
    assert [card.id for card in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").id == "scripted"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("completions", {}, "prompt"),
        ("completions", {"prompt": ""}, "empty"),
        ("completions", {"prompt": []}, "empty"),
        ("completions", {"prompt": [[]]}, "empty"),
        ("completions", {"prompt": [10**9]}, "vocabulary"),
        ("completions", {"prompt": [10**30]}, "prompt"),
        ("completions", {"prompt": [-1]}, "prompt"),
        ("completions", {"prompt": {"a": 1}}, "prompt"),
        ("completions", {"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ("chat/completions", {"messages": HI, "max_tokens": 0}, "max_tokens"),
        ("completions", {"prompt": "a", "temperature": -1}, "temperature"),
        ("completions", {"prompt": "a", "top_p": 0}, "top_p"),
        ("completions", {"prompt": "a", "n": 1000}, "n:"),
        ("completions", {"prompt": "a", "stop": [""]}, "stop"),
        ("completions", {"prompt": "a", "seed": 2**70}, "seed"),
        ("completions", {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ("completions", {"prompt": "a", "logit_bias": {"999999": 1}}, "logit_bias"),
        ("completions", {"prompt": "a", "best_of": 3}, "best_of"),
        ("completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("completions", {"prompt": "a", "max_token": 3}, "Unrecognized request argument supplied: max_token"),
        ("completions", {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ("completions", {"prompt": ["a"] * 150, "n": 2}, "too many requests"),
        ("chat/completions", {}, "messages"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"content": "x"}]}, "role"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content"),
        ("chat/completions", {"messages": HI, "top_logprobs": 2}, "logprobs"),
        ("chat/completions", {"messages": HI, "tools": [{"type": "function"}]}, "tools"),
        ("chat/completions", {"messages": HI, "response_format": {"type": "json_schema"}}, "json_schema"),
        ("chat/completions", {"messages": HI, "response_format": {"type": "xml"}}, "response_format"),
        ("chat/completions", {"messages": HI, "regex": "a", "ebnf": "b"}, "at most one"),
        ("completions", {"prompt": "a", "response_format": {"type": "json_object"}, "regex": "a"}, "at most one"),
        ("chat/completions", {"messages": HI, "chat_template_kwargs": {"tokenize": True}}, "tokenize"),
    ],
)
def test_bad_input_is_refused_in_openais_shape(http, path, body, says):
    response = http.post(f"/v1/{path}", json=body)
    assert response.status_code == (429 if says == "too many requests" else 400)
    error = response.json()["error"]
    assert says in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("rate_limit_error" if response.status_code == 429 else "invalid_request_error")


TEXT_PART = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("v1/completions", {"prompt": "a", "stop": ""}, "stop", "at least 1 character"),
        ("v1/completions", {"prompt": "a", "stop": ["a", ""]}, "stop.1", "at least 1 character"),
        ("v1/completions", {"prompt": "a", "stop": 5}, "stop", "valid list or a valid string"),
        ("v1/completions", {"prompt": [1, "a"]}, "prompt.1", "valid integer"),
        ("v1/completions", {"prompt": [[1], [2, -2]]}, "prompt.1.1", "greater than or equal to 0"),
        ("v1/completions", {"prompt": 5}, "prompt", "valid string or a valid list"),
        ("v1/completions", {"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias.a", "valid integer"),
        ("v1/completions", {}, "prompt", "Field required"),
        ("v1/completions", [1], None, "dictionary"),
        (
            "v1/chat/completions",
            {"messages": [{"role": "user", "content": [TEXT_PART, {"type": "image_url"}]}]},
            "messages.0.content.1.type",
            "'text'",
        ),
        ("v1/chat/completions", {"messages": HI, "tool_choice": {"type": "function"}}, "tool_choice.function", "required"),
        ("generate", {"text": "a", "sampling_params": {"stop": ""}}, "sampling_params.stop", "at least 1 character"),
        ("generate", {"text": "a", "sampling_params": {"bogus": 1}}, "sampling_params.bogus", "Unrecognized"),
        ("generate", {"text": ["a"], "sampling_params": [{"top_p": 2}]}, "sampling_params.0.top_p", "less than or equal to 1"),
        ("generate", {"text": "a", "logprob_start_len": ["x"]}, "logprob_start_len.0", "valid integer"),
        ("v1/responses", {"input": [{"type": "bogus"}]}, "input.0.type", "'message'"),
    ],
)
def test_what_is_wrong_is_named_as_it_was_written(http, path, body, param, message):
    error = http.post(f"/{path}", json=body).json()["error"]
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("v1/completions", {"prompt": [{}] * 3000}, "prompt.0"),
        ("v1/completions", {"prompt": [["x"] * 3000]}, "prompt.0.0"),
        ("v1/completions", {"prompt": [[]] * 3000}, "prompt"),
        ("v1/completions", {"prompt": "a", **{f"k{i}": 1 for i in range(3000)}}, None),
        ("v1/completions", {"prompt": "a", "logit_bias": {f"k{i}": 1 for i in range(70_000)}}, "logit_bias"),
        ("v1/completions", {"prompt": "a", "stop_token_ids": ["x"] * 3000}, "stop_token_ids.0"),
        ("v1/chat/completions", {"messages": [{}] * 3000}, "messages.0.role"),
        ("v1/chat/completions", {"messages": [{"role": "user", "content": [{}] * 3000}]}, "messages.0.content.0.type"),
        ("generate", {"input_ids": ["x"] * 3000}, "input_ids.0"),
        ("generate", {"text": "a", "sampling_params": [{"x": 1}] * 3000}, "sampling_params.0.x"),
        ("v1/responses", {"input": [{}] * 3000}, "input.0.role"),
        ("tokenize", {"prompt": [1] * 3000}, "prompt.0"),
        ("detokenize", {"tokens": ["x"] * 3000}, "tokens.0"),
        ("cache/prefetch", {"input_ids": ["x"] * 3000}, "input_ids.0"),
    ],
)
def test_a_body_full_of_mistakes_is_given_up_at_the_first(http, monkeypatch, path, body, param):
    described = []
    said = validation._validation_error
    monkeypatch.setattr(
        validation, "_validation_error", lambda problems, body: described.append(problems) or said(problems, body)
    )
    response = http.post(f"/{path}", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert len(described[0]) < 10


@pytest.mark.parametrize(
    "raw", [b"{", b"", b"null", b"[]", b'{"prompt": "\\ud800"}', b'{"\\ud800": 1, "prompt": "a"}', b"\xff"]
)
def test_broken_bodies_are_refused(http, raw):
    response = http.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "extra", "param"),
    [
        ("completions", {"prompt": "a " * 600}, "prompt"),
        ("completions", {"prompt": "a " * 3000}, "prompt"),
        ("completions", {"prompt": "a", "max_tokens": 512}, "prompt"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a " * 600}]}, "messages"),
    ],
)
def test_what_exceeds_the_context_is_refused_with_openais_code(http, path, extra, param):
    response = http.post(f"/v1/{path}", json=extra)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "maximum context length is 512 tokens" in error["message"]


def test_the_openai_client_raises_its_own_errors(client):
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model="any", prompt="a " * 600)
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="any", prompt="a", extra_body={"extra_key": "fail:503"})


def test_unknown_paths_and_methods_have_the_shape_too(http):
    missing, wrong = http.get("/v1/nothing"), http.get("/v1/completions")
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert "/v1/nothing" in missing.json()["error"]["message"]
    assert "GET" in wrong.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 500, 503])
def test_a_failure_before_the_first_token_is_an_http_status(http, stream, status):
    response = http.post("/v1/completions", json={"prompt": "a", "extra_key": f"fail:{status}", "stream": stream})
    assert response.status_code == status
    assert response.json()["error"]["message"] == "scripted failure"
