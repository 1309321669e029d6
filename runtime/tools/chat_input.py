"""What a person types in a conversation: with prompt_toolkit on a terminal, else lines of standard input."""

from __future__ import annotations

import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FENCE = '"""'
"""A line of it begins and ends a text of several lines."""


def whole(typed: str) -> str:
    """``typed`` as text: prompt_toolkit hands bytes that are not UTF-8 on as halves of characters, which no tokenizer takes."""
    return typed.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


class TerminalInput:
    """Enter sends, Alt-Enter (or Ctrl-J) begins a new line; a text that begins with ``FENCE`` is sent once it ends so. Arrow keys find
    what was typed before, Tab completes ``commands``. ``status`` is shown at the bottom."""

    def __init__(self, commands: dict[str, str], status: Callable[[], str]):
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import Completer, Completion, WordCompleter
        from prompt_toolkit.document import Document
        from prompt_toolkit.history import InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
        from prompt_toolkit.styles import Style

        words, keys = WordCompleter(list(commands), meta_dict=dict(commands), sentence=True), KeyBindings()

        class Commands(Completer):
            def get_completions(self, document: Document, event: object) -> Iterator[Completion]:
                if document.text.startswith("/") and "\n" not in document.text:
                    yield from words.get_completions(document, event)  # type: ignore[arg-type]

        @keys.add("enter")
        def _(event: KeyPressEvent) -> None:
            text = event.current_buffer.text
            if text.startswith(FENCE) and (len(text) < 2 * len(FENCE) or not text.endswith(FENCE)):
                event.current_buffer.insert_text("\n")
            else:
                event.current_buffer.validate_and_handle()

        @keys.add("escape", "enter")
        @keys.add("c-j")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory(),
            multiline=True,
            key_bindings=keys,
            completer=Commands(),
            complete_while_typing=True,
            prompt_continuation="  ",
            bottom_toolbar=status,
            style=Style.from_dict({"bottom-toolbar": "noreverse fg:ansibrightblack"}),
            reserve_space_for_menu=5,
        )

    def read(self) -> str:
        """The next text. EOFError at Ctrl-D; KeyboardInterrupt at Ctrl-C, by which what was typed is gone."""
        return whole(self._session.prompt([("bold ansicyan", "> ")])).removeprefix(FENCE).removesuffix(FENCE).strip("\n")


@contextmanager
def unechoed(terminal: bool) -> Iterator[None]:
    """Inside, the terminal on standard input shows nothing of what is typed, so that a reply stays in one piece; it is read afterwards."""
    if not terminal:
        yield
        return
    descriptor = sys.stdin.fileno()
    usual = termios.tcgetattr(descriptor)
    quiet = [*usual[:3], usual[3] & ~termios.ECHO, *usual[4:]]
    try:
        termios.tcsetattr(descriptor, termios.TCSANOW, quiet)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, usual)


class PipedInput:
    """A line is a text. Several lines between two lines of ``FENCE`` are one."""

    def read(self) -> str:
        """The next text. EOFError where there is none."""
        line = self._line()
        if line.strip() != FENCE:
            return line
        lines = []
        while (line := self._line(end=FENCE)).strip() != FENCE:
            lines.append(line)
        return "\n".join(lines)

    def _line(self, end: str | None = None) -> str:
        line = sys.stdin.buffer.readline().decode("utf-8", errors="replace")
        if not line and end is not None:
            return end
        if not line:
            raise EOFError
        return line.rstrip("\r\n")
