"""What a checkpoint holds beside the decoder: no plan counts it and no run reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from penstock.planner.common.measures import show_bytes
from penstock.planner.contract.checkpoint.checkpoint_files import CONFIG, parse_object, read_bytes, stored_infos
from penstock.planner.contract.checkpoint.hf_config import geometry_from_config, text_config
from penstock.planner.contract.checkpoint.tally import TensorInfo
from penstock.planner.contract.checkpoint.tensor_names import classify, is_recomputed

TOWERS = "towers of other modalities: it reads and writes text"
FURTHER = "layers that predict further tokens at once"


def left_out(checkpoint: str | None) -> Iterator[str]:
    """Sentences for the notes of a plan for the directory ``checkpoint``; none for what is no directory. Reads headers only."""
    if checkpoint is None or not (Path(checkpoint) / CONFIG).is_file():
        return
    path = Path(checkpoint) / CONFIG
    geometry = geometry_from_config(text_config(parse_object(path, read_bytes(path, f"{path}: no such file"))), str(path))
    last = geometry.layers + geometry.extra_layers
    sizes, counts = _beside(stored_infos(Path(checkpoint)), range(geometry.layers, last))
    for what, nbytes in sizes.items():
        yield f"left out of plan and run: {counts[what]} tensors ({show_bytes(nbytes)}) of {what}"


def _beside(tensors: Mapping[str, TensorInfo], extra: range) -> tuple[Counter[str], Counter[str]]:
    """What is left out -> bytes, and -> tensors."""
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for name, info in tensors.items():
        role = classify(name)
        if (role.kind != "ignored" and role.layer not in extra) or is_recomputed(name):
            continue
        what = FURTHER if role.kind != "ignored" or "mtp" in name.split(".") else TOWERS
        sizes[what] += info.nbytes
        counts[what] += 1
    return sizes, counts
