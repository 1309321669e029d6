"""What it costs the host to issue one decoder layer: those of a real model, with next to no arithmetic in them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from penstock.planner.common.outside.cache_name import cache_name
from penstock.planner.probe.findings import Figure

if TYPE_CHECKING:
    import torch

HIDDEN, HEADS, KV_HEADS, FFN, VOCAB, CACHED_TOKENS = 128, 4, 2, 256, 32, 32
"""Layers so small that a device has done with an operation before the next one is issued."""
LAYERS = 16
"""Issued before a synchronize: fewer operations than a CUDA stream queues before it makes the host wait."""
WARM_UP_STEPS, WARM_UP_S = 2, 0.25
LEAST_SAMPLES, LEAST_S = 2, 0.5
"""Few samples, since on an overloaded machine a layer takes 100 times as long as on an idle one. A process's first steps find its kernels.
A quick probe that timed six of them gave 0.57 and 1.37 ms a layer on one kind of host, where runs took the same."""


class TinyDecoder:
    """A Llama of ``transformers`` with random weights on ``device``, batch 1, that decodes one token over ``CACHED_TOKENS`` cached ones.

    An event is recorded at both ends of each attention and FFN, as the runtime does.
    """

    def __init__(self, device: str):
        import torch
        from transformers import LlamaConfig, LlamaModel

        config = LlamaConfig(
            hidden_size=HIDDEN, intermediate_size=FFN, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, num_hidden_layers=LAYERS,
            vocab_size=VOCAB, dtype=torch.bfloat16,
        )  # fmt: skip
        self._model = cast(Any, LlamaModel(config))
        self._model.to(device=device, dtype=torch.bfloat16).eval().requires_grad_(False)
        self._events = device != "cpu"
        for layer in self._model.layers:
            for block in (layer.self_attn, layer.mlp):
                block.register_forward_pre_hook(lambda *_: self._mark())
                block.register_forward_hook(lambda *_: self._mark())
        self._cache_name = cache_name(self._model.forward)
        ids = torch.ones(1, CACHED_TOKENS, dtype=torch.long, device=device)
        self._token, self._position = ids[:, :1], torch.full((1, 1), CACHED_TOKENS, device=device)
        with torch.inference_mode():
            self._cache = self._model(input_ids=ids, use_cache=True)[self._cache_name]

    def _mark(self) -> None:
        if self._events:
            import torch

            torch.cuda.Event(enable_timing=True, blocking=True).record()

    def step(self) -> torch.Tensor:
        """Issue all layers for one token -> [1, 1, HIDDEN]."""
        out = self._model(input_ids=self._token, position_ids=self._position, use_cache=True, **{self._cache_name: self._cache})
        return out.last_hidden_state

    def timed_step(self, synchronize: Callable[[], None]) -> float:
        """Host seconds to launch one layer: a step's over its layers. The step's token leaves the cache again. ``synchronize`` waits for
        the device and is not counted."""
        import torch

        with torch.inference_mode():
            start = time.perf_counter()
            self.step()
            taken = time.perf_counter() - start
            synchronize()
            self._cache.crop(-1)
        return taken / LAYERS


def _steps(model: TinyDecoder, least: int, seconds: float, synchronize: Callable[[], None]) -> list[float]:
    """Host seconds to launch one layer, of the steps of ``seconds``, ``least`` of them at least."""
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < least or time.perf_counter() < end:
        taken.append(model.timed_step(synchronize))
    return taken


def measure_launch(device: str, seconds: float, synchronize: Callable[[], None]) -> Iterator[Figure]:
    """Host seconds to launch one layer on ``device``; ``synchronize`` waits for the device and is not counted.

    The result is the median, as for a run's steps. On shared machines a host's speed changes by half within a minute: its fastest quarter
    of samples lies 3 to 33 % below the median (six times 64 samples on an H200's host).
    """
    model = TinyDecoder(device)
    _steps(model, WARM_UP_STEPS, WARM_UP_S, synchronize)
    durations = _steps(model, LEAST_SAMPLES, max(seconds, LEAST_S), synchronize)
    how = f"a Llama of {LAYERS} layers of hidden size {HIDDEN} in transformers, {device}: median of {len(durations)} steps"
    yield Figure("layer_launch_s", statistics.median(durations), how)
