"""Hidden states of a pass's tokens, where steps that were recorded reach them, too."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel


class HiddenRows:
    """What a model computes of each token of a pass, in the order of its rows: [tokens, hidden].

    Passes of up to ``few`` tokens use one buffer, which stays where it is, since a recorded step has its address. Longer ones are never
    recorded: their states are kept as they were computed, until :meth:`drop`. Costs ``few`` x hidden, and the longest pass x hidden.
    """

    def __init__(self, few: int, hidden: int, dtype: torch.dtype, device: torch.device):
        self._few = torch.zeros(few, hidden, dtype=dtype, device=device)
        self._many: torch.Tensor | None = None

    def put(self, states: torch.Tensor) -> None:
        """``states`` [tokens, hidden] of the next pass, or of the one in progress."""
        if len(states) <= len(self._few):
            self._few[: len(states)].copy_(states)
        else:
            self._many = states

    def of(self, tokens: int) -> torch.Tensor:
        """The states of a pass of so many tokens: [tokens, hidden]. Zeros in a rehearsal, where nobody put any."""
        if tokens <= len(self._few):
            return self._few[:tokens]
        if self._many is None or len(self._many) != tokens:
            return self._few.new_zeros(tokens, self._few.shape[1])
        return self._many

    def drop(self) -> None:
        """Nobody asks for the last pass any more."""
        self._many = None

    def follow(self, model: PreTrainedModel) -> None:
        """Have each pass of ``model`` put the states that its LM head reads, the last norm counted."""

        def hook(_module: object, _args: object, out: object) -> None:
            self.put(getattr(out, "last_hidden_state", out)[0])  # type: ignore[index]

        model.get_decoder().register_forward_hook(hook)
