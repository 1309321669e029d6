"""A Hugging Face checkpoint as it lies on disk: config.json, shards, and where each tensor's bytes are. Without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as escaped
from pathlib import Path
from typing import Any

import xxhash

from penstock.planner.common.collector import uncollected
from penstock.planner.common.errors import UserError
from penstock.planner.common.outside.plain_files import read_plain
from penstock.planner.common.user_folder import user_path
from penstock.planner.contract.checkpoint.checkpoint_spec import spec_from_tensors
from penstock.planner.contract.checkpoint.foreign_files import foreign_directory, foreign_file
from penstock.planner.contract.checkpoint.further_heads import head_tensors, heads_config, heads_source
from penstock.planner.contract.checkpoint.gguf_checkpoint import GgufCheckpoint, gguf_source, read_gguf_checkpoint
from penstock.planner.contract.checkpoint.hf_config import text_config
from penstock.planner.contract.checkpoint.known_types import refuse_foreign_prefix, refuse_unknown_type
from penstock.planner.contract.checkpoint.quantised import quantisation_of
from penstock.planner.contract.checkpoint.safetensors_header import TensorEntry, is_counts, read_header
from penstock.planner.contract.checkpoint.tally import TensorInfo
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.stored.scheme import sort_tensors
from penstock.planner.contract.stored.stored_matrix import StoredMatrix

__all__ = ["Checkpoint", "TensorEntry", "read_checkpoint", "spec_from_checkpoint", "spec_from_tensors"]

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

PACK_MANIFEST = "manifest.json"
"""The file that makes a directory a packed store."""

PACK_FORMAT = 2


@dataclass(frozen=True)
class Checkpoint:
    """A readable checkpoint: every tensor's place is known and lies within its file."""

    directory: Path
    config: Mapping[str, Any]
    """config.json, a multimodal model's ``text_config`` unwrapped."""
    whole_config: Mapping[str, Any]
    """config.json as it is."""
    tensors: Mapping[str, TensorEntry]
    digest: str
    """xxh3_128 over config.json's bytes and the sorted (name, dtype, shape, file name, offset) of all tensors."""

    def infos(self) -> dict[str, TensorInfo]:
        """Each tensor's bytes, shape and dtype, without its place."""
        return {name: TensorInfo(entry.nbytes, entry.shape, entry.dtype) for name, entry in self.tensors.items()}


@uncollected()
def read_checkpoint(path: Path) -> Checkpoint:
    """Read config.json and the header of every shard of the checkpoint in the directory ``path``, or the headers of the GGUF files there.
    ``path`` may name a checkpoint's further heads (``heads_source``).

    Reads headers only: kilobytes a shard. Raises UserError naming the file and the remedy when something is missing,
    truncated, corrupt or unreadable.
    """
    whole = heads_source(path)
    if whole is not None:
        return _further(read_checkpoint(whole), path)
    source = gguf_source(path)
    if source is not None:
        return _of_gguf(read_gguf_checkpoint(source))
    directory = _directory(path)
    needed = f"{directory}: a checkpoint needs {CONFIG}; name the directory of a Hugging Face one"
    config_bytes = read_bytes(directory / CONFIG, foreign_directory(directory) or needed)
    config = parse_object(directory / CONFIG, config_bytes)
    index = directory / INDEX
    tensors = _read_sharded(index) if os.path.lexists(index) and not (directory / SINGLE).exists() else read_header(_single(directory))
    if not tensors:
        raise UserError(f"{directory}: the checkpoint holds no tensors; download it again")
    return Checkpoint(directory, text_config(config), config, tensors, _digest(config_bytes, tensors))


@uncollected()
def spec_from_checkpoint(path: Path) -> ModelSpec:
    """The spec of the checkpoint, or of the packed store, in the directory ``path``, or of the GGUF file ``path``.

    A packed store has the spec and digest of the checkpoint that it was made from, ``name`` and ``checkpoint`` apart.
    Raises UserError as ``read_checkpoint`` and ``spec_from_tensors`` do.
    """
    if heads_source(path) is not None:
        heads = read_checkpoint(path)
        return spec_from_tensors(heads.config, heads.infos(), f"the further heads of {path.parent.name}", str(path), heads.digest)
    source = gguf_source(path)
    directory = Path(os.path.abspath(user_path(path))) if source is not None else _directory(path)
    if source is None and os.path.lexists(directory / PACK_MANIFEST):
        return _spec_from_packed(directory)
    found = read_checkpoint(directory)
    refuse_unknown_type(found.whole_config, str(directory / CONFIG))
    refuse_foreign_prefix(found.whole_config, found.tensors, str(directory / CONFIG))
    return spec_from_tensors(found.config, found.infos(), directory.name, str(directory), found.digest)


def stored_infos(path: Path) -> dict[str, TensorInfo]:
    """What the checkpoint, or the packed store, in the directory ``path`` holds, by the checkpoint's names; nothing where there is only a
    config. Raises UserError as ``read_checkpoint`` does."""
    if _is_described(path):
        return read_checkpoint(path).infos()
    directory = _directory(path)
    if os.path.lexists(directory / PACK_MANIFEST):
        return _packed_tensors(directory)[0]
    weighty = any(name.endswith((".safetensors", ".safetensors.index.json")) for name in os.listdir(directory))
    return read_checkpoint(directory).infos() if weighty else {}


def stored_matrices(path: Path) -> Mapping[str, StoredMatrix]:
    """The matrices that the checkpoint, or the packed store, at ``path`` holds coded, by the names that their tensors would have; none
    where there is only a config. Reads headers. UserError as ``read_checkpoint`` and ``Scheme.matrix`` do."""
    if _is_described(path):
        found = read_checkpoint(path)
        return sort_tensors(found.infos(), quantisation_of(found.config, str(path))).matrices
    config_path = _directory(path) / CONFIG
    config = text_config(parse_object(config_path, read_bytes(config_path, f"{config_path}: no such file")))
    scheme = quantisation_of(config, str(config_path))
    return {} if scheme is None else sort_tensors(stored_infos(path), scheme).matrices


def gguf_config(path: Path) -> Mapping[str, Any] | None:
    """config.json's content as GGUF files at ``path`` say or complete it; None where there are none. UserError as ``read_checkpoint``."""
    source = gguf_source(path)
    return None if source is None else read_gguf_checkpoint(source).config


def described_config(path: Path) -> Mapping[str, Any] | None:
    """config.json's content where no such file lies at ``path``: that of GGUF files, or of a checkpoint's further heads. UserError as
    ``read_checkpoint``."""
    return gguf_config(path) if heads_source(path) is None else read_checkpoint(path).whole_config


def _is_described(path: Path) -> bool:
    """Whether ``path`` has no config.json of its own."""
    return heads_source(path) is not None or gguf_source(path) is not None


def _further(found: Checkpoint, path: Path) -> Checkpoint:
    """The further heads of ``found``, which ``path`` names."""
    config = heads_config(found.config)
    tensors = {name: found.tensors[stored] for name, stored in head_tensors(found.tensors, found.config, str(path.parent)).items()}
    said = json.dumps(config, sort_keys=True).encode()
    return Checkpoint(path, text_config(config), config, tensors, _digest(said, tensors))


def _of_gguf(found: GgufCheckpoint) -> Checkpoint:
    said = json.dumps(found.config, sort_keys=True).encode()
    return Checkpoint(found.source.directory, text_config(found.config), found.config, found.tensors, _digest(said, found.tensors))


def _directory(path: Path) -> Path:
    directory = Path(os.path.abspath(user_path(path)))
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        raise UserError(f"{path}: no such directory; name the one of a downloaded Hugging Face checkpoint") from None
    except NotADirectoryError:
        raise UserError(foreign_file(Path(path)) or f"{path}: not a directory; name the one that holds {CONFIG}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); check its permissions") from None
    if not names:
        raise UserError(f"{path}: the directory is empty; name the one of a Hugging Face checkpoint")
    return directory


def read_bytes(path: Path, missing: str) -> bytes:
    """The whole of a small file; UserError ``missing`` when it is not there, and one naming it when it cannot be read."""
    try:
        return read_plain(path)
    except FileNotFoundError:
        raise UserError(missing) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); check its permissions and the disk") from None


def parse_object(path: Path, text: bytes) -> dict[str, Any]:
    """The JSON object that ``text``, read from ``path``, holds."""
    try:
        value = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: corrupt, not JSON ({error}); restore it or download the checkpoint again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: corrupt, not a JSON object; restore it or download the checkpoint again")
    return value


def _single(directory: Path) -> Path:
    """The one safetensors file of a checkpoint without an index."""
    if os.path.lexists(directory / SINGLE):
        return directory / SINGLE
    others = sorted(name for name in os.listdir(directory) if name.endswith(".safetensors"))
    if len(others) == 1:
        return directory / others[0]
    if others:
        raise UserError(f"{directory}: {len(others)} safetensors files and no {INDEX}; download the index")
    raise UserError(foreign_directory(directory) or f"{directory}: no {SINGLE} and no {INDEX}; use a checkpoint in safetensors format")


def _read_sharded(index: Path) -> dict[str, TensorEntry]:
    """The tensors of every shard that the index names, each taken from the shard that the index gives it."""
    weight_map = parse_object(index, read_bytes(index, f"{index}: no such file; download the checkpoint again")).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise UserError(f"{index}: corrupt, it has no weight_map of tensor to file; download it again")
    for shard in weight_map.values():
        if "/" in shard or "\0" in shard or not shard.endswith(".safetensors"):
            raise UserError(f"{index}: corrupt, {shard!r} is not the name of a safetensors file beside it; download it again")
    shards = {shard: read_header(index.parent / shard) for shard in sorted(set(weight_map.values()))}
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise UserError(f"{index.parent / shard}: tensor {name!r} is missing, and the index says it is there; download it again")
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _digest(config_bytes: bytes, tensors: Mapping[str, TensorEntry]) -> str:
    state = xxhash.xxh3_128(config_bytes)
    files = {file: escaped(file.name) for file in {entry.file for entry in tensors.values()}}
    for name, (file, offset, _, dtype, shape) in sorted(tensors.items()):
        state.update(f'[{escaped(name)}, "{dtype}", [{", ".join(map(str, shape))}], {files[file]}, {offset}]'.encode())  # as json.dumps
    return state.hexdigest()


def _spec_from_packed(directory: Path) -> ModelSpec:
    infos, digest = _packed_tensors(directory)
    config_path = directory / CONFIG
    config = parse_object(config_path, read_bytes(config_path, f"{config_path}: no such file; pack the checkpoint again"))
    return spec_from_tensors(config, infos, directory.name, str(directory), digest)


def merged_adapter(path: Path) -> str | None:
    """Digest of the LoRA adapter that is merged into what lies in the directory ``path``; None where none is, as in every checkpoint."""
    manifest = Path(path) / PACK_MANIFEST
    if not os.path.lexists(manifest):
        return None
    adapter = parse_object(manifest, read_bytes(manifest, f"{manifest}: no such file; pack the checkpoint again")).get("adapter")
    return str(adapter.get("xxh3_128")) if isinstance(adapter, dict) else None


def _packed_tensors(directory: Path) -> tuple[dict[str, TensorInfo], str]:
    """The tensors of a packed store's checkpoint, and that checkpoint's digest."""
    path = directory / PACK_MANIFEST
    manifest = parse_object(path, read_bytes(path, f"{path}: no such file; pack the checkpoint again"))
    version = manifest.get("penstock_pack")
    if version != PACK_FORMAT:
        raise UserError(f"{path}: penstock_pack is {str(version)[:20]!r}, this version reads {PACK_FORMAT}; pack the checkpoint again")
    if manifest.pop("checksum", None) != _manifest_checksum(manifest):
        raise UserError(f"{path}: its checksum does not match its content; pack the checkpoint again")
    stored, digest = manifest.get("tensors"), manifest.get("digest")
    if not isinstance(stored, dict) or not isinstance(digest, str):
        raise UserError(f"{path}: corrupt, it needs tensors and the source's digest; pack the checkpoint again")
    return {name: _packed_info(path, name, value) for name, value in stored.items()}, digest


def _manifest_checksum(body: Mapping[str, Any]) -> str:
    """What `runtime pack` writes as the manifest's own checksum."""
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _packed_info(path: Path, name: str, value: Any) -> TensorInfo:
    if isinstance(value, dict):
        nbytes, shape, dtype = value.get("nbytes"), value.get("shape"), value.get("dtype")
        if type(nbytes) is int and nbytes >= 0 and is_counts(shape) and isinstance(dtype, str) and len(dtype) < 20:
            return TensorInfo(nbytes, tuple(shape), dtype)
    raise UserError(f"{path}: corrupt, tensor {name!r} needs nbytes, shape and dtype; pack the checkpoint again")
