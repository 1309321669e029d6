"""Models that have all their experts and compute with them as an engine does."""

from __future__ import annotations

from torch import nn

from penstock.runtime.experts.expert_forward import ExpertsInTurn, ExpertSource, LayerExperts, layer_experts
from penstock.runtime.store.decoder import decoder_layers


def take_over(model: nn.Module, source: ExpertSource) -> list[LayerExperts]:
    """Let every MoE layer of ``model`` compute with experts of ``source``."""
    ExpertsInTurn().convert(model)
    runners = layer_experts(decoder_layers(model))
    for runner in runners:
        runner.feed(source)
    return runners
