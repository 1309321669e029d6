"""One tiny model of each class that is no plain decoder: streamed, it says what transformers' own model says, bit for bit on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel

from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.engine.generate import Batch, Generation
from penstock.runtime.engine.sampling import Sampler, Sampling
from penstock.runtime.engine.validate import load_unstreamed
from penstock.runtime.model.skeleton import open_skeleton, text_class
from tests.runtime.sessions import opened
from tests.runtime.steppers import said
from tests.support import HostCopier, decisions, plan_for

CPU = torch.device("cpu")
BATCH = Batch(prompts=[[5, 9, 200, 31, 7], [17, 250]], max_new_tokens=3, chunk_tokens=1 << 20)
TEXT = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
MIXED_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
CLASSES: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {
        "text_config": {**TEXT, "model_type": "gemma3_text", "sliding_window": 16},
        "vision_config": {"model_type": "siglip_vision_model", **VISION}, "mm_tokens_per_image": 4,
    },
    "qwen2_5_vl": {
        "text_config": {**TEXT, "rope_parameters": MIXED_ROPE, "tie_word_embeddings": True}, "tie_word_embeddings": True,
        "vision_config": {"depth": 4, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64},
    },
    "dots1": {
        **TEXT, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
}  # fmt: skip
"""Model type -> its config: wrappers whose text model has fewer layers than a tower, a head tied by the outer config, biases in F32."""


def build(directory: Path, model_type: str) -> Path:
    """A random BF16 checkpoint as transformers saves what it has loaded: with the parameters that it keeps in F32."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(model_type, **CLASSES[model_type])
    model = text_class(config).from_config(config, dtype=torch.float32)
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, mean=1.0 if "norm" in name else 0.0, std=0.05)
    model.save_pretrained(directory / "wide")
    type(model).from_pretrained(directory / "wide", dtype=torch.bfloat16).save_pretrained(directory / "model")
    return directory / "model"


def run(checkpoint: Path, gpu: bool) -> Generation:
    with opened(plan_for(checkpoint, decisions(gpu=gpu, hwm=3), gpu), checkpoint, HostCopier() if gpu else None) as session:
        session.load(BATCH)
        return session.generate(BATCH, Sampler(Sampling(), CPU), keep_logits=True)


def same_as_transformers(checkpoint: Path, gpu: bool = False) -> None:
    model = load_unstreamed(checkpoint, CPU)
    first, want, got = alone(model), said(model, BATCH), run(checkpoint, gpu)
    assert got.tokens == want.tokens
    assert all(torch.equal(a, b) for a, b in zip(got.logits, want.logits, strict=True))
    assert torch.equal(got.logits[0], first), "packed rows are rows alone"


@torch.inference_mode()
def alone(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([model(input_ids=torch.tensor([prompt])).logits[:, -1] for prompt in BATCH.prompts])


@pytest.mark.parametrize("model_type", CLASSES)
@pytest.mark.parametrize("gpu", [False, True])
def test_every_class_streams(tmp_path: Path, model_type: str, gpu: bool) -> None:
    same_as_transformers(build(tmp_path, model_type), gpu)


def test_a_wrappers_towers_are_neither_planned_for_nor_read(tmp_path: Path) -> None:
    checkpoint = build(tmp_path, "gemma3")
    skeleton, spec = open_skeleton(checkpoint), spec_from_checkpoint(checkpoint)
    assert len(skeleton.layers) == spec.layers == 3
    assert not [name for name in skeleton.store.others() if "vision" in name or "projector" in name]
    assert sum(layout.payload_bytes for layout in skeleton.store.others().values()) == spec.norm_bytes + spec.embed_bytes + spec.head_bytes
    assert skeleton.store.unit(Unit("attn", 2)).payload_bytes == spec.attn_bytes[2]


def test_a_wrappers_names_may_be_its_modules_own(tmp_path: Path) -> None:
    checkpoint = build(tmp_path, "gemma3")
    tensors = load_file(checkpoint / "model.safetensors")
    renamed = {name.replace("language_model.model.", "model.language_model."): tensor for name, tensor in tensors.items()}
    assert set(renamed) != set(tensors)
    save_file(renamed, checkpoint / "model.safetensors", metadata={"format": "pt"})
    same_as_transformers(checkpoint)
