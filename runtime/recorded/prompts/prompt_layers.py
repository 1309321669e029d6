"""Passes with prompts over a resident model: what has the same shapes in all of them is recorded, between the attention of one layer and
that of the next. Attention is launched as ever, for what lies before a prompt differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from penstock.planner.contract.decided.recording import serves_prompt
from penstock.runtime.kv.batch.row_parts import own_forward
from penstock.runtime.model.fused.direct import ATTENDS
from penstock.runtime.model.rows import Step
from penstock.runtime.recorded.agreement import beyond_rounding
from penstock.runtime.recorded.prompts.prompt_memory import PromptMemory
from penstock.runtime.recorded.prompts.token_tensors import Arguments, Path
from penstock.runtime.recorded.tabled_rows import refusal


class Pieces(Protocol):
    """As :class:`penstock.runtime.recorded.card_pieces.CardPieces`."""

    def warming(self) -> AbstractContextManager[None]: ...
    def recording(self) -> AbstractContextManager[None]: ...
    def cut(self) -> int: ...
    def launch(self, number: int) -> None: ...
    def close(self) -> None: ...


class Attention(Protocol):
    """As :class:`penstock.runtime.kv.attention.paged_attention.PagedAttention`."""

    def keeps(self, module: Any) -> bool: ...
    def run(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any) -> Any: ...


@dataclass
class _Layer:
    """A layer's pieces before and behind its attention, and what that is asked with beside the tokens' states."""

    begin: int
    module: nn.Module
    asked: Any
    more: Mapping[str, Any]
    asked_at: Path = ()
    """Where ``asked`` lies among the layer's arguments."""
    end: int = 0


class RecordedLayer:
    """Stands in for a layer's forward ``inner``."""

    def __init__(self, inner: Callable[..., Any], number: int, layers: PromptLayers):
        self.inner, self._number, self._layers = inner, number, layers

    def __call__(self, hidden: torch.Tensor, *rest: Any, **named: Any) -> Any:
        if not self._layers.serves(hidden.shape[1]):
            return self.inner(hidden, *rest, **named)
        return self._layers.launch(self._number, hidden, Arguments(rest, named))


class PromptLayers:
    """``layers`` of a resident model, computed in ``pieces`` in passes with prompts once :meth:`record` has recorded them. Costs the
    activations of one layer over the recorded tokens, and two graphs a layer."""

    def __init__(self, layers: Iterable[nn.Module], attention: Attention, pieces: Pieces):
        self._attention, self._pieces, self._modules = attention, pieces, list(layers)
        self._own = [own_forward(layer) for layer in self._modules]
        self._memory: PromptMemory | None = None
        self._layers: list[_Layer] = []
        self._now = False
        self.refused: str | None = None
        """Why passes are launched one kernel after the other; None where they are not."""
        self.launched = 0
        """Layers that were launched in pieces."""

    @property
    def tokens(self) -> int:
        """That are recorded; 0: none are."""
        return 0 if self._memory is None else self._memory.tokens

    @torch.inference_mode()
    def record(self, run: Callable[[], object]) -> None:
        """``run`` is a pass, whose tokens are one part. It is run three times: for kernels to be loaded, to be recorded, and as it was
        recorded, to be held to the first. Others of as many tokens, or a few less, are launched in pieces from now on. Whoever waits for
        hidden states of these passes gets them, also where nothing can be recorded: :attr:`refused`."""
        met: list[Arguments] = []
        given: list[torch.Tensor] = []
        made: list[torch.Tensor] = []

        def meet(number: int, hidden: torch.Tensor, *rest: Any, **named: Any) -> Any:
            met.append(Arguments(rest, named))
            given[:1] = given[:1] or [hidden.clone()]
            with self._pieces.warming():
                found = self._own[number](hidden, *rest, **named)
            made[:] = [found]
            return found

        with self._standing_in(meet):
            run()

        def capture(number: int, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            if number == 0:  # all of them at once: hops between layers are not to be recorded
                self._memory = self._recorded(given[0], met)
            return hidden

        with self._standing_in(capture):
            run()
        if self._memory is None:
            run()
            return
        self._hold_to(made[0], run)
        if self.refused is not None:
            self.stop()
            return
        for number, (module, own) in enumerate(zip(self._modules, self._own, strict=True)):
            _put(module, RecordedLayer(own, number, self))

    def _hold_to(self, wanted: torch.Tensor, run: Callable[[], object]) -> None:
        """Compute ``run`` as it was recorded. Where rounding does not explain what lies between the last layer and ``wanted``, it is
        refused."""

        def launch(number: int, hidden: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
            found = self.launch(number, hidden, Arguments(rest, named))
            if number == len(self._own) - 1 and (off := beyond_rounding(found, wanted, len(self._own))) is not None:
                self.refused = f"what was recorded is {off}"
            return found

        with self._standing_in(launch):
            run()
        self.launched = 0  # what a run is told of are its own

    def begin_pass(self, step: Step) -> None:
        """``step`` comes next."""
        self._now = step.has_prompt
        if self._memory is not None:
            self._memory.forget()

    def serves(self, tokens: int) -> bool:
        """Whether a layer's part of the pass is launched in pieces."""
        return self._now and serves_prompt(self.tokens, tokens)

    def launch(self, number: int, hidden: torch.Tensor, given: Arguments) -> torch.Tensor:
        """What layer ``number`` makes of ``hidden`` [1, tokens, hidden], whose other arguments are ``given``."""
        memory, layer = self._memory, self._layers[number]
        assert memory is not None, "it was recorded"
        places = memory.places(hidden.shape[1])
        memory.fill(places, hidden, given)
        self._pieces.launch(layer.begin)
        query, key, value = places.states
        said, _ = self._attention.run(layer.module, query, key, value, given.at(layer.asked_at), **layer.more)
        places.said.copy_(said)
        self._pieces.launch(layer.end)
        self.launched += 1
        return places.state.clone()

    def stop(self) -> None:
        """Passes are launched as ever, and the memory is given back. Safe to call twice."""
        for module, own in zip(self._modules, self._own, strict=True):
            _put(module, own)
        self._memory, self._layers = None, []
        self._pieces.close()

    @contextmanager
    def _standing_in(self, by: Callable[..., Any]) -> Iterator[None]:
        for number, module in enumerate(self._modules):
            _put(module, partial(by, number))
        try:
            yield
        finally:
            for module, own in zip(self._modules, self._own, strict=True):
                _put(module, own)

    def _recorded(self, state: torch.Tensor, met: Sequence[Arguments]) -> PromptMemory | None:
        """All layers, whose arguments are ``met``, over ``state``."""
        memory = PromptMemory.of(state, met)
        try:
            with self._attended(memory), self._pieces.recording():
                for own, given in zip(self._own, met, strict=True):
                    self._record_layer(memory, own, given)
        except RuntimeError as error:
            self.refused, self._layers = refusal(error), []
            return None
        return memory

    @contextmanager
    def _attended(self, memory: PromptMemory) -> Iterator[None]:
        """Inside, attention ends a piece instead of being computed."""

        def cut(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: Any, **more: Any) -> Any:
            if not self._attention.keeps(module):
                raise RuntimeError("a layer attends with K and V of another one")
            said = memory.attended(query, key, value)
            self._layers.append(_Layer(self._pieces.cut(), module, asked, more))
            return said, None

        modules = [module for layer in self._modules for module in layer.modules() if hasattr(module, ATTENDS)]
        before = [getattr(module, ATTENDS) for module in modules]
        for module in modules:
            setattr(module, ATTENDS, cut)
        try:
            yield
        finally:
            for module, attends in zip(modules, before, strict=True):
                setattr(module, ATTENDS, attends)

    def _record_layer(self, memory: PromptMemory, own: Callable[..., Any], given: Arguments) -> None:
        if not memory.of_tokens.are_those_of(given):
            raise RuntimeError("layers are given unlike tensors beside their hidden states")
        met, ours = len(self._layers), memory.of_tokens.replaced(given, memory.given)
        made = own(memory.state, *ours.rest, **ours.named)
        if not isinstance(made, torch.Tensor) or len(self._layers) != met + 1:
            raise RuntimeError("a layer attends once and says its hidden states alone, where prompts are recorded")
        torch.mul(made, 1, out=memory.state)
        layer, asked_at = self._layers[-1], ours.path_of(self._layers[-1].asked)
        if asked_at is None:
            raise RuntimeError("a layer makes a mask of its own for its attention")
        layer.asked_at, layer.end = asked_at, self._pieces.cut()


def _put(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Have ``forward`` compute it, between whatever stands on both sides."""
    standing = module.forward
    if hasattr(standing, "inner") and not isinstance(standing, RecordedLayer):
        standing.inner = forward
    else:
        module.forward = forward
