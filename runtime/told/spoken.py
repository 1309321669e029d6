"""A reply as it comes: what is reasoned apart from the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.runtime.asked.reasoning import Piece, Splitter
from penstock.runtime.told.piecewise import PieceByPiece


class Spoken:
    """Tells ``say`` what each token adds, without the line ends around what is reasoned. Without a ``splitter`` all of it is answer."""

    def __init__(self, decode: Callable[[list[int]], str], splitter: Splitter | None, say: Callable[[Piece], None]):
        self._pieces, self._splitter, self._say = PieceByPiece(decode), splitter, say
        self._last: bool | None = None
        self._ends = ""

    @property
    def count(self) -> int:
        """Tokens so far."""
        return self._pieces.count

    @property
    def only_reasons(self) -> bool:
        """Whether something was told, and none of it is answer."""
        return self._last is True

    def add(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._split(self._pieces.add(token))

    def rest(self) -> None:
        """The reply has ended."""
        self._split(self._pieces.rest())
        for piece in self._splitter.rest() if self._splitter is not None else ():
            self._tell(piece)

    def _split(self, text: str) -> None:
        for piece in self._splitter.add(text) if self._splitter is not None else [Piece(text)]:
            self._tell(piece)

    def _tell(self, piece: Piece) -> None:
        new = self._splitter is not None and piece.reasoning is not self._last
        text = piece.text.lstrip("\n") if new else self._ends + piece.text
        if not text:
            return
        bare = text.rstrip("\n") if piece.reasoning else text
        self._ends, self._last = text[len(bare) :], piece.reasoning
        self._say(Piece(bare, piece.reasoning))
