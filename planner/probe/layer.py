"""What it costs the host to issue one decoder layer: a layer with the operations of a real one and next to no arithmetic.

The operations are those of a Llama layer as ``transformers`` writes it (RMSNorm in FP32 by parts, rotate-half, cache by
concatenation, SDPA, gated MLP), as modules, since calling modules is a part of the cost.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

from planner.probe.findings import Figure

HIDDEN, HEADS, KV_HEADS, FFN, CACHED_TOKENS = 128, 4, 2, 256, 32
"""A layer so small that a device has done with an operation before the next one is issued."""
LAYERS_PER_SAMPLE = 16
"""Layers issued before a synchronize: fewer operations than a CUDA stream queues before it makes the host wait."""
WARM_UP_LAYERS = 4
LEAST_SAMPLES = 2
"""Few, since on an overloaded machine a layer takes 100 times as long as on an idle one."""


def build_layer(device: str) -> Callable[[], object]:
    """A function that runs the layer once on ``device``, batch 1, one new token."""
    import torch
    from torch import nn
    from torch.nn.functional import scaled_dot_product_attention, silu

    head_dim = HIDDEN // HEADS

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(HIDDEN))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = x.to(torch.float32)
            return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    def turned(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
            self.k, self.v = (nn.Linear(HIDDEN, KV_HEADS * head_dim, bias=False) for _ in range(2))

        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
            q, k, v = (w(x).view(1, 1, -1, head_dim).transpose(1, 2) for w in (self.q, self.k, self.v))
            q, k = q * cos + turned(q) * sin, k * cos + turned(k) * sin
            k, v = torch.cat((past, k), dim=2), torch.cat((past, v), dim=2)
            k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
            out = scaled_dot_product_attention(q, k, v)
            return self.o(out.transpose(1, 2).reshape(1, 1, HIDDEN))

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
            self.down = nn.Linear(FFN, HIDDEN, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(silu(self.gate(x)) * self.up(x))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.attention, self.between, self.mlp = Norm(), Attention(), Norm(), Mlp()

        def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            x = x + self.attention(self.before(x), *rest)
            return x + self.mlp(self.between(x))

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    layer = Layer().to(device=device, dtype=torch.bfloat16).requires_grad_(False)
    inputs = (made(1, 1, HIDDEN), made(1, 1, 1, head_dim), made(1, 1, 1, head_dim), made(1, KV_HEADS, CACHED_TOKENS, head_dim))
    return lambda: layer(*inputs)


def measure_launch(device: str, seconds: float, synchronize: Callable[[], None]) -> Iterator[Figure]:
    """Host seconds to issue one layer on ``device``; ``synchronize`` waits for the device and is not counted.

    The lower quartile: another process on the cores can only make a sample longer, often by ten times.
    """
    import torch

    run = build_layer(device)
    durations: list[float] = []
    with torch.inference_mode():
        for _ in range(WARM_UP_LAYERS):
            run()
        synchronize()
        end = time.perf_counter() + seconds
        while len(durations) < LEAST_SAMPLES or time.perf_counter() < end:
            start = time.perf_counter()
            for _ in range(LAYERS_PER_SAMPLE):
                run()
            durations.append((time.perf_counter() - start) / LAYERS_PER_SAMPLE)
            synchronize()
    how = f"a decoder layer of hidden size {HIDDEN}, batch 1, on {device}, lower quartile of {len(durations)} times {LAYERS_PER_SAMPLE}"
    yield Figure("layer_launch_s", statistics.quantiles(durations, n=4, method="inclusive")[0], how)
