"""Modules that mix along tokens otherwise than by attention over pages: called row by row, each with the state of its sequence."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel

from penstock.planner.common.outside.cache_name import NEW, OLD, cache_name
from penstock.runtime.kv.batch.kv_pool import KvPool
from penstock.runtime.kv.batch.kv_windows import stateful, windows
from penstock.runtime.kv.batch.row_parts import cut, joined, own_forward
from penstock.runtime.model.rows import Row, Step

_TRIED = 3
"""Tokens by which is found out how a module goes on from a state: few, since states decay."""
_ROUNDINGS, _LEAST = 2, 1e-4
"""Of a norm: how many roundings of its dtype the same result by another way may be off, and what is allowed in any dtype."""


class _Held(NamedTuple):
    state: Any
    tokens: int
    """Of the sequence that have passed."""
    pretended: bool = False


class RowByRow:
    """Stands in for ``module``'s forward. For each row of the pass the module computes that row's tokens [1, tokens, ...] alone, with the
    state of its sequence.

    ``fresh`` makes a state when a sequence begins; the state lives until ``forget``. RuntimeError if a row does not continue where its
    sequence's state is: such a state cannot be taken back.
    """

    def __init__(self, module: nn.Module, step: Callable[[], Step], fresh: Callable[[], Any]):
        self.inner = KeptInside(module) if keeps_inside(module) else own_forward(module)
        self._step, self._fresh = step, fresh
        self._held: dict[int, _Held] = {}
        self._goes_on: bool | None = None
        """Whether the module goes on from a state by several tokens as it does one by one; None until it had to."""
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = self._step()
        parts, first = [], 0
        for row in step.rows:
            own = first, first + len(row.tokens), step.tokens
            parts.append(self._one(row, cut(args, *own), {name: cut(value, *own) for name, value in kwargs.items()}))
            first = own[1]
        return joined(parts)

    def pretend(self, sequence: int, tokens: int) -> None:
        """Take a fresh state for that of so many tokens: a rehearsal."""
        self._held[sequence] = _Held(self._fresh(), tokens, pretended=True)

    def forget(self, sequence: int) -> None:
        """The sequence has ended: its slot is free."""
        self._held.pop(sequence, None)

    def _one(self, row: Row, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        held = self._held.get(row.sequence) if row.start else None
        if held is None:
            held = _Held(self._fresh(), 0)
        if held.tokens != row.start:
            raise RuntimeError(f"sequence {row.sequence}: its state has seen {held.tokens} tokens, the row begins at {row.start}")
        self._held[row.sequence] = _Held(held.state, row.end)
        count = len(row.tokens)
        if row.start and count > 1 and not held.pretended and not self._takes_several(held.state, args, kwargs, count):
            return self._one_by_one(held.state, args, kwargs, count, count)
        return self._call(held.state, args, kwargs)

    def _takes_several(self, state: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], count: int) -> bool:
        """Some modules take a state for one token alone, and begin anew, or forget a part, where there are several. Found out once, by what
        they answer and by the state that they leave, with copies of ``state``: costs a few tokens one by one."""
        if self._goes_on is None:
            tried, once, often = min(count, _TRIED), deepcopy(state), deepcopy(state)
            several = self._call(once, cut(args, 0, tried, count), {n: cut(v, 0, tried, count) for n, v in kwargs.items()})
            each = self._one_by_one(often, args, kwargs, tried, count)
            pairs = zip([*tensors_in(several), *tensors_in(once)], [*tensors_in(each), *tensors_in(often)], strict=False)
            self._goes_on = all(_alike(got, want, each) for got, want in pairs)
        return self._goes_on

    def _one_by_one(self, state: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], wanted: int, count: int) -> Any:
        """The first ``wanted`` of ``count`` tokens."""
        each = ((i, i + 1, count) for i in range(wanted))
        return joined([self._call(state, cut(args, *own), {name: cut(value, *own) for name, value in kwargs.items()}) for own in each])

    def _call(self, state: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given = {name: state if isinstance(value, Cache) else value for name, value in kwargs.items()}
        if not any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
            given[cache_name(self.inner)] = state
        return self.inner(*(state if isinstance(value, Cache) else value for value in args), **given)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Those that ``value`` holds: a tensor, a container of such, or a cache of transformers."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    many = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else vars(value).values()
    for held in many:
        if isinstance(held, torch.Tensor | list | tuple | Mapping) or type(held).__module__ == Cache.__module__:
            yield from tensors_in(held)


def _alike(got: torch.Tensor, want: torch.Tensor, computed: Any) -> bool:
    """Whether both are the same but for rounding in the dtype of what was ``computed``."""
    if got.shape != want.shape or not want.is_floating_point():
        return got.shape == want.shape
    dtype = next(tensors_in(computed)).dtype
    return bool((got - want).float().norm() <= max(_LEAST, _ROUNDINGS * torch.finfo(dtype).eps) * want.float().norm())


class KeptInside:
    """The forward of a ``module`` that keeps its state in attributes of its own, where it lies for all sequences: given and taken as by
    modules that keep it in a cache. A state is a dict, empty when a sequence begins."""

    def __init__(self, module: nn.Module):
        self._forward = own_forward(module)
        self._places = [(owner, name) for owner in module.modules() for name in vars(owner) if name.endswith(("_state", "_states"))]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = next(kwargs.pop(name) for name in (NEW, OLD) if name in kwargs)
        for number, (owner, name) in enumerate(self._places):
            setattr(owner, name, state.get(number))
        out = self._forward(*args, **kwargs)
        state |= {number: getattr(owner, name) for number, (owner, name) in enumerate(self._places)}
        return out


def keeps_inside(module: nn.Module) -> bool:
    """Whether ``module`` is one of a layer's that has attributes for its state, as RecurrentGemma's blocks have."""
    return hasattr(module, "_setup_cache") and not isinstance(module, PreTrainedModel)


def attends(module: nn.Module) -> bool:
    """Whether ``module`` computes attention through `transformers`' interface, as its code says."""
    return "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(type(module))


class RowStates:
    """The states of all layers of ``model`` that keep something else than K and V: a cache of `transformers` for each sequence."""

    def __init__(self, model: PreTrainedModel, pool: KvPool):
        with_pages, with_state = windows(model.config), stateful(model.config)
        numbered = [m for m in model.modules() if getattr(m, "layer_idx", None) is not None]
        inmost = [m for m in numbered if not any(inner is not m and inner in numbered for inner in m.modules())]
        modules = [m for m in inmost if m.layer_idx in with_state and not (m.layer_idx in with_pages and attends(m))]
        inside = [m for m in model.modules() if keeps_inside(m)]
        self._layers = [RowByRow(module, lambda: pool.step, lambda: DynamicCache(config=model.config)) for module in modules]
        self._layers += [RowByRow(module, lambda: pool.step, dict) for module in inside]

    @property
    def any(self) -> bool:
        """Whether some layer keeps such a state."""
        return bool(self._layers)

    def pretend(self, sequence: int, tokens: int) -> None:
        """So many tokens of it have passed, in a rehearsal."""
        for layer in self._layers:
            layer.pretend(sequence, tokens)

    def forget(self, sequence: int) -> None:
        """The sequence has ended."""
        for layer in self._layers:
            layer.forget(sequence)
