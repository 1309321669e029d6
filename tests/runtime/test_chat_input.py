"""What a person types on a terminal, read by prompt_toolkit as from one."""

from __future__ import annotations

from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from penstock.runtime.tools.chat_input import TerminalInput


def typed(data: bytes) -> str:
    with create_pipe_input() as terminal, create_app_session(input=terminal, output=DummyOutput()):
        terminal.send_bytes(data)
        return TerminalInput({"/quit": "end"}, lambda: "").read()


def test_bytes_that_are_no_utf8_are_text_all_the_same() -> None:
    assert typed(b"a\xff\xfeb\r") == "a\ufffd\ufffdb"


def test_a_fence_holds_several_lines() -> None:
    assert typed('"""\rä\rb"""\r'.encode()) == "ä\nb"
