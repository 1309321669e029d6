"""The replies of a run on standard output, each as soon as it is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console

from penstock.planner.common.console import harmless
from penstock.runtime.told.piecewise import PieceByPiece


class Texts:
    """One reply comes token by token where a person reads it; several come batch by batch, each with its number. ``quiet`` prints texts
    alone, one after the other."""

    def __init__(self, console: Console, decode: Callable[[list[int]], str], requests: int, quiet: bool):
        self._console, self._decode, self._several, self._quiet = console, decode, requests > 1, quiet
        self.live = console.is_terminal and not self._several
        """Whether tokens are printed as they come."""
        self.begun = False
        """Whether any token is known."""
        self._pieces = PieceByPiece(decode)

    def hear(self, replies: Sequence[Sequence[int]]) -> None:
        """These tokens of a batch's replies are known so far."""
        if self.live and not self.begun and not self._quiet:
            self._console.rule(style="dim")
        self.begun = True
        for token in replies[0][self._pieces.count :] if self.live else ():
            self._print(self._pieces.add(token), end="")

    def over(self, number: int, tokens: list[int], cut_tokens: int) -> None:
        """Reply ``number`` is complete; its prompt lost so many tokens at its head."""
        if self.live:
            self._print(self._pieces.rest())
            return
        if not self._quiet:
            cut = f" (the prompt's first {cut_tokens} tokens were cut)" if cut_tokens else ""
            self._console.rule(f"text {number}{cut}", align="left", style="dim")
        self._print(self._decode(tokens))

    def _print(self, text: str, end: str = "\n") -> None:
        if text or end:
            print(harmless(text) if self._console.is_terminal else text, end=end, flush=True, file=self._console.file)
