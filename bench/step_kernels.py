"""One plan opened in a process of its own: seconds of a decode step by the wall's clock and by the profiler, and its logits.

    python bench/step_kernels.py plan=plan.yaml prompt_tokens=128 new_tokens=24

Ends with one JSON line: `wall_s`, the median step; `kernel_s`, what the card (without one, torch on the CPU) computed in a step, the
mean of `PROFILED` of them; `digest`, of the logits behind four fixed prompts, every bit of them.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import penstock  # noqa: E402
from bench.keys import given_of  # noqa: E402

PROFILED = 8
PROMPTS = 4
FIRST, PRIME = 11, 7919
"""Ids of the fixed prompts: multiples of a prime."""


def steps(model: Any, prompt: list[int], count: int) -> list[float]:
    """Seconds of each of ``count`` decode steps."""
    tokens = iter(model.stream(prompt, count + 1))
    next(tokens)
    found, before = [], time.perf_counter()
    for _ in islice(tokens, count):
        now = time.perf_counter()
        found.append(now - before)
        before = now
    return found


def kernel_s(model: Any, prompt: list[int]) -> float:
    """Mean seconds of compute of a decode step, by torch's profiler; copies are not compute."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    card = torch.cuda.is_available()
    tokens = iter(model.stream(prompt, PROFILED + 2))
    next(tokens)
    next(tokens)
    with profile(activities=[ProfilerActivity.CUDA if card else ProfilerActivity.CPU]) as told:
        took = sum(1 for _ in islice(tokens, PROFILED))
        if card:
            torch.cuda.synchronize()
    events = told.key_averages()
    if card:
        return sum(e.self_device_time_total for e in events if not e.key.startswith(("Memcpy", "Memset"))) / 1e6 / took
    return sum(e.self_cpu_time_total for e in events) / 1e6 / took


def main() -> None:
    given = given_of(sys.argv[1:], ("plan", "prompt_tokens", "new_tokens"))
    with penstock.open(given["plan"]) as model:
        vocab, length = model.plan.model.vocab, int(given.get("prompt_tokens", 128))
        prompts = [[FIRST + PRIME * (i + 1) * (k + 1) for i in range(length)] for k in range(PROMPTS)]
        prompts = [[id % vocab for id in prompt] for prompt in prompts]
        steps(model, prompts[0], 4)
        wall = steps(model, prompts[0], int(given.get("new_tokens", 24)))
        found = {"wall_s": median(wall), "kernel_s": kernel_s(model, prompts[0])}
        logits = model.logits(prompts[:1]).float().contiguous().numpy().tobytes()
        found |= {"digest": hashlib.sha256(logits).hexdigest(), "vram_bytes": model.plan.prediction.vram_bytes}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
