"""A transformers model, whoever moves its weights, timed by the very loop that Penstock's own runs are timed by."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig

from bench.peers.peer import Job, Measured
from penstock.runtime.engine.passes.generate import Batch, Generation, generate
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.engine.passes.stepper import Stepper
from penstock.runtime.kv.batch.kv_pool import KvPool
from penstock.runtime.kv.batch.kv_windows import kinds

PAGE_TOKENS = 16
GUARD_BYTES = 256 << 20
"""Kept free on the card beside weights, KV and activations: cuBLAS's workspace and what the allocator cannot join."""
WARM_UP_TOKENS = 2
"""Tokens of the round before the timed one: a prefill and one step, so that kernels, hooks and the page cache are warm."""
SAMPLE_S = 0.05


def measure_model(job: Job, load: Callable[[Job, torch.device], nn.Module]) -> Measured:
    """Load a model under the job's budgets, warm it up, time one round. The allocator refuses to pass the budget."""
    device = _open_device(job)
    with AnonymousPeak() as dram:
        begun = time.perf_counter()
        model = load(job, device)
        load_s = time.perf_counter() - begun
        _round(replace(job, new_tokens=min(WARM_UP_TOKENS, job.new_tokens)), model, device)
        result = _round(job, model, device)
    return Measured(
        prefill_s=result.prefill_s,
        step_s=result.step_s,
        tokens=result.tokens,
        load_s=load_s,
        vram_bytes=torch.cuda.max_memory_allocated(device) + job.context_bytes if device.type == "cuda" else 0,
        dram_bytes=dram.peak_bytes + _locked_bytes(device) + _mapped_bytes(),
    )


def weights_room_bytes(job: Job, config: PreTrainedConfig) -> int:
    """What KV, activations and a guard leave of the budget for weights that stay on the card.

    Activations: a gated FFN holds up to four rows of its width and attention as many of the hidden size; six of both is room enough.
    """
    length = len(job.prompts[0])
    heads = config.num_attention_heads
    kv_width = getattr(config, "num_key_value_heads", heads) * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    kv = 2 * config.num_hidden_layers * kv_width * (length + job.new_tokens) * 2
    activations = 6 * length * (config.hidden_size + config.intermediate_size) * 2
    return job.allocator_bytes - len(job.prompts) * (kv + activations) - GUARD_BYTES


def _open_device(job: Job) -> torch.device:
    if not job.vram_bytes:
        return torch.device("cpu")
    device = torch.device("cuda", 0)
    torch.backends.cuda.enable_cudnn_sdp(False)  # the same attention kernels for all; this one plans anew at every length
    small = torch.ones(64, 64, device=device, dtype=torch.bfloat16)
    small.matmul(small)
    torch.cuda.synchronize(device)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, job.allocator_bytes / total), device)
    torch.cuda.reset_peak_memory_stats(device)
    return device


def _round(job: Job, model: nn.Module, device: torch.device) -> Generation:
    length = len(job.prompts[0])
    batch = Batch(job.prompts, job.new_tokens, chunk_tokens=length)
    pages = len(job.prompts) * -(-(length + job.new_tokens) // PAGE_TOKENS)
    stepper = Stepper(model, device, KvPool(pages, PAGE_TOKENS, kinds(model.config), device))
    return generate(stepper, batch, Sampler(Sampling(), device))


def _locked_bytes(device: torch.device) -> int:
    """Peak bytes of torch's page-locked allocator, as rounded by it: the kernel does not count them as the process's own."""
    if device.type != "cuda":
        return 0
    stats = torch.cuda.host_memory_stats()
    return max(stats.get(f"{kind}_bytes.peak", 0) for kind in ("allocated", "reserved"))  # the name depends on torch's version


def _mapped_bytes() -> int:
    """Resident bytes of safetensors files that are still mapped: transformers leaves weights that stay in DRAM there."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word, *rest = line.split()
        if not word.endswith(":"):
            counts = line.endswith("safetensors")
        elif counts and word == "Rss:":
            total += int(rest[0]) * 1024
    return total


class AnonymousPeak:
    """The most anonymous memory that this process holds beyond what it held at the start, sampled by a thread."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._first = self._most = _anonymous_bytes()

    @property
    def peak_bytes(self) -> int:
        return self._most - self._first

    def __enter__(self) -> AnonymousPeak:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self._most = max(self._most, _anonymous_bytes())


def _anonymous_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024
