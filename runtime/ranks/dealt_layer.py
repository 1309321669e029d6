"""A layer of a rank: what it computes comes from the rank of the layer before it, and goes to that of the layer behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from penstock.runtime.hops.hop import Hop
from penstock.runtime.kv.batch.row_parts import joined
from penstock.runtime.ranks.pass_parts import PassParts


class Ways(Protocol):
    """The hops of one rank: ``hops.hops.Hops`` fits."""

    def before(self, peer: int) -> Hop: ...
    def behind(self, peer: int) -> Hop: ...
    def of(self, peer: int) -> Hop: ...
    def expect(self, parts: int) -> None: ...


class DealtLayer:
    """Stands in for a layer's forward ``inner``. Each part of a pass is received, computed and sent on before the next one is computed.
    Hidden states of that one come meanwhile. ``before`` and ``behind`` are the ranks of the layers beside it; None: there is none, or it is
    this rank's own.

    Returns what the layer made where nothing is sent; else hidden states of no meaning, since the layer behind receives its own.
    """

    def __init__(
        self,
        inner: Callable[..., Any],
        ways: Callable[[], Ways],
        parts: Callable[[], PassParts | None],
        before: int | None,
        behind: int | None,
    ):
        self.inner = inner
        self._ways, self._parts, self._before, self._behind = ways, parts, before, behind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs.pop("hidden_states")
        parts, rest, tokens = self._parts(), args[1:], hidden.shape[1]
        bounds = [(0, tokens)] if parts is None else parts.bounds
        given = [(rest, kwargs)] if parts is None else parts.given(rest, kwargs, tokens)
        turns = iter([None]) if parts is None else parts.turns()
        behind, made = None if self._behind is None else self._ways().behind(self._behind), []
        for own, (others, named), _ in zip(self._inputs(hidden, bounds), given, turns, strict=True):
            made.append(self.inner(own, *others, **named))
            if behind is not None:
                behind.send(hidden_of(made[-1]))
                made = made[-1:]
        if behind is not None and len(bounds) > 1:
            return (hidden, *made[0][1:]) if isinstance(made[0], tuple) else hidden
        return joined(made)

    def _inputs(self, hidden: torch.Tensor, bounds: list[tuple[int, int]]) -> Iterator[torch.Tensor]:
        """The hidden states of each part; those of the next one are asked for first."""
        if self._before is None:
            yield from (hidden[:, first:end] for first, end in bounds)
            return
        hop, coming = self._ways().before(self._before), None
        for (first, end), following in zip(bounds, [*bounds[1:], None], strict=True):
            own, arrive = coming or _asked(hop, hidden, first, end)
            coming = None if following is None else _asked(hop, hidden, *following)
            arrive()
            yield own


def _asked(hop: Hop, hidden: torch.Tensor, first: int, end: int) -> tuple[torch.Tensor, Callable[[], None]]:
    own = torch.empty_like(hidden[:, first:end])
    return own, hop.coming(own)


def hidden_of(made: Any) -> torch.Tensor:
    """What a layer returned: its hidden states, or those and more."""
    found = made[0] if isinstance(made, tuple) else made
    assert isinstance(found, torch.Tensor)
    return found
