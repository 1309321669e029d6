"""The `transformers` model of a checkpoint, built without weights, and the store that they come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from penstock.planner.common.errors import UserError
from penstock.runtime.model.converter import Converter
from penstock.runtime.store.base import Store, open_store
from penstock.runtime.store.decoder import decoder_layers


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules made inside keep their buffers real (rotary frequencies are computed) and their parameters empty."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(module, name, None if param is None else nn.Parameter(param.to("meta"), requires_grad=False))

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


@dataclass(frozen=True)
class Skeleton:
    """A checkpoint's model on the meta device, with the store that its weights come from."""

    model: PreTrainedModel
    store: Store

    @property
    def layers(self) -> nn.ModuleList:
        return decoder_layers(self.model)


def open_skeleton(directory: Path, converters: Sequence[Converter] = ()) -> Skeleton:
    """Build the model of ``directory``, changed by ``converters``, and open its weights; reads headers only."""
    model = build_skeleton(directory, converters)
    return Skeleton(model, open_store(directory, model))


def import_model(directory: Path) -> None:
    """Import the module that defines ``directory``'s model, which transformers would do when the model is built."""
    with _told(directory):
        AutoModelForCausalLM._model_mapping[type(AutoConfig.from_pretrained(directory))]


def build_skeleton(directory: Path, converters: Sequence[Converter] = ()) -> PreTrainedModel:
    """The checkpoint's causal LM with every parameter on the meta device, changed by ``converters``. Takes no memory for weights."""
    with _told(directory):
        config = AutoConfig.from_pretrained(directory)
        with _parameters_on_meta(), no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)
    model.tie_weights()
    for converter in converters:
        converter.convert(model)
    return model.eval()


@contextmanager
def _told(directory: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, OSError) as error:
        raise UserError(f"{directory}: transformers cannot build this model: {str(error).splitlines()[0]}") from error
