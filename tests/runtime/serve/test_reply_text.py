"""The text of a reply, as it is sent bit by bit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.utils.chat_parsing import ResponseParser

from penstock.runtime.asked.prompts import Vocabulary
from penstock.runtime.serve.dialects.call_formats import find_calls
from penstock.runtime.serve.dialects.reply_reader import ReplyReader, Said
from penstock.runtime.serve.front.reply_text import ReplyText
from penstock.runtime.serve.front.token_texts import TokenTexts, byte_letters


def decode(ids: list[int]) -> str:
    """Each id is a byte."""
    return bytes(ids).decode("utf-8", "replace")


def told(text: str | bytes, *stops: str) -> tuple[list[str], str | None]:
    reply = ReplyText(decode, stops)
    raw = text if isinstance(text, bytes) else text.encode()
    return [*(reply.add([byte]) for byte in raw), reply.rest()], reply.stop


@pytest.mark.parametrize("text", ["plain", "日本語", "a👍🏽b", "é", "x\nstop"])
def test_a_character_comes_whole_with_its_last_byte(text: str) -> None:
    pieces, _ = told(text)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_reply_that_ends_inside_a_character_ends_before_it(cut: int) -> None:
    pieces, _ = told("ab👍".encode()[:-cut])
    assert "".join(pieces) == "ab"


def test_nothing_of_a_stop_string_is_ever_sent() -> None:
    pieces, stop = told("one two END three", "END", "EN D")
    assert ("".join(pieces), stop) == ("one two ", "END")


def test_what_only_began_as_a_stop_string_is_sent_after_all() -> None:
    pieces, stop = told("a EN", "END")
    assert ("".join(pieces), stop) == ("a EN", None)
    assert "E" not in "".join(pieces[:-1])


def test_the_first_of_two_stop_strings_counts_and_of_two_at_one_place_the_longer() -> None:
    assert told("abXYcZ", "Z", "XY")[1] == "XY"
    reply = ReplyText(lambda ids: "abXYZ" if ids else "", ["XY", "XYZ"])
    assert (reply.add([1]), reply.stop) == ("ab", "XYZ")


@pytest.mark.parametrize("byte", [b"", b"\xf0"])
def test_tokens_without_an_end_are_each_decoded_so_many_times_and_no_more(byte: bytes) -> None:
    decoded = []
    reply = ReplyText(lambda ids: (decoded.append(len(ids)), (byte * len(ids)).decode(errors="replace"))[1], [])
    for token in range(4000):
        reply.add([token])
    assert max(decoded) < 100


def test_text_that_opens_no_call_does_not_wait_for_the_reply_to_end() -> None:
    form = find_calls("[TOOL_CALLS][ARGS]", None)
    assert form is not None and form.read is not None
    reader = ReplyReader(None, ResponseParser(dict(form.read), prefix="", tools=[]), several=True)
    text = "[TOOL_CALLS]" + "abcd" * 100
    told = "".join(part.text for start in range(0, len(text), 4) for part in reader.add(text[start : start + 4]) if isinstance(part, Said))
    assert text.startswith(told) and len(told) > 200


def byte_level() -> PreTrainedTokenizerFast:
    """Bytes, whole characters, halves of them, and tokens that were added: one special, one not."""
    letters = byte_letters()
    names = {byte: letter for letter, byte in letters.items()}
    longer = ["the", " a", "é", "日本", "👍", "\n\n", *("日".encode()[:2], "👍".encode()[1:], "é!".encode()[1:])]
    tokens = [*letters, *("".join(names[b] for b in (text.encode() if isinstance(text, str) else text)) for text in longer)]
    made = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(dict.fromkeys(tokens))}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made)
    fast.add_special_tokens({"eos_token": "<|end|>"})
    fast.add_tokens(["<tool>"])
    return fast


BYTES = byte_level()


@given(st.lists(st.integers(0, len(BYTES) - 1), max_size=40), st.lists(st.integers(1, 5), min_size=1, max_size=40))
def test_tokens_that_are_known_alone_say_what_they_say_among_others(ids: list[int], sizes: list[int]) -> None:
    vocabulary, cut, at = Vocabulary(BYTES, frozenset(), len(BYTES), GenerationConfig()), [], 0
    for size in sizes * len(ids):
        cut.append(ids[at : at + size])
        at += size
    plain, known = ReplyText(vocabulary.text, ["a日"]), ReplyText(vocabulary.text, ["a日"], TokenTexts(vocabulary).alone)
    for some in filter(None, cut):
        assert plain.add(some) == known.add(some)
    assert (plain.rest(), plain.stop) == (known.rest(), known.stop)


def test_a_token_is_known_alone_where_it_is_whole_characters_of_a_text_of_bytes() -> None:
    alone = TokenTexts(Vocabulary(BYTES, frozenset(), len(BYTES), GenerationConfig())).alone
    ids = {name: number for name, number in BYTES.get_vocab().items()}
    assert (alone(ids["the"]), alone(ids["Ġa"]), alone(ids["æĹ¥æľ¬"])) == ("the", " a", "日本")
    assert alone(ids["æĹ"]) is alone(ids["<|end|>"]) is alone(ids["<tool>"]) is None
    assert alone(len(BYTES) + 5) is None


def test_a_token_of_another_kind_of_vocabulary_is_not_known_alone() -> None:
    """SentencePiece's text begins without the space that its first token has, and cleaning takes spaces of two tokens."""
    made = Tokenizer(models.BPE(vocab={"▁a": 0, "b": 1}, merges=[]))
    made.decoder = decoders.Metaspace()
    pieces = PreTrainedTokenizerFast(tokenizer_object=made)
    cleaned = byte_level()
    cleaned.clean_up_tokenization_spaces = True
    for tokenizer in (pieces, cleaned, None):
        texts = TokenTexts(Vocabulary(tokenizer, frozenset(), 300, GenerationConfig()))
        assert [texts.alone(token) for token in range(2)] == [None, None]
