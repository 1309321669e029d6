"""Where the recorded kernels of a prompt's layers read and write: one memory, in which all passes lie in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from penstock.runtime.recorded.prompts.token_tensors import Arguments, TokenTensors


@dataclass(frozen=True)
class Places:
    """Of so many tokens. Made once: to cut a tensor takes a host as long as to launch a kernel."""

    state: torch.Tensor
    """[1, tokens, hidden]: what a layer is given, and then what it made."""
    given: Sequence[torch.Tensor]
    """What layers are given beside it of each token."""
    states: Sequence[torch.Tensor]
    """Query, key and value, [1, heads, tokens, dim] each."""
    said: torch.Tensor
    """[1, tokens, heads, dim]: what attention says."""


@dataclass
class PromptMemory:
    """Of passes of at most ``tokens``."""

    tokens: int
    state: torch.Tensor
    of_tokens: TokenTensors
    given: Sequence[torch.Tensor]
    met: Sequence[Arguments]
    """Each layer's arguments as they were recorded: kernels read the other tensors of these."""
    filled: list[torch.Tensor | None]
    """What was copied to ``given`` last. Layers of a pass are given the same objects."""
    states: Sequence[torch.Tensor] = ()
    """Query, key and value, once a layer has attended."""
    said: torch.Tensor | None = None
    _places: dict[int, Places] = field(default_factory=dict)

    @classmethod
    def of(cls, state: torch.Tensor, met: Sequence[Arguments]) -> PromptMemory:
        """For passes of as many tokens as ``state`` has; layers were given ``met``."""
        of_tokens = TokenTensors(met[0], state.shape[1])
        given = [one.clone() for one in of_tokens.of(met[0])]
        return cls(state.shape[1], state, of_tokens, given, met, [None] * len(given))

    def attended(self, *states: torch.Tensor) -> torch.Tensor:
        """A layer's query, key and value are those that attention reads -> where it is to say what it says. RuntimeError where their sizes
        are not those of the layers before."""
        if not self.states:
            self.states = [torch.empty_like(one) for one in states]
            (query, _, value), tokens = states, self.tokens
            self.said = value.new_empty(1, tokens, query.shape[1], value.shape[3])
        for ours, theirs in zip(self.states, states, strict=True):
            if ours.shape != theirs.shape:
                raise RuntimeError("layers attend with heads of unlike sizes")
            torch.mul(theirs, 1, out=ours)
        assert self.said is not None, "it lies beside the states"
        return self.said

    def places(self, tokens: int) -> Places:
        """Those of the first ``tokens``, once a layer has attended."""
        if tokens not in self._places:
            assert self.said is not None, "a layer has attended"
            given = [one[:, :tokens] if one.ndim > 1 else one[:tokens] for one in self.given]
            states = [one[:, :, :tokens] for one in self.states]
            self._places[tokens] = Places(self.state[:, :tokens], given, states, self.said[:, :tokens])
        return self._places[tokens]

    def fill(self, places: Places, hidden: torch.Tensor, given: Arguments) -> None:
        """Copy what a layer is given to where its kernels read it, in one call; what lies there already is left."""
        into, source = [places.state], [hidden]
        for number, one in enumerate(self.of_tokens.of(given)):
            if one is not self.filled[number]:
                self.filled[number] = one
                into.append(places.given[number])
                source.append(one)
        torch._foreach_copy_(into, source)

    def forget(self) -> None:
        """A pass comes whose tokens are others."""
        self.filled = [None] * len(self.given)
