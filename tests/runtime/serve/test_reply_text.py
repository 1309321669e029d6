"""The text of a reply, as it is sent bit by bit."""

from __future__ import annotations

import pytest

from penstock.runtime.serve.front.reply_text import ReplyText


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
