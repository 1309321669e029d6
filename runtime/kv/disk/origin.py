"""Whose pages they are: everything about a model, its weights and the form of its KV that pages of one namespace must share."""

from __future__ import annotations

from pathlib import Path

import xxhash

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import CONFIG, PACK_MANIFEST, parse_object, read_bytes, read_checkpoint
from penstock.planner.contract.given.dealt import Dealt
from penstock.planner.contract.ranks.dealing import Dealing
from penstock.runtime.kv.disk.page_keys import namespace

LAYOUT = "layer: token after token, of each K then V, both heads x dim; 2"
"""Order of bytes in a layer's block, and the version of it."""
SAMPLES = 256
"""Places of each file of a checkpoint that its digest reads."""
SAMPLE_BYTES = 4096
_LENGTH_DEPENDENT = {"dynamic", "longrope", "su"}


def pages_namespace(checkpoint: Path, dtype: str, page_tokens: int, dealt: Dealt | None = None) -> bytes:
    """The namespace of ``checkpoint``'s pages, or of those that hold the layers of one rank alone, as ``dealt`` says. UserError when the
    files cannot be read, or the model's keys depend on more than the tokens before them."""
    path = checkpoint / CONFIG
    config = parse_object(path, read_bytes(path, f"{path}: no such file; download the checkpoint again"))
    bound = _LENGTH_DEPENDENT & _rope_types(config)
    if bound:
        raise UserError(
            f"kv.dir: {checkpoint} has {min(bound)} rotary embeddings, by which keys depend on the whole prompt's length; leave kv.dir out"
        )
    layers = "" if dealt is None else f"; {_dealt_layers(dealt)}"
    return namespace(config, weights_digest(checkpoint), dtype, page_tokens, LAYOUT + layers)


def _dealt_layers(dealt: Dealt) -> str:
    dealing = Dealing(dealt.counts)
    if dealing.is_even:
        return f"every {dealt.count}th of {dealt.layers} layers from {dealt.rank} on"
    return f"of {dealt.layers} layers {', '.join(map(str, dealing.of(dealt.rank)))}"


def weights_digest(checkpoint: Path) -> str:
    """Identity of the weights themselves; ``ModelSpec.digest`` is that of their names and places, which two trainings may share.

    For a packed store it is the manifest's digest, and the manifest holds a checksum of every unit. For a checkpoint in place it covers the
    headers' digest. It covers of each file its size, its time of modification and 4096 bytes at 256 places: about 25 ms a file when cold. A
    copy with another time has another digest. UserError.
    """
    manifest = checkpoint / PACK_MANIFEST
    if manifest.exists():
        return xxhash.xxh3_128_hexdigest(read_bytes(manifest, f"{manifest}: no such file; pack the checkpoint again"))
    found = read_checkpoint(checkpoint)
    state = xxhash.xxh3_128(found.digest.encode())
    for path in sorted({entry.file for entry in found.tensors.values()}):
        try:
            _sample(state, path)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions and the disk") from error
    return state.hexdigest()


def _sample(state: xxhash.xxh3_128, path: Path) -> None:
    stat = path.stat()
    state.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    with open(path, "rb", buffering=0) as file:
        for k in range(SAMPLES):
            file.seek(stat.st_size * k // SAMPLES)
            state.update(file.read(SAMPLE_BYTES))


def _rope_types(config: object) -> set[str]:
    """Every rotary type that is named anywhere in ``config``; older configurations call it ``type``."""
    if not isinstance(config, dict):
        return set()
    names = {config.get(key) for key in ("rope_type", "type")}
    return {name for name in names if isinstance(name, str)}.union(*(_rope_types(value) for value in config.values()))
