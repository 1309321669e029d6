"""The one error type that a user sees: a line naming the value, what is allowed and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

_ALIKE = 0.65
"""One letter of three may differ: FP9 for FP8 is 0.67, nosuch for source 0.5."""
_BEGUN = 3
"""Letters that say which word was begun."""


class UserError(Exception):
    """Printed as one line without a traceback; the program exits with status 2."""

    def __str__(self) -> str:
        """One line, whatever is named in it: line ends and control characters of a file's or a user's text are shown, not obeyed."""
        text = super().__str__()
        return text if text.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """``error``, what it came of, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def nearest(word: str, allowed: Iterable[str]) -> str:
    """``; did you mean X?`` when one of ``allowed`` is spelled like ``word`` or begins with it, else an empty string. What dotted keys have
    in common at the front says nothing: ``a.b.x`` is like ``a.b.y`` as ``x`` is like ``y``."""
    likeness = {name: _likeness(word, name) for name in allowed}
    best = max(likeness, key=lambda name: likeness[name], default="")
    return f"; did you mean {best}?" if likeness.get(best, 0) >= _ALIKE else ""


def _likeness(word: str, name: str) -> float:
    """0 to 1; 0.5 is what words of the same few letters have by chance. A section is not like its keys."""
    if word.startswith(f"{name}."):
        return 0
    ours, theirs = word.lower().split("."), name.lower().split(".")
    while len(ours) > 1 and len(theirs) > 1 and ours[0] == theirs[0]:
        del ours[0], theirs[0]
    typed, known = ".".join(ours), ".".join(theirs)
    begun = len(typed) >= _BEGUN and known.startswith(typed)
    return max(difflib.SequenceMatcher(None, typed, known).ratio(), _ALIKE if begun else 0)
