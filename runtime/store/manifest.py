"""The manifest of a packed store: what lies where in its weights file, with checksums, and the superblock that it must match.

``weights.bin`` (or a block device) has 4096 bytes of superblock, then the units in forward order, then the other parameters. Each of these
begins at a multiple of 4096, parameters inside at a multiple of 256. The manifest is written last. A store without one, or whose superblock
has another uuid, is no store.
"""

from __future__ import annotations

import json
import os
import struct
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import ALIGN
from penstock.planner.common.outside.plain_files import open_plain, read_plain
from penstock.runtime.reading.store_errors import StoreError
from penstock.runtime.store.sections import Section, SectionFlaw, check_places, section_to_json, sections_from_json

MANIFEST = "manifest.json"
WEIGHTS = "weights.bin"
FORMAT = 2
_MAGIC = b"PENSTOCK"
_SUPERBLOCK = struct.Struct("<8sI16s")


@dataclass(frozen=True)
class Manifest:
    """Everything that is known of a packed store without reading its weights."""

    uuid: str
    digest: str
    """The checkpoint's."""
    weights: Path
    """Relative to the directory, or a block device."""
    units: tuple[Section, ...]
    others: tuple[Section, ...]
    tensors: Mapping[str, Mapping[str, Any]]
    """The checkpoint's tensors, by their own names: dtype, shape, nbytes."""
    adapter: Mapping[str, Any] | None = None
    """The LoRA adapter that is merged into the weights; the digest is of both."""

    @property
    def end(self) -> int:
        """Bytes of the weights file."""
        return max((s.offset + s.nbytes for s in (*self.units, *self.others)), default=ALIGN)

    def weights_path(self, directory: Path) -> Path:
        return directory / self.weights

    def to_json(self) -> str:
        body = {
            "penstock_pack": FORMAT,
            "uuid": self.uuid,
            "digest": self.digest,
            "weights": str(self.weights),
            "units": [section_to_json(s) for s in self.units],
            "others": [section_to_json(s) for s in self.others],
            "tensors": {name: dict(entry) for name, entry in self.tensors.items()},
        } | ({} if self.adapter is None else {"adapter": dict(self.adapter)})
        return json.dumps(body | {"checksum": _checksum(body)}, indent=1)


def superblock(identity: str) -> bytes:
    """The first 4096 bytes of a weights file."""
    return _SUPERBLOCK.pack(_MAGIC, FORMAT, uuid.UUID(identity).bytes).ljust(ALIGN, b"\0")


def read_manifest(directory: Path) -> Manifest:
    """The manifest in ``directory``, once its checksum, the superblock and the weights' size agree. Reads 4096 bytes of weights.

    UserError, in one line, for whatever does not: such a store must be packed again.
    """
    path = directory / MANIFEST
    again = "pack the checkpoint again"
    try:
        body = json.loads(read_plain(path), parse_constant=_no_number)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {again}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged or truncated ({error}); {again}") from error
    if not isinstance(body, dict) or body.get("penstock_pack") != FORMAT:
        found = body.get("penstock_pack") if isinstance(body, dict) else None
        raise UserError(f"{path}: penstock_pack is {str(found)[:20]!r}, this version reads {FORMAT}; {again}")
    claimed = body.pop("checksum", None)
    if claimed != _checksum(body):
        raise UserError(f"{path}: its checksum does not match its content; {again}")
    try:
        manifest = _manifest(body)
        check_places((*manifest.units, *manifest.others))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: not a manifest of this version ({error!r:.80}); {again}") from error
    except SectionFlaw as error:
        raise UserError(f"{path}: corrupt, {error}; {again}") from error
    _check_weights(manifest, manifest.weights_path(directory), again)
    return manifest


def _adapter(found: Any) -> Mapping[str, Any] | None:
    if found is not None and not isinstance(found, dict):
        raise ValueError("adapter is no object")
    return found


def _manifest(body: Mapping[str, Any]) -> Manifest:
    weights, digest, tensors = body["weights"], body["digest"], body["tensors"]
    if not isinstance(weights, str) or not isinstance(digest, str) or not isinstance(tensors, dict):
        raise SectionFlaw("weights and digest must be text, tensors a mapping")
    if "\0" in weights or (weights != Path(weights).name and not os.path.isabs(weights)):
        raise SectionFlaw(f"weights must name a file beside it or a block device, not {weights[:60]!r}")
    return Manifest(
        uuid=str(uuid.UUID(body["uuid"])),
        digest=digest,
        weights=Path(weights),
        units=sections_from_json(body["units"]),
        others=sections_from_json(body["others"]),
        tensors=tensors,
        adapter=_adapter(body.get("adapter")),
    )


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _check_weights(manifest: Manifest, path: Path, again: str) -> None:
    try:
        with open_plain(path, device=manifest.weights.is_absolute()) as file:
            head = file.read(ALIGN)
            size = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror}); {again}") from error
    if head != superblock(manifest.uuid):
        raise StoreError(f"{path}: its superblock is not that of the manifest's pack {manifest.uuid}; {again}")
    if size < manifest.end:
        raise StoreError(f"{path}: truncated, {size} bytes of {manifest.end}; {again}")


def _checksum(body: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
