"""A GGUF file, or the parts of one that was split, as a Hugging Face checkpoint: its config, and its tensors by their names there."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.common.outside.plain_files import read_plain
from penstock.planner.contract.checkpoint.safetensors_header import TensorEntry
from penstock.planner.contract.gguf.gguf_config import computed_dtype, derived_config, head_counts, known_architecture
from penstock.planner.contract.gguf.gguf_header import GgufHeader, GgufTensor, read_gguf
from penstock.planner.contract.gguf.gguf_names import hf_name, is_told
from penstock.planner.contract.gguf.gguf_types import PLAIN

SUFFIX = ".gguf"
VOCABULARY = "vocabulary.gguf"
"""The file of a packed store that has the metadata of the GGUF file that it was made of, for its tokenizer."""
INTERLEAVED = ("llama",)
"""Architectures whose files hold the two halves of each head's queries and keys row by row in turn, as llama.cpp rotates them."""
ABOVE_ONE = ("gemma2", "gemma3")
"""Architectures whose files hold a norm's weight plus one."""
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


@dataclass(frozen=True)
class GgufSource:
    """What ``model.checkpoint=`` named: all files of one model."""

    files: tuple[Path, ...]
    """The first one has the metadata."""

    @property
    def directory(self) -> Path:
        return self.files[0].parent


@dataclass(frozen=True)
class GgufCheckpoint:
    """What the files say, as a checkpoint would."""

    source: GgufSource
    header: GgufHeader
    """Of the first file."""
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    """By a checkpoint's names, each expert by itself. The dtype of a coded one is its type's name, its last dimension a row's bytes."""


def gguf_source(path: Path) -> GgufSource | None:
    """The files of the model at ``path``, which is one of them or a directory that holds weights in no other format; None where there are
    none. UserError: several models in one directory, parts that are missing. Reads names only."""
    if path.suffix.lower() == SUFFIX and not path.is_dir():
        return _whole(path, path.parent)
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return None
    weighty = [name for name in names if name.lower().endswith(SUFFIX) and not name.lower().startswith("mmproj")]
    if not weighty or any(name.endswith((".safetensors", ".safetensors.index.json")) or name == "manifest.json" for name in names):
        return None
    models = sorted({_model_of(name) for name in weighty})
    if len(models) > 1:
        raise UserError(
            f"{path}: holds {len(models)} models, {', '.join(_firsts(weighty, models))}; set model.checkpoint to one of these files"
        )
    return _whole(path / weighty[0], path)


def _model_of(name: str) -> str:
    split = _SPLIT.fullmatch(name)
    return f"{split[1]}-of-{split[3]}" if split else name


def _firsts(names: list[str], models: list[str]) -> list[str]:
    """The first file of each model; of many models some."""
    firsts = [next(name for name in names if _model_of(name) == model) for model in models]
    return firsts if len(firsts) <= 6 else [*firsts[:6], f"... ({len(firsts)} in all)"]


def _whole(file: Path, directory: Path) -> GgufSource:
    split = _SPLIT.fullmatch(file.name)
    if split is None:
        return GgufSource((file,))
    count = int(split[3])
    if not 1 <= int(split[2]) <= count:
        raise UserError(f"{file}: no part of {count}; download it again under its own name")
    files = tuple(directory / f"{split[1]}-{number:05}-of-{split[3]}{file.suffix}" for number in range(1, count + 1))
    missing = next((part for part in files if not part.exists()), None)
    if missing is not None:
        raise UserError(f"{missing}: no such file, and the model is split into {count}; download all of them")
    return GgufSource(files)


def files_beside(path: Path) -> Path:
    """The directory in which a checkpoint's small files lie: ``path``, or that of the GGUF file ``path``."""
    source = gguf_source(path)
    return path if source is None else source.directory


def weight_files(path: Path) -> tuple[Path, ...]:
    """The files that hold the weights of the checkpoint, or of the packed store, at ``path``."""
    source = gguf_source(path)
    return tuple(file for file in path.iterdir() if file.suffix in (".safetensors", ".bin")) if source is None else source.files


def vocabulary_file(path: Path) -> Path | None:
    """The GGUF file that has the vocabulary of the checkpoint, or of the packed store, at ``path``; None where there is none."""
    source, kept = gguf_source(path), path / VOCABULARY
    return source.files[0] if source is not None else kept if kept.is_file() else None


def read_gguf_checkpoint(source: GgufSource) -> GgufCheckpoint:
    """Read the headers of all files, and config.json where it lies beside them. UserError, one line, for what is damaged or not known."""
    headers = [read_gguf(file) for file in source.files]
    _check_parts(source, headers)
    stored: dict[str, GgufTensor] = {}
    for header in headers:
        twice = next((name for name in header.tensors if name in stored), None)
        if twice is not None:
            raise UserError(f"{header.tensors[twice].file}: tensor {twice!r} is in another part, too; download the parts again")
        stored |= header.tensors
    metadata, where = headers[0].metadata, str(source.files[0])
    architecture = known_architecture(metadata, where)
    config = _config_beside(source.directory, stored) or derived_config(metadata, stored, where)
    said: dict[str, Any] = {"quant_method": "gguf"}
    if architecture in INTERLEAVED:
        biased = next((name for name in stored if re.fullmatch(r"blk\.\d+\.attn_[qk]\.bias", name)), None)
        if biased is not None:
            raise UserError(f"{where}: tensor {biased!r}: biases of queries and keys are not read for this architecture; use safetensors")
        said["interleaved"] = dict(zip(("q_proj", "k_proj"), head_counts(metadata, where), strict=True))
    if architecture in ABOVE_ONE:
        said["norms_above_one"] = True
    config["quantization_config"] = said
    tensors = {name: entry for key, tensor in stored.items() for name, entry in _entries(key, tensor, str(config.get("model_type", "")))}
    return GgufCheckpoint(source, headers[0], config, tensors)


def _check_parts(source: GgufSource, headers: list[GgufHeader]) -> None:
    for number, (file, header) in enumerate(zip(source.files, headers, strict=True)):
        count, place = header.metadata.get("split.count", 1), header.metadata.get("split.no", 0)
        if (count or 1, place) != (len(headers), number):
            raise UserError(
                f"{file}: says that it is part {str(place)[:20]} of {str(count)[:20]}, and lies as part {number} of {len(headers)}; "
                "download the parts again under their own names"
            )
    promised = headers[0].metadata.get("split.tensors.count")
    found = sum(len(header.tensors) for header in headers)
    if len(headers) > 1 and promised not in (None, found):
        raise UserError(f"{source.files[0]}: its parts hold {found} tensors and should {str(promised)[:20]}; download the parts again")


def _config_beside(directory: Path, tensors: Mapping[str, GgufTensor]) -> dict[str, Any] | None:
    path = directory / "config.json"
    if not os.path.lexists(path):
        return None
    try:
        config = json.loads(read_plain(path).decode("utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); check its permissions and the disk") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: corrupt, not JSON ({error}); restore it or download the checkpoint again") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: corrupt, not a JSON object; restore it or download the checkpoint again")
    if all(tensor.block in PLAIN.values() for tensor in tensors.values()):
        config["dtype"] = config["torch_dtype"] = computed_dtype(tensors)
    if isinstance(config.get("text_config"), dict):
        raise UserError(f"{path}: a wrapper around a text model, and GGUF files hold text models alone; put the text model's config there")
    return config


def _entries(name: str, tensor: GgufTensor, model_type: str) -> Iterator[tuple[str, TensorEntry]]:
    """What a checkpoint would hold in place of ``tensor``: of stacked experts each one."""
    if is_told(name):
        return
    known = hf_name(name, model_type)
    if known is None:
        raise UserError(
            f"{tensor.file}: tensor {name[:60]!r} has no name in a {model_type[:40]} model that is known here; use its safetensors"
        )
    *outer, rows, columns = tensor.shape if len(tensor.shape) > 1 else (1, *tensor.shape)
    plain = tensor.block in PLAIN.values()
    if "*" not in known:
        shape = tensor.shape if plain else (*tensor.shape[:-1], tensor.block.row_bytes(columns))
        yield known, TensorEntry(tensor.file, tensor.offset, tensor.nbytes, tensor.block.name, shape)
        return
    if len(outer) != 1:
        raise UserError(
            f"{tensor.file}: tensor {name[:60]!r} has the shape {list(tensor.shape)}, experts need three dimensions; download it again"
        )
    each = tensor.nbytes // outer[0]
    width = columns if plain else tensor.block.row_bytes(columns)
    for expert in range(outer[0]):
        entry = TensorEntry(tensor.file, tensor.offset + expert * each, each, tensor.block.name, (rows, width))
        yield known.replace("*", str(expert)), entry
