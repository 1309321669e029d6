"""A layer's routed experts, one after the other as they arrive: what the model computes in place of transformers' own functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from penstock.planner.common.errors import UserError
from penstock.planner.contract.experts.expert_cache import Routing
from penstock.runtime.experts.asked_ahead import Ahead
from penstock.runtime.experts.expert_rows import ExpertRows, height_of, heights
from penstock.runtime.experts.products.beside_card import Made
from penstock.runtime.experts.products.expert_products import Parameters, clamps, in_turn, product_of
from penstock.runtime.experts.products.expert_table import ExpertTable
from penstock.runtime.experts.products.staged_experts import StagedExperts, Staging
from penstock.runtime.experts.tiers.expert_stats import IssueTime
from penstock.runtime.formats.kernels.on_card import clamped_gate
from penstock.runtime.model.foreign_experts import is_routed_by_inputs
from penstock.runtime.store.decoder import decoder_layers
from penstock.runtime.store.expert_modules import ExpertsModule, expert_parameters, layers_with_experts

NAME = "penstock"
"""Of our function in transformers' experts interface."""
_RUNNER = "penstock_experts"

Runner = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""[tokens, hidden], [tokens, top_k] expert numbers and weights -> [tokens, hidden]."""
Fit = Callable[[Sequence[int]], int]
"""Experts -> how many of them, from the first, are computed together: at least one."""
Arrived = tuple[int, Mapping[str, torch.Tensor]]
"""An expert and its parameters, without the leading dimension, where the model computes."""
Recorded = Callable[[Sequence[Parameters | Made], Callable[[], object]], torch.Tensor | None]
"""All of a token's experts, in its router's order -> [1, hidden], weighted and summed by a recorded launch; None where it cannot. It calls
:attr:`Group.come` just before."""


class Group(NamedTuple):
    """Experts that are there together."""

    arrived: Sequence[Arrived]
    others: int = 0
    """Those that are computed elsewhere."""
    made: Callable[[], Sequence[Made]] = tuple
    """These, for kernels issued from the call on, which wait for all of them."""
    come: Callable[[], object] = tuple
    """Kernels that are issued from the call on find ``arrived``. The host may have to wait for the SSD."""


class Tabled(NamedTuple):
    """What recorded kernels of a layer find one token's experts by: where they lie, and where they are copied to first, if they are.
    ``results`` [rows, hidden] has rows of experts that are computed elsewhere, if any are."""

    table: ExpertTable
    staged: StagedExperts | None
    results: torch.Tensor | None


class ExpertSource(Protocol):
    """Where a layer's experts come from, each of them when it has arrived."""

    def route(self, index: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The experts to compute with, [tokens, top_k], where the router chose ``index`` for ``hidden`` [tokens, width]. The choice is read
        back next."""

    def visit(self, layer: int, routing: Routing, fit: Fit) -> Iterator[Sequence[Arrived | Made]]:
        """Each of ``routing``'s experts once, those together that are there and ``fit``. What computes with them is issued before the next
        are asked for."""

    def groups(self, layer: int, routing: Routing) -> Iterator[Group]:
        """The same of one token, those together that are there together. What computes with a group is issued before the next."""


class Watcher(Protocol):
    """Is shown every routing: a recorder."""

    def routed(self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> None:
        """``hidden`` is [tokens, width], ``index`` and ``weights`` are [tokens, top_k]."""


class Sharing(Protocol):
    """Other ranks, each of which has a slice of every expert."""

    def tell(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> None:
        """What is computed next: as :data:`Runner`."""

    def summed(self, made: torch.Tensor) -> torch.Tensor:
        """``made`` here [tokens, hidden] and what the others made."""


class LayerExperts:
    """One layer's experts as its module calls them.

    Of several tokens, experts that are there have all but their two products in common: rows are gathered, gated and put apart for all of
    them at once. To launch that for each expert takes longer than a link takes for one of 5 MB.

    On a GPU an expert's rows of a prompt are more than its own, so that products have few different heights. A new height costs 2 ms once a
    process, to find and load its kernel; nothing is launched meanwhile. :meth:`warm_up` computes each height once.

    Memory beside input and output of ``tokens`` rows: an output row for each token and expert; the same weighted; for the largest expert,
    or experts computed together, their gathered rows (never above ``tokens``), their gate and up, and the product. Each visit reads the
    routing back once, which waits for the router. Scores of the layer ahead come with the same wait.
    """

    def __init__(self, module: ExpertsModule, layer: int):
        self.of_prompts = False
        """Whether the pass in progress computes prompts, or decodes."""
        self.issued = IssueTime()
        self.layer = layer
        """By which its source knows it."""
        self.sharing: Sharing | None = None
        """Who computes with the other slices of this layer's experts; None: there are none, or another rank asks."""
        self._module = module
        self._first = product_of(module, "gate_up_proj" if module.has_gate else "up_proj")
        self._last = product_of(module, "down_proj")
        self._clamps = clamps(module)

    def feed(self, source: ExpertSource, ahead: Ahead | None = None, watcher: Watcher | None = None) -> None:
        """Compute with experts from ``source`` from now on."""
        self._source, self._ahead, self._watcher = source, ahead, watcher

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, recorded: Recorded | None = None) -> torch.Tensor:
        """[tokens, hidden], [tokens, top_k] expert numbers and weights -> [tokens, hidden]: what grouped_mm_experts_forward gives.
        ``recorded`` computes for one token of just this ``hidden`` and these ``weights``, where its experts come together."""
        if self.sharing is not None:
            self.sharing.tell(hidden, index, weights)
        index = self._source.route(index, hidden)
        tokens, top_k = index.shape
        if self._watcher is not None:
            self._watcher.routed(self.layer, hidden, index, weights)
        ahead = None if self._ahead is None else self._ahead.scores(self.layer, hidden, index)
        scores = None if ahead is None else ahead.mean(0).to("cpu", non_blocking=True)  # there when the choice is
        order = torch.sort(index.reshape(-1), stable=True).indices if tokens > 1 else None
        chosen = index.cpu().numpy()
        begun_s = time.thread_time()
        routing = Routing(chosen, self.of_prompts, None if scores is None else scores.numpy())
        out = self._each(hidden, weights, routing, recorded) if order is None else self._grouped(hidden, order, weights, routing)
        made = out if out.dtype == hidden.dtype else out.to(hidden.dtype)
        if not self.of_prompts:
            self.issued.visits += 1
            self.issued.seconds += time.thread_time() - begun_s
        return made if self.sharing is None else self.sharing.summed(made)

    def warm_up(self, tokens: int) -> None:
        """Compute products of all heights that a pass of a prompt's ``tokens`` may have."""
        ((arrived,),) = self._source.visit(self.layer, Routing(np.zeros((1, 1), np.intp), prompt=True), len)
        parameters = arrived[1]
        assert not isinstance(parameters, torch.Tensor), "nothing of a prompt is computed elsewhere"
        device = next(iter(parameters.values())).device
        for rows in heights(tokens):
            self._apply(torch.zeros(rows, self._first.columns, dtype=self._first.dtype, device=device), (rows,), (parameters,))

    def tabled(
        self,
        alias: Callable[[torch.Tensor], torch.Tensor],
        staging: Staging,
        results: torch.Tensor | None,
        hidden: torch.Tensor,
        weights: torch.Tensor,
    ) -> Tabled | None:
        """For launches that :meth:`by_table` records of a step with ``hidden`` [tokens, hidden] and ``weights`` [tokens, top_k]; None where
        they are of several tokens, or nothing finds such experts. Called while experts are rehearsed; loads the kernels."""
        if len(hidden) != 1 or self.sharing is not None:
            return None
        count = weights.shape[1]
        first = next(iter(self._source.visit(self.layer, Routing(np.arange(count)[None], prompt=False), len)))[0][1]
        assert not isinstance(first, torch.Tensor), "nothing is computed elsewhere in a rehearsal"
        table = ExpertTable(count, first, hidden.device, alias)
        found = Tabled(table, None, results)
        if self.by_table(hidden, weights, found) is not None:
            return found
        staged = staging.of(count, first, hidden.device)
        found = Tabled(table, staged, results)
        return None if staged is None or self.by_table(hidden, weights, found) is None else found

    def by_table(self, hidden: torch.Tensor, weights: torch.Tensor, found: Tabled) -> torch.Tensor | None:
        """[1, hidden], [1, top_k] -> [1, hidden]: as a call does with the experts that the table names when the kernels run. None where no
        kernel finds them."""
        table, staged, results = found
        table.fetch()
        if staged is not None:
            rows = self._rows(hidden, staged.experts) if staged.gather(table.first, table.numbers) else None
        else:
            first = self._first.tabled(hidden, table.first, table.numbers)
            rows = None if first is None else self._last.tabled(self._activated(first), table.first, table.numbers)
        if rows is None:
            return None
        return weighted(rows if results is None else table.with_rows_of(results, rows), weights).to(hidden.dtype)

    def _rows(self, hidden: torch.Tensor, experts: Sequence[Parameters]) -> torch.Tensor:
        """[1, hidden] -> [experts, hidden]: one token's."""
        return self._last.each(self._activated(self._first.each(hidden, experts)), experts)

    def _each(self, hidden: torch.Tensor, weights: torch.Tensor, routing: Routing, recorded: Recorded | None) -> torch.Tensor:
        """One token, [1, hidden] -> [1, hidden]. Nothing is gathered: that is most of what there is to launch."""
        wanted = routing.experts
        place: dict[int, int] = {}
        rows: list[torch.Tensor] = []
        whole = done = None
        for arrived, others, made, come in self._source.groups(self.layer, routing):
            if recorded is not None and len(arrived) + others == len(wanted):
                experts: dict[int, Parameters | Made] = dict(arrived)
                if others:
                    experts |= {one.expert: one for one in made()}
                done = recorded([*map(experts.__getitem__, wanted)], come)
                if done is not None:
                    continue
            come()
            if not place:
                place, rows = {expert: k for k, expert in enumerate(wanted)}, [hidden] * len(wanted)
            if arrived:
                taken = sorted(arrived, key=lambda one: place[one[0]])
                found = self._rows(hidden, [expert for _, expert in taken])
                whole = found if len(taken) == len(place) else None
                for (expert, _), row in zip(taken, found.split(1), strict=True):
                    rows[place[expert]] = row
            for one in made():
                rows[place[one.expert]] = one.rows
        return weighted(torch.cat(rows) if whole is None else whole, weights) if done is None else done

    def _grouped(self, hidden: torch.Tensor, order: torch.Tensor, weights: torch.Tensor, routing: Routing) -> torch.Tensor:
        """[tokens, hidden] -> the same, each expert with all of its tokens. ``order`` sorts pairs of token and expert by expert."""
        pairs, top_k = routing.chosen.size, routing.chosen.shape[1]
        rows = ExpertRows.of(order, routing.chosen, self._module.num_experts, height_of(hidden, routing.prompt))
        out = hidden.new_empty(pairs + 1, hidden.shape[-1])
        for together in self._source.visit(self.layer, routing, rows.fit):
            here: list[int] = []
            parameters: list[Parameters] = []
            for one in together:
                if isinstance(one, Made):
                    out[rows.own(one.expert)] = one.rows
                else:
                    here.append(one[0])
                    parameters.append(one[1])
            if here:
                tokens, places = rows.taken(here)
                out.index_copy_(0, places, self._apply(hidden.index_select(0, tokens), rows.heights(here), parameters))
        return (out[:pairs] * weights.reshape(-1, 1)).view(len(hidden), top_k, -1).sum(dim=1)

    def _apply(self, rows: torch.Tensor, heights: Sequence[int], experts: Sequence[Parameters]) -> torch.Tensor:
        """[rows, hidden] -> the same: so many for each of ``experts``, one behind the other."""
        return in_turn(self._last, self._activated(in_turn(self._first, rows, heights, experts)), heights, experts)

    def _activated(self, first: torch.Tensor) -> torch.Tensor:
        module = self._module
        if self._clamps is not None and first.is_cuda:
            gate = clamped_gate(first.device, *self._clamps)
            return module._apply_gate(first) if gate is None else gate(first)
        return module._apply_gate(first) if module.has_gate else module.act_fn(first)


def weighted(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[top_k, hidden] of one token's experts, [1, top_k] -> [1, hidden]."""
    return (rows * weights.T).sum(dim=0, keepdim=True)


class WholeExperts:
    """Of a model that has them all: the unstreamed one, to compare with."""

    def __init__(self, layers: nn.ModuleList):
        self._parameters = {layer: expert_parameters(module) for layer, module in layers_with_experts(layers)}

    def route(self, index: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return index

    def visit(self, layer: int, routing: Routing, fit: Fit) -> Iterator[Sequence[Arrived]]:
        for expert in routing.experts:
            yield [(expert, {name: parameter[expert] for name, parameter in self._parameters[layer].items()})]

    def groups(self, layer: int, routing: Routing) -> Iterator[Group]:
        yield Group([one for (one,) in self.visit(layer, routing, len)])


def run_experts(module: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What transformers calls in place of a function of its own."""
    return getattr(module, _RUNNER)(hidden, index, weights)


class ExpertsInTurn:
    """Has every MoE layer of a model compute with experts as they arrive: :class:`LayerExperts`, which are fed later."""

    def convert(self, model: PreTrainedModel) -> None:
        ALL_EXPERTS_FUNCTIONS.register(NAME, run_experts)
        layers = decoder_layers(model)
        for layer, module in layers_with_experts(layers):
            setattr(module, _RUNNER, LayerExperts(module, layer))
            module.config._experts_implementation = NAME
        for block in filter(is_routed_by_inputs, layers.modules()):
            block.forward = RoutedInputs(block)


class HandedExperts:
    """The MoE layers of a converted model, which somebody else may compute for a while."""

    def __init__(self, layers: nn.ModuleList):
        self._modules = dict(layers_with_experts(layers))

    @contextmanager
    def handed_over(self, to: Callable[[int, LayerExperts], Runner]) -> Iterator[None]:
        """Inside, each layer computes by what ``to`` gives for its number and its own experts."""
        own = {layer: getattr(module, _RUNNER) for layer, module in self._modules.items()}
        try:
            for layer, module in self._modules.items():
                setattr(module, _RUNNER, to(layer, own[layer]))
            yield
        finally:
            for layer, module in self._modules.items():
                setattr(module, _RUNNER, own[layer])


class RoutedInputs:
    """What a block of Llama 4 computes, with experts as they arrive: an expert's input is multiplied by its weight, its output is not."""

    def __init__(self, block: nn.Module):
        if block.top_k != 1:
            raise UserError(f"{type(block).__name__}: routes a token to {block.top_k} experts by their inputs; only 1 is supported")
        self._block: Any = block

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[..., hidden] -> [tokens, hidden] and the router's logits [tokens, experts]."""
        block = self._block
        rows = hidden.reshape(-1, block.hidden_dim)
        scores, logits = block.router(rows)
        chosen = logits.topk(1, dim=1).indices
        out = block.shared_expert(rows)
        out.add_(run_experts(block.experts, rows * scores.gather(1, chosen), chosen, torch.ones_like(chosen, dtype=rows.dtype)))
        return out, logits


def number_experts(layers: nn.ModuleList) -> None:
    """Of a converted model some ``layers`` are left: their experts are known by their places among these."""
    for number, module in layers_with_experts(layers):
        getattr(module, _RUNNER).layer = number


def experts_of(module: ExpertsModule) -> LayerExperts:
    """What the experts ``module`` of a converted model computes with."""
    found = getattr(module, _RUNNER)
    assert isinstance(found, LayerExperts)
    return found


def layer_experts(layers: nn.ModuleList) -> list[LayerExperts]:
    """What each MoE layer of a converted model computes with."""
    return [getattr(module, _RUNNER) for _, module in layers_with_experts(layers)]
