"""From a config alone to the model's spec: its tensors by formula or as transformers builds them, stored as the config says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from penstock.planner.contract.checkpoint.checkpoint_spec import spec_from_tensors
from penstock.planner.contract.checkpoint.hf_config import geometry_from_config, text_config
from penstock.planner.contract.checkpoint.quantised import quantisation_of, quantise
from penstock.planner.contract.checkpoint.tally import TensorInfo
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.published.families import formula_tensors

Built = Callable[[], Mapping[str, TensorInfo]]
"""The tensors that transformers gives a model, asked where no formula knows them."""


def spec_from_config(config: Mapping[str, Any], name: str, where: str, built: Built) -> ModelSpec:
    """The spec of the model that config.json's content ``config``, read from ``where``, describes. It has no checkpoint and no digest.

    Layers that only serve multi-token prediction, and towers of other modalities, are left out. Raises UserError as
    ``spec_from_tensors`` and ``quantisation_of`` do, and whatever ``built`` raises.
    """
    own = text_config(config)
    layers = geometry_from_config(own, where).layers
    tensors = formula_tensors(own, layers)
    stored = quantise(built() if tensors is None else tensors, quantisation_of(own, where))
    return replace(spec_from_tensors(config, stored, name, where.removesuffix("/config.json"), ""), checkpoint=None, digest=None)
