"""A rank's part of a `transformers` model: its layers alone, numbered from 0, with hops to and from the layers beside them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from penstock.planner.common.errors import UserError
from penstock.planner.contract.ranks.dealing import Dealing
from penstock.runtime.experts.expert_forward import number_experts
from penstock.runtime.kv.batch.row_parts import own_forward
from penstock.runtime.model.rows import Step
from penstock.runtime.ranks.dealt_layer import DealtLayer, Ways, hidden_of
from penstock.runtime.ranks.pass_parts import PassParts
from penstock.runtime.ranks.sliced_experts import Served, ServedExperts, ToldExperts, sliced_experts
from penstock.runtime.store.decoder import OwnLayers, decoder_layers, module_name
from penstock.runtime.store.expert_modules import experts_module


class DealtModel:
    """A converter: of a model's layers those of ``rank`` stay.

    A layer receives its hidden states from the rank of the layer before it, and sends what it made to that of the layer behind it, part by
    part of a pass. The last layer's rank sends what logits are wanted of to all ranks; each multiplies by its rows of the LM head, and rank
    0 puts the logits together, ``vocab`` in all. A pass costs its hidden states once more, where they are on their way. Of sliced experts,
    ``top_k`` of a token, a rank serves those of all other layers between its own.
    """

    def __init__(self, dealing: Dealing, rank: int, vocab: int, top_k: int = 0):
        self._dealing, self._rank, self._vocab, self._top_k = dealing, rank, vocab, top_k
        self.ways: Ways | None = None
        """How hidden states go, from the first pass on."""
        self.parts: PassParts | None = None
        """In which a pass goes through the layers; None: as a whole."""
        self._ends: list[tuple[int, int]] = []
        self._wanted = 0

    def begin_pass(self, step: Step) -> None:
        """``step`` comes next."""
        ends, first = [], 0
        for row in step.rows:
            first += len(row.tokens)
            if row.wanted:
                ends.append((first - row.wanted, first))
        self._ends, self._wanted = ends, step.wanted
        if self.parts is not None:
            self.parts.begin_pass(step)
            self._ways.expect(len(self.parts.bounds))

    @property
    def _ways(self) -> Ways:
        assert self.ways is not None, "ranks meet before they compute"
        return self.ways

    def convert(self, model: PreTrainedModel) -> None:
        """UserError for a model that has something between its layers that a hop would leave out."""
        layers = decoder_layers(model)
        config = model.config.get_text_config(decoder=True)
        _refuse(model, config)
        found = {number: experts for number, layer in enumerate(layers) if (experts := experts_module(layer)) is not None}
        sliced = found if self._dealing.slices > 1 else {}
        own = OwnLayers({number: layers[number] for number in self._dealing.of(self._rank)}, sliced)
        owner, _, leaf = module_name(model, layers).rpartition(".")
        setattr(model.get_submodule(owner), leaf, own)
        for local, layer in enumerate(own):
            for module in layer.modules():
                if hasattr(module, "layer_idx"):
                    vars(module)["layer_idx"] = local
        number_experts(own)
        _renumber(config, self._dealing.of(self._rank))
        owners, end = self._dealing.owners, self._dealing.layers - 1
        for number, layer in zip(self._dealing.of(self._rank), own, strict=True):
            before, behind = (owners[at] if 0 <= at <= end and owners[at] != self._rank else None for at in (number - 1, number + 1))
            layer.forward = DealtLayer(own_forward(layer), lambda: self._ways, lambda: self.parts, before, behind)
            if number == end:
                layer.register_forward_hook(self._hand_out)
        self._share(own)
        if self._rank != self._dealing.owner(self._dealing.layers - 1):
            own[len(own) - 1].register_forward_hook(self._take_last)
        model.get_output_embeddings().register_forward_hook(self._gather)

    def _share(self, own: OwnLayers) -> None:
        """Where experts are sliced, have those of ``own`` layers tell the other ranks, and serve the others' between these layers."""
        count = self._dealing.count
        experts, waiting = sliced_experts({number: module for number, (_, module) in own.sliced.items()}, count), list[ServedExperts]()
        mine = dict(zip(self._dealing.of(self._rank), own, strict=True))
        others = [rank for rank in range(count) if rank != self._rank]
        for number, owner in enumerate(self._dealing.owners):
            if number in mine:
                mine[number].register_forward_pre_hook(Served(waiting).before, with_kwargs=True)
                waiting = []
            if number in experts and number in mine:
                experts[number].sharing = ToldExperts(lambda: self._ways, others)
            elif number in experts:
                waiting.append(ServedExperts(experts[number], lambda: self._ways, owner, self._top_k))
        own[len(own) - 1].register_forward_hook(Served(waiting).behind)

    def _hand_out(self, _layer: nn.Module, _args: tuple[Any, ...], made: Any) -> None:
        """The last layer has computed: logits are wanted of some tokens."""
        if self._wanted:
            hidden = hidden_of(made)
            every = self._wanted == hidden.shape[1]
            last = hidden if every else torch.cat([hidden[:, first:end] for first, end in self._ends], dim=1)
            for rank in range(self._dealing.count):
                if rank != self._rank:
                    self._ways.of(rank).send(last)

    def _take_last(self, _layer: nn.Module, _args: tuple[Any, ...], made: Any) -> Any:
        """In place of what this rank's last layer made, what the model's last one did, where logits are wanted of it."""
        if not self._wanted:
            return None
        hidden = hidden_of(made)
        last = hidden.new_empty(hidden.shape[0], self._wanted, *hidden.shape[2:])
        self._ways.of(self._dealing.owner(self._dealing.layers - 1)).receive(last)
        if self._wanted == hidden.shape[1]:
            return (last, *made[1:]) if isinstance(made, tuple) else last
        taken, first = torch.empty_like(hidden), 0
        for begin, end in self._ends:
            taken[:, begin:end] = last[:, first : first + end - begin]
            first += end - begin
        return (taken, *made[1:]) if isinstance(made, tuple) else taken

    def _gather(self, _head: nn.Module, _args: tuple[Any, ...], logits: torch.Tensor) -> torch.Tensor | None:
        """Of this rank's rows [..., rows]; rank 0 makes all of them [..., vocab]."""
        if not logits.numel():
            return None if self._rank else logits.new_empty(*logits.shape[:-1], self._vocab)
        if self._rank:
            self._ways.of(0).send(logits)
            return None
        parts = [logits]
        for rank in range(1, self._dealing.count):
            rows = len(self._dealing.vocab_rows(rank, self._vocab))
            parts.append(logits.new_empty(*logits.shape[:-1], rows))
            self._ways.of(rank).receive(parts[-1])
        return torch.cat(parts, dim=-1)


def _renumber(config: PreTrainedConfig, mine: tuple[int, ...]) -> None:
    """What a model looks up by a layer's number, for the layers ``mine`` alone."""
    for name, value in list(vars(config).items()):
        if name.endswith("layer_types") and isinstance(value, list) and len(value) == config.num_hidden_layers:
            vars(config)[name] = [value[number] for number in mine]
    config.num_hidden_layers = len(mine)


def _refuse(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    embeddings = [name for name, module in model.named_modules() if name.endswith("per_layer")]
    if embeddings or vars(config).get("num_kv_shared_layers"):
        raise UserError(f"{type(model).__name__}: its layers take more than each other's hidden states; solve again with ranks=1")


class NoEmbedding(nn.Module):
    """In place of a table that another rank has: hidden states [..., ``width``] of no meaning, which are received before they are read."""

    def __init__(self, width: int, dtype: torch.dtype):
        super().__init__()
        self._width, self._dtype = width, dtype
        self.weight = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.empty(*ids.shape, self._width, dtype=self._dtype, device=ids.device)


class EmbeddingElsewhere:
    """Takes a model's table of tokens away."""

    def convert(self, model: PreTrainedModel) -> None:
        width = model.get_input_embeddings().get_parameter("weight").shape[1]
        model.set_input_embeddings(NoEmbedding(width, model.dtype))
