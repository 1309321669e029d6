"""Checkpoints of random weights with any preset's geometry, written as Hugging Face's tools write them."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import xxhash

from penstock.planner.common.errors import UserError
from penstock.planner.common.interrupt import uncollected
from penstock.planner.common.measures import show_bytes
from penstock.planner.common.output import check_new
from penstock.planner.contract.config.config_schema import ModelConfig
from penstock.planner.contract.config.geometry import hf_config_dict
from penstock.runtime.store.parameters import DTYPE_NAMES

POOL_ELEMENTS = 16_777_259
"""Random numbers that all weights are cut from: a prime, so that no row of a matrix repeats at the next turn of the pool."""
STANDARD_DEVIATION = 0.02
"""Of every weight but the norms: the initializer_range of the families that presets describe."""
WRITE_THREADS = 4
"""Shards written at once."""
EXPERT_NAMES: Mapping[str, tuple[str, str, str, str]] = MappingProxyType(
    {
        "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
        "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    }
)
"""How a family's checkpoints name a layer's experts: module, gate, up and down projection."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class _Tensor:
    """One tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    ones: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def synthesize(model: ModelConfig, out: Path, seed: int, shard_bytes: int, progress: Progress) -> dict[str, Any]:
    """Write a checkpoint of ``model``'s geometry to the new directory ``out``: norms of one, the rest normal(0, 0.02).

    The same seed gives the same bytes. Memory: one pool of 16.8 million random numbers (34 MB in BF16); the disk sets the
    speed. Written aside and renamed, so an interrupted run leaves no checkpoint in ``out``. ``progress(done, total)`` counts
    bytes. UserError: ``out`` is there already, or the disk is too small.
    """
    config = hf_config_dict(model)
    tensors = list(_tensors(config))
    total = sum(t.nbytes for t in tensors)
    check_new(out)
    place = next(p for p in out.absolute().parents if p.exists())
    free = shutil.disk_usage(place).free
    if free < total:
        raise UserError(
            f"out={out}: {show_bytes(free)} free, the checkpoint needs {show_bytes(total)}; set model.layers lower or name another disk"
        )
    shards = _shards(tensors, shard_bytes)
    partial = out.absolute().parent / f".{out.name}.partial"
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        _write_shards(partial, shards, _Pool.make(seed, tensors[0].dtype), _Counter(progress, total))
        _write_json(partial / "generation_config.json", {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": True})
        _write_json(partial / "config.json", config)
        if out.exists():
            out.rmdir()
        os.rename(partial, out)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "free space or set model.layers lower" if full else "check permissions and the disk"
            raise UserError(f"out={out}: writing failed ({error.strerror}); {remedy}") from error
        raise
    return {"out": str(out), "nbytes": total, "tensors": len(tensors), "shards": len(shards), "seed": seed, "model": model.name}


def _tensors(config: Mapping[str, Any]) -> Iterator[_Tensor]:
    """Every tensor of the checkpoint in the model's order: the module's own state, fused experts taken apart."""
    keys = {key: value for key, value in config.items() if key != "model_type"}
    with uncollected():  # the first use of a class imports its module
        from transformers import AutoConfig, AutoModelForCausalLM

        hf = AutoConfig.for_model(config["model_type"], **keys)
    dtype = getattr(torch, config["dtype"])
    with torch.device("meta"), uncollected():
        model = AutoModelForCausalLM.from_config(hf, dtype=dtype, trust_remote_code=False)
    model.tie_weights()
    for name, tensor in model.named_parameters():
        yield from _unfused(config["model_type"], name, tuple(tensor.shape), dtype)


def _unfused(model_type: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[_Tensor]:
    """``name`` as checkpoints of the family store it: one tensor, or one or two for each expert."""
    module, gate, up, down = EXPERT_NAMES.get(model_type, ("mlp", "", "", ""))
    stem, _, leaf = name.rpartition(".mlp.experts.")
    if leaf == "gate_up_proj":
        for e in range(shape[0]):
            for projection in (gate, up):
                yield _Tensor(f"{stem}.{module}.experts.{e}.{projection}.weight", (shape[1] // 2, shape[2]), dtype, False)
    elif leaf == "down_proj":
        for e in range(shape[0]):
            yield _Tensor(f"{stem}.{module}.experts.{e}.{down}.weight", shape[1:], dtype, False)
    else:
        yield _Tensor(name.replace(".mlp.gate.", f".{module}.gate."), shape, dtype, len(shape) == 1 and "norm" in name)


def _shards(tensors: Sequence[_Tensor], shard_bytes: int) -> list[list[_Tensor]]:
    """Fill shards in the model's order; a tensor is never divided."""
    shards: list[list[_Tensor]] = [[]]
    room = shard_bytes
    for tensor in tensors:
        if tensor.nbytes > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= tensor.nbytes
    return shards


@dataclass(frozen=True)
class _Pool:
    """Random bytes that every weight is cut from, at a place that its name and the seed give."""

    seed: int
    random: memoryview
    one: bytes
    itemsize: int

    @classmethod
    def make(cls, seed: int, dtype: torch.dtype) -> _Pool:
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.empty(POOL_ELEMENTS).normal_(0, STANDARD_DEVIATION, generator=generator).to(dtype)
        one = bytes(torch.ones(1, dtype=dtype).view(torch.uint8).tolist())
        return cls(seed, numbers.view(torch.uint8).numpy().data.cast("B"), one, dtype.itemsize)

    def pieces(self, tensor: _Tensor) -> Iterator[memoryview]:
        """The tensor's bytes, as slices of the pool."""
        if tensor.ones:
            yield memoryview(self.one * math.prod(tensor.shape))
            return
        start = xxhash.xxh3_64_intdigest(tensor.name.encode(), seed=self.seed) % POOL_ELEMENTS * self.itemsize
        left = tensor.nbytes
        while left:
            piece = self.random[start : start + left]
            yield piece
            left -= len(piece)
            start = 0


class _Counter:
    """Bytes written by all threads; the callback is called by one at a time."""

    def __init__(self, progress: Progress, total: int):
        self._progress = progress
        self._total = total
        self._done = 0
        self._lock = threading.Lock()
        progress(0, total)

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            self._progress(self._done, self._total)


def _write_shards(directory: Path, shards: Sequence[Sequence[_Tensor]], pool: _Pool, counter: _Counter) -> None:
    count = len(shards)
    single = "model.safetensors"
    names = [single] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    stop = threading.Event()
    with ThreadPoolExecutor(min(WRITE_THREADS, count)) as threads:
        work = zip(names, shards, strict=True)
        jobs = [threads.submit(_write_shard, directory / name, shard, pool, counter, stop) for name, shard in work]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            stop.set()
            threads.shutdown(cancel_futures=True)
            raise
    if count > 1:
        index = {
            "metadata": {
                "total_parameters": sum(math.prod(t.shape) for shard in shards for t in shard),
                "total_size": sum(t.nbytes for shard in shards for t in shard),
            },
            "weight_map": {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard},
        }
        _write_json(directory / f"{single}.index.json", index)


def _write_shard(path: Path, shard: Sequence[_Tensor], pool: _Pool, counter: _Counter, stop: threading.Event) -> None:
    """One safetensors file, laid out as the safetensors library does: widest dtype first, then by name; header padded to 8."""
    ordered = sorted(shard, key=lambda t: (-t.dtype.itemsize, t.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for t in ordered:
        header[t.name] = {"dtype": DTYPE_NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [end, end + t.nbytes]}
        end += t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(struct.pack("<Q", len(text)) + text))
        for t in ordered:
            for piece in pool.pieces(t):
                if stop.is_set():
                    return
                _write_all(file.fileno(), piece)
                counter.add(len(piece))
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _write_all(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view) :]


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with open(path, "w") as file:
        file.write(json.dumps(content, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
