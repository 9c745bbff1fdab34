"""Text streams: whole characters, and stop strings never shown."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.server.text import Detokenizer, StopStrings
from engine.tokenizer import Tokenizer, load_tokenizer, resolve_model
from hicache.errors import ConfigError, ModelRefused, RequestRefused

STOP_TEXT = st.text(alphabet="abé\n", max_size=30)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2"))


def cut(items, sizes):
    """Cut a sequence into pieces whose sizes repeat `sizes`."""
    at, i = 0, 0
    while at < len(items):
        yield items[at : at + sizes[i % len(sizes)]]
        at, i = at + sizes[i % len(sizes)], i + 1


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=5)


@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=60), sizes=SIZES)
def test_pieces_of_any_text_add_up_and_hold_whole_characters(tokenizer, text, sizes):
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    pieces = [detokenizer.feed(piece) for piece in cut(ids, sizes)] + [detokenizer.finish()]
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    assert "".join(pieces) == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(deadline=None, max_examples=200)
@given(ids=st.lists(st.integers(0, 49151), max_size=40), sizes=SIZES)
def test_pieces_of_any_tokens_add_up_to_the_whole_decoding(tokenizer, ids, sizes):
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.feed(piece) for piece in cut(ids, sizes)] + [detokenizer.finish()]
    assert "".join(pieces) == tokenizer.decode(ids)


@settings(deadline=None, max_examples=50)
@given(data=st.binary(min_size=50, max_size=400), sizes=SIZES)
def test_pieces_of_bytes_that_are_no_text_add_up_however_many_there_are(tokenizer, data, sizes):
    ids = [i for i in map(one_byte_tokens(tokenizer).get, data) if i is not None]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.feed(piece) for piece in cut(ids, sizes)] + [detokenizer.finish()]
    assert "".join(pieces) == tokenizer.decode(ids)


def one_byte_tokens(tokenizer: Tokenizer) -> dict[int, int]:
    """Tokens of one byte, by byte; this vocabulary lacks a few."""
    pieces = ((tokenizer.token_bytes(i), i) for i in range(17, 400))
    return {piece[0]: i for piece, i in pieces if len(piece) == 1}


class Counting:
    """A tokenizer that notes how many ids it is asked to decode at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special_ids = tokenizer.special_ids
        self.most = 0

    def decode(self, ids, *, skip_special_tokens):
        self.most = max(self.most, len(ids))
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("pattern", [b"\x80", b"\xf0\x9f", b"\xf0\x9f\xa6\x9c"], ids=["no text", "half characters", "text"])
@pytest.mark.parametrize("at_once", [1, 3, 4])
def test_a_long_answer_costs_the_same_for_each_token_whatever_it_says(tokenizer, pattern, at_once):
    ids = [one_byte_tokens(tokenizer)[byte] for byte in pattern] * 500
    counting = Counting(tokenizer)
    detokenizer = Detokenizer(counting)
    behind, given = 0, ""
    for at in range(0, len(ids), at_once):
        given += detokenizer.feed(ids[at : at + at_once])
        behind = max(behind, len(tokenizer.decode(ids[: at + at_once])) - len(given))
    assert given + detokenizer.finish() == tokenizer.decode(ids)
    assert counting.most <= 48
    assert behind <= 24


def test_special_tokens_that_are_not_shown_cost_nothing(tokenizer):
    counting = Counting(tokenizer)
    detokenizer = Detokenizer(counting)
    hello, there = tokenizer.encode("Hello"), tokenizer.encode(" there")
    pieces = [detokenizer.feed(ids) for ids in (hello, [tokenizer.eos_token_id] * 500, there)]
    assert pieces == ["Hello", "", " there"]
    assert counting.most <= len(hello + there)


def test_a_character_of_several_tokens_is_given_out_once_and_whole(tokenizer):
    ids = tokenizer.encode("🦜")
    assert len(ids) > 1
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.feed([i]) for i in ids] == [""] * (len(ids) - 1) + ["🦜"]


def test_half_a_character_at_the_end_is_given_out_as_broken_by_finish_only(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.feed(tokenizer.encode("🦜")[:1]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens_are_not_text_unless_asked_for(tokenizer):
    end = tokenizer.eos_token_id
    assert Detokenizer(tokenizer).feed([end]) == ""
    assert Detokenizer(tokenizer, skip_special_tokens=False).feed([end]) == "<|im_end|>"


@settings(deadline=None, max_examples=300)
@given(text=STOP_TEXT, stops=st.lists(st.text(alphabet="abé\n", min_size=1, max_size=4), max_size=3), sizes=SIZES)
def test_stop_strings_cut_the_same_way_however_the_text_arrives(text, stops, sizes):
    ends = [(text.index(stop) + len(stop), text.index(stop), stop) for stop in stops if stop in text]
    expected = (text[: min(ends)[1]], min(ends)[2]) if ends else (text, None)
    watcher, shown, matched = StopStrings(stops), "", None
    for piece in cut(text, sizes):
        verdict = watcher.feed(piece)
        shown += verdict.text
        if (matched := verdict.matched) is not None:
            break
    else:
        shown += watcher.finish()
    assert (shown, matched) == expected


def test_the_beginning_of_a_stop_string_is_held_back():
    watcher = StopStrings(["\n\nUser:"])
    assert watcher.feed("Hello\n\nUs").text == "Hello"
    assert watcher.feed("ual").text == "\n\nUsual"


@settings(deadline=None, max_examples=100)
@given(text=st.text(min_size=1, max_size=20))
def test_bytes_of_tokens_add_up_to_the_text(tokenizer, text):
    ids = tokenizer.encode(text)  # not all of the text: this vocabulary lacks a few bytes
    joined = b"".join(tokenizer.token_bytes(i) for i in ids)
    assert joined.decode(errors="replace") == tokenizer.decode(ids, skip_special_tokens=False)


def test_tokens_of_half_characters_have_their_own_bytes(tokenizer):
    pieces = [tokenizer.token_bytes(i) for i in tokenizer.encode("🦜")]
    assert len(pieces) > 1
    assert b"".join(pieces) == "🦜".encode()


def test_a_chat_ends_where_the_assistant_goes_on(tokenizer):
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}], options={}, continue_final_message=False)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_a_continued_chat_ends_inside_the_last_message(tokenizer):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}]
    ids = tokenizer.encode_chat(messages, options={}, continue_final_message=True)
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("<|im_start|>assistant\nHel")


def test_a_lone_surrogate_is_refused(tokenizer):
    with pytest.raises(RequestRefused, match="surrogate"):
        tokenizer.encode("a\ud800")


def test_template_arguments_that_are_ours_are_refused(tokenizer):
    with pytest.raises(RequestRefused, match="tokenize"):
        tokenizer.encode_chat([{"role": "user", "content": "Hi"}], options={"tokenize": True}, continue_final_message=False)


def test_the_tokenizer_of_a_gguf_is_the_same_when_loaded_again(tokenizer, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = resolve_model("smollm2")
    fresh, kept = load_tokenizer(path), load_tokenizer(path)
    assert [folder.parent.name for folder in tmp_path.glob("hicache/*/SmolLM2*")] == ["tokenizers"]
    text, chat = "Hi 🦜 123  <|im_end|>\n\tx", [{"role": "user", "content": "Hi"}]
    for one in (fresh, kept):
        assert one.encode(text) == tokenizer.encode(text)
        assert one.eos_token_id == tokenizer.eos_token_id
        assert one.vocab_size == tokenizer.vocab_size
        assert one.encode_chat(chat, options={}, continue_final_message=False) == tokenizer.encode_chat(
            chat, options={}, continue_final_message=False
        )
    assert fresh.decode(fresh.encode(text), skip_special_tokens=True) == kept.decode(kept.encode(text))


def test_a_tokenizer_that_can_not_be_kept_is_used_all_the_same(monkeypatch, tmp_path):
    taken = tmp_path / "hicache"
    taken.write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_tokenizer(resolve_model("smollm2")).encode("one two")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelRefused, match="no usable tokenizer"):
        load_tokenizer(tmp_path)


def test_an_unknown_model_is_refused_with_the_names_that_are_known():
    with pytest.raises(ConfigError, match="smollm2"):
        resolve_model("no-such-model")
