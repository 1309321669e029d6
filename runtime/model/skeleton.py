"""The `transformers` model of a checkpoint, built without weights, and the store that they come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation
from transformers.initialization import no_init_weights

from penstock.planner.common.errors import UserError
from penstock.planner.common.interrupt import uncollected
from penstock.planner.contract.checkpoint.checkpoint_files import described_config, spec_from_checkpoint, stored_infos, stored_matrices
from penstock.planner.contract.checkpoint.further_heads import heads_source
from penstock.planner.contract.checkpoint.tensor_names import classify
from penstock.runtime.model.as_stored import NormsAboveOne, RoutersAsStored
from penstock.runtime.model.converter import Converter
from penstock.runtime.model.foreign_experts import name_experts, take_shape
from penstock.runtime.model.further.further_layer import FurtherLayer
from penstock.runtime.model.stored_formats import StoredFormats
from penstock.runtime.store.base import Store, open_store
from penstock.runtime.store.decoder import decoder_layers, module_name
from penstock.runtime.store.tensor_parts import transposes_experts


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


def read_config(directory: Path) -> PreTrainedConfig:
    """The model's config as transformers reads it; code beside it is never run. UserError where transformers does not know the model.

    What it says of the code to compute attention and experts with is dropped: that is ours to choose, and may name a kernel on the Hub.
    """
    with _told(directory):
        said = described_config(directory)
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False) if said is None else AutoConfig.for_model(**said)
        config._attn_implementation = config._experts_implementation = None
        _check_window(directory, config)
        return config


def _check_window(directory: Path, config: PreTrainedConfig) -> None:
    """UserError for a sliding window that is no number of tokens: transformers takes any, and attention cannot."""
    window = getattr(config.get_text_config(decoder=True), "sliding_window", None)
    if isinstance(window, str | float | bool) or (isinstance(window, int) and window < 0):
        raise UserError(
            f"{directory / 'config.json'}: sliding_window is {window!r}, allowed is a whole number of 0 or more, or null; "
            "restore the model's own config.json"
        )


def text_class(config: PreTrainedConfig) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    """Which of transformers' classes builds the model of ``config`` that answers text with text: a causal LM, or else a multimodal wrapper,
    whose towers then have nothing to do."""
    known = type(config) in AutoModelForCausalLM._model_mapping or type(config) not in AutoModelForImageTextToText._model_mapping
    return AutoModelForCausalLM if known else AutoModelForImageTextToText


def import_model(directory: Path) -> None:
    """Import the module that defines ``directory``'s model, which transformers would do when the model is built."""
    with uncollected():
        config = read_config(directory)
    with _told(directory), uncollected():
        text_class(config)._model_mapping[type(config)]


def build_skeleton(directory: Path, converters: Sequence[Converter] = ()) -> PreTrainedModel:
    """The checkpoint's text model with every parameter on the meta device, changed by ``converters``. Takes no memory for weights.

    Its dtypes are those of ``from_pretrained(dtype="auto")``; parameters that the model's class keeps in F32 are F32. Headers of a
    checkpoint are read where the config leaves its dtype open, or says that the LM head is the embedding.
    """
    config = read_config(directory)
    dtype = compute_dtype(directory, config)
    with _told(directory), _parameters_on_meta(), no_init_weights():
        model = text_class(config).from_config(config, dtype=dtype, trust_remote_code=False)
        if heads_source(directory) is not None:
            FurtherLayer().convert(model)
    _compute_buffers(model)
    model.tie_weights()
    _untie(model, directory)
    name_experts(model)
    if transposes_experts(model):
        take_shape(model, stored_infos(directory))
    _keep_dtypes(model, dtype)
    matrices = stored_matrices(directory)
    own: list[Converter] = [RoutersAsStored(stored_infos(directory)), StoredFormats(matrices, str(directory))] if matrices else []
    if (getattr(config, "quantization_config", None) or {}).get("norms_above_one"):
        own.append(NormsAboveOne(stored_infos(directory)))
    for converter in [*own, *converters]:
        converter.convert(model)
    return model.eval()


@torch.no_grad()
def _compute_buffers(model: PreTrainedModel) -> None:
    """Compute buffers that no checkpoint has as `from_pretrained` does: when the model is there, hence in F32 whatever its dtype. The
    nearest model around a module knows its buffers."""
    for name, module in model.named_modules():
        if module._non_persistent_buffers_set:
            around = [model.get_submodule(".".join(parts)) for parts in _prefixes(name)]
            next(m for m in reversed(around) if isinstance(m, PreTrainedModel))._init_weights(module)


def _prefixes(name: str) -> Iterator[list[str]]:
    """Of a dotted name, the shortest first, itself among them."""
    parts = name.split(".") if name else []
    return (parts[:count] for count in range(len(parts) + 1))


def compute_dtype(directory: Path, config: PreTrainedConfig) -> torch.dtype:
    """What ``directory``'s model computes in: what its config says, else that of most of its weights, else F32."""
    if config.dtype is not None or not stored_infos(directory):
        return getattr(torch, config.dtype) if isinstance(config.dtype, str) else config.dtype or torch.float32
    return getattr(torch, spec_from_checkpoint(directory).compute_dtype)


def _untie(model: PreTrainedModel, directory: Path) -> None:
    """Give the LM head a weight of its own where the checkpoint stores one beside the embedding, whatever its config says of a tie."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return
    if {"head", "embed"} <= {classify(name).kind for name in stored_infos(directory)}:
        head.weight = nn.Parameter(torch.empty_like(embedding.weight), requires_grad=False)
        own = module_name(model, head) + ".weight"
        model.all_tied_weights_keys = {name: source for name, source in model.all_tied_weights_keys.items() if own not in (name, source)}


def _keep_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give parameters and buffers on the meta device, and persistent buffers, the dtypes that transformers loads them in."""
    kept = model._get_dtype_plan(dtype)
    if not kept:
        return
    pattern, plans, _ = build_glob_alternation(list(kept))
    for name, tensor in model.state_dict(keep_vars=True).items():
        match = pattern.search(name)
        if match is not None and match.lastgroup and tensor.is_floating_point():
            tensor.data = tensor.data.to(kept[plans[match.lastgroup]])


@contextmanager
def _told(directory: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a config from elsewhere makes transformers raise anything
        why = next(iter(str(error).strip().splitlines()), "")
        kind = "" if isinstance(error, ValueError | OSError) and why else f"{type(error).__name__}: "
        raise UserError(f"{directory}: transformers cannot build this model: {kind}{why}") from error
