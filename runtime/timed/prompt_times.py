"""What the host takes to launch a layer of a prompt that is recorded around its attention. Prints one JSON document: ``piece_s``, or why
nothing is recorded here (``refused``). ``gpu=0 seconds=0.5``.

A Llama of tiny layers, all on the card: what is computed takes next to no time, and what remains is the host's. Recorded layers are held to
launched ones first, as a run does. Takes some 50 MB of the card beside a context.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.runtime.engine.passes.stepper import Stepper
from penstock.runtime.kv.attention.paged_kernel import open_kernel
from penstock.runtime.kv.batch.kv_pool import KvPool
from penstock.runtime.kv.batch.kv_sequence import KvSequence
from penstock.runtime.kv.batch.kv_windows import kinds
from penstock.runtime.model.rows import RowKind, Step
from penstock.runtime.recorded.card_pieces import CardPieces
from penstock.runtime.recorded.prompts.prompt_layers import Pieces, PromptLayers
from penstock.runtime.store.decoder import decoder_layers

LAYERS, HIDDEN, TOKENS, PAGE_TOKENS = 8, 256, 64, 64
WARM_UP, LEAST = 20, 40
"""Passes."""


class TinyPrompts:
    """Passes over a prompt of ``TOKENS`` tokens, whose layers are recorded by ``pieces``; ``synchronize`` waits for ``device``."""

    def __init__(self, device: torch.device, pieces: Pieces, synchronize: Callable[[], None]):
        sizes: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = LlamaConfig(num_hidden_layers=LAYERS, vocab_size=HIDDEN, max_position_embeddings=TOKENS, dtype=torch.bfloat16, **sizes)
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config).eval()
        model.to(device, torch.bfloat16)
        pool = KvPool(1, PAGE_TOKENS, kinds(config), device)
        self._stepper = Stepper(model, device, pool, kernel=open_kernel(device))
        sequence = KvSequence.of(0, list(range(TOKENS)))
        sequence.hold(pool.pages, TOKENS)
        self._step, self._synchronize = Step((sequence.row(TOKENS, RowKind.prompt),)), synchronize
        self._begun_s, self._took_s = 0.0, list[float]()
        layers = decoder_layers(model)
        self.recorded = PromptLayers(layers, self._stepper.attention, pieces)
        self.recorded.record(partial(self._stepper.run, self._step))
        layers[0].register_forward_pre_hook(self._begin)
        layers[-1].register_forward_hook(self._end)

    def _begin(self, *_: object) -> None:
        self._begun_s = time.perf_counter()

    def _end(self, *_: object) -> None:
        self._took_s.append(time.perf_counter() - self._begun_s)

    def piece_s(self, seconds: float) -> float:
        """Host seconds of a layer: the median of the passes of so many ``seconds``."""
        until = None
        while until is None or len(self._took_s) < LEAST or time.perf_counter() < until:
            self.recorded.begin_pass(self._step)
            self._stepper.run(self._step)
            self._synchronize()
            if until is None and len(self._took_s) == WARM_UP:
                self._took_s.clear()
                until = time.perf_counter() + seconds
        return median(self._took_s) / LAYERS


def timed(device: torch.device, pieces: Pieces, synchronize: Callable[[], None], seconds: float) -> dict[str, float | str]:
    """What is printed."""
    prompts = TinyPrompts(device, pieces, synchronize)
    if prompts.recorded.refused is not None:
        return {"refused": prompts.recorded.refused}
    return {"piece_s": prompts.piece_s(seconds)}


def main() -> None:
    given = dict(word.split("=", 1) for word in sys.argv[1:])
    device = torch.device("cuda", int(given["gpu"]))
    with torch.cuda.device(device):
        print(json.dumps(timed(device, CardPieces(device), torch.cuda.synchronize, float(given["seconds"]))))


if __name__ == "__main__":
    main()
