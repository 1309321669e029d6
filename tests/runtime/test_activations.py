"""What a forward pass allocates is what the planner reckons with."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.planner.contract.prices.sizes import activation_bytes
from penstock.runtime.experts.expert_forward import WholeExperts
from penstock.runtime.memory.free_memory import PeakDram
from penstock.runtime.model.rows import Row, RowKind, Step
from penstock.runtime.store.decoder import decoder_layers
from tests.runtime.steppers import PAGE_TOKENS, unstreamed
from tests.runtime.whole_experts import take_over
from tests.support import save_tiny, workload


class Live(TorchDispatchMode):
    """Bytes of the tensors that were made inside and are still held, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._held: dict[int, int] = {}

    @property
    def held_bytes(self) -> int:
        return sum(self._held.values())

    def __torch_dispatch__(self, kernel: Any, types: Any, args: Any = (), keys: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, keys))}
        out = kernel(*args, **(keys or {}))
        for storage in (tensor.untyped_storage() for tensor in _tensors(out)):
            if storage._cdata not in given and storage._cdata not in self._held:
                self._held[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._held.pop, storage._cdata, None)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return out


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize(("tokens", "batch"), [(400, 1), (100, 4)])
@pytest.mark.parametrize("model_type", ["llama", "mixtral", "qwen3_moe"])
def test_tensors_of_a_prefill_are_what_the_planner_counts(tmp_path: Path, model_type: str, tokens: int, batch: int) -> None:
    checkpoint = save_tiny(tmp_path, model_type, layers=2)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval().requires_grad_(False)
    take_over(model, WholeExperts(decoder_layers(model)))
    pages = -(-(tokens + 8) // PAGE_TOKENS)
    prompts = [Row(k, (5,) * (tokens - k), 0, tuple(range(k * pages, (k + 1) * pages)), RowKind.prompt) for k in range(batch)]
    stepper = unstreamed(model, slots=batch * pages)
    with torch.inference_mode():
        with Live() as prefill:
            stepper.run(Step(tuple(prompts)))
        with Live() as decode:
            stepper.run(Step(tuple(replace(row, tokens=(5,), start=row.end, kind=RowKind.decode) for row in prompts)))
    spec = spec_from_checkpoint(checkpoint)
    planned = activation_bytes(spec, workload(prompt_tokens=tokens, new_tokens=8, batch=batch), batch, tokens)
    kv_bytes = batch * pages * PAGE_TOKENS * spec.kv_bytes_per_token
    assert planned == pytest.approx(prefill.peak_bytes - kv_bytes, rel=0.1)
    assert decode.peak_bytes < planned


def test_the_lm_head_is_not_copied_for_each_sequence() -> None:
    """On the CPU, a product with the last row of each prompt where it lies makes a copy of the head, 26 MB here, a sequence."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=200_000, tie_word_embeddings=True, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    step = Step(tuple(Row(k, (5,) * 32, 0, (2 * k, 2 * k + 1), RowKind.prompt) for k in range(8)))
    with torch.inference_mode():
        peaks = []
        for _ in range(2):  # the first pass loads kernels
            stepper, peak = unstreamed(model, slots=16), PeakDram()
            stepper.run(step)
            peaks.append(peak.peak_bytes())
    assert peaks[1] < 100e6
