"""The one error type that a user sees: a line naming the value, what is allowed and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Printed as one line without a traceback; the program exits with status 2."""

    def __str__(self) -> str:
        """One line, whatever is named in it: line ends and control characters of a file's or a user's text are shown, not obeyed."""
        text = super().__str__()
        return text if text.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def nearest(word: str, allowed: Iterable[str]) -> str:
    """``; did you mean X?`` when one of ``allowed`` is spelled like ``word``, else an empty string."""
    close = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
