"""One tiny model of each class that is no plain decoder: streamed, it says what transformers' own model says, bit for bit on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import show_bytes
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.planner.contract.checkpoint.left_out import left_out
from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.engine.passes.generate import Batch, Generation
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.engine.validate import load_unstreamed
from penstock.runtime.model.cast import STRETCH, Cast
from penstock.runtime.model.skeleton import open_skeleton, text_class
from penstock.runtime.reading.layout import Extent, TensorLayout, UnitLayout
from penstock.runtime.tools.pack import pack_checkpoint
from tests.runtime.sessions import opened
from tests.runtime.steppers import said
from tests.support import HostCopier, decisions, plan_for, save_tiny

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
    "llama4_text": {
        **TEXT, "intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
        "attention_chunk_size": 16,
    },
    "granitemoe": {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_vl_moe": {
        "text_config": {**TEXT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "rope_parameters": MIXED_ROPE},
        "vision_config": {
            "depth": 4, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
    },
}  # fmt: skip
"""Model type -> its config: wrappers whose text model has fewer layers than a tower, a head tied by the outer config, biases in F32;
experts outside transformers' interface, under another name, and stored transposed."""
EXPERTS = {"dots1": (1, 2), "llama4_text": (1,), "granitemoe": (0, 1, 2), "qwen3_vl_moe": (0, 1, 2)}
"""Layers with routed experts."""


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


def same_as_transformers(checkpoint: Path, gpu: bool = False, store: Path | None = None) -> None:
    model = load_unstreamed(checkpoint, CPU)
    first, want, got = alone(model), said(model, BATCH), run(store or checkpoint, gpu)
    assert got.tokens == want.tokens
    assert all(torch.equal(a, b) for a, b in zip(got.logits, want.logits, strict=True))
    assert torch.equal(got.logits[0], first), "packed rows are rows alone"


def rewrite(checkpoint: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    tensors = {name: change(name, tensor).contiguous() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return checkpoint


@torch.inference_mode()
def alone(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([model(input_ids=torch.tensor([prompt])).logits[:, -1] for prompt in BATCH.prompts])


@pytest.mark.parametrize("model_type", CLASSES)
@pytest.mark.parametrize("gpu", [False, True])
def test_every_class_streams(tmp_path: Path, model_type: str, gpu: bool) -> None:
    checkpoint = build(tmp_path, model_type)
    experts = spec_from_checkpoint(checkpoint).experts
    assert (experts.layers if experts else ()) == EXPERTS.get(model_type, ())
    same_as_transformers(checkpoint, gpu)


def test_transposed_experts_are_packed_as_they_are_and_load_as_transformers_has_them(tmp_path: Path) -> None:
    checkpoint = build(tmp_path, "qwen3_vl_moe")
    pack_checkpoint(checkpoint, tmp_path / "packed", None, False, lambda *_: None)
    whole, loaded = load_unstreamed(tmp_path / "packed", CPU), load_unstreamed(checkpoint, CPU)
    assert torch.equal(alone(whole), alone(loaded))
    same_as_transformers(checkpoint, store=tmp_path / "packed")


def test_a_plan_that_knows_nothing_of_a_models_experts_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    checkpoint = build(tmp_path, "granitemoe")
    plan = plan_for(checkpoint, decisions())
    dense = replace(plan, model=replace(plan.model, units=tuple(u for u in plan.model.units if u.kind != "expert"), routers=None))
    dense = replace(dense, decisions=replace(dense.decisions, experts=None))
    with pytest.raises(UserError, match=r"layer 0 has 4 routed experts in the model as transformers builds it and 0 in the plan"):
        opened(dense, checkpoint).__enter__()


def test_a_wrappers_towers_are_neither_planned_for_nor_read(tmp_path: Path) -> None:
    checkpoint = build(tmp_path, "gemma3")
    skeleton, spec = open_skeleton(checkpoint), spec_from_checkpoint(checkpoint)
    assert len(skeleton.layers) == spec.layers == 3
    assert not [name for name in skeleton.store.others() if "vision" in name or "projector" in name]
    assert sum(layout.payload_bytes for layout in skeleton.store.others().values()) == spec.norm_bytes + spec.embed_bytes + spec.head_bytes
    (note,) = left_out(str(checkpoint))
    assert note.startswith("left out of plan and run: ") and note.endswith("towers of other modalities: it reads and writes text")
    assert skeleton.store.unit(Unit("attn", 2)).payload_bytes == spec.attn_bytes[2]


def test_a_wrappers_names_may_be_its_modules_own(tmp_path: Path) -> None:
    checkpoint = build(tmp_path, "gemma3")
    tensors = load_file(checkpoint / "model.safetensors")
    renamed = {name.replace("language_model.model.", "model.language_model."): tensor for name, tensor in tensors.items()}
    assert set(renamed) != set(tensors)
    save_file(renamed, checkpoint / "model.safetensors", metadata={"format": "pt"})
    same_as_transformers(checkpoint)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_stored_in_another_float_type_is_cast_on_load(tmp_path: Path, gpu: bool, packed: bool) -> None:
    """Norms inside a unit, norms outside, tables: narrower and wider."""
    wide = ("norm", "embed_tokens") if gpu else ("norm", "lm_head")
    checkpoint = save_tiny(tmp_path / "model", "qwen3", layers=3)
    rewrite(checkpoint, lambda name, tensor: tensor.float() if any(part in name for part in wide) else tensor)
    assert spec_from_checkpoint(checkpoint).compute_dtype == "bfloat16"
    if packed:
        pack_checkpoint(checkpoint, tmp_path / "packed", None, False, lambda *_: None)
        assert load_unstreamed(tmp_path / "packed", CPU).model.norm.weight.dtype is torch.bfloat16
    same_as_transformers(checkpoint, gpu, tmp_path / "packed" if packed else checkpoint)


@pytest.mark.parametrize(
    ("stored", "wanted"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)]
)
@pytest.mark.parametrize("offset", [0, 2, 64])
def test_a_cast_in_place_is_torchs(stored: torch.dtype, wanted: torch.dtype, offset: int) -> None:
    offset = offset if offset % stored.itemsize == 0 else 0
    values = torch.randn(2 * STRETCH + 7).to(stored)
    nbytes = values.numel() * stored.itemsize
    layout = UnitLayout(
        offset + nbytes, (TensorLayout("w", (len(values),), stored, offset, nbytes),), (Extent(Path("f"), 0, nbytes, offset),), nbytes
    )
    cast = Cast(wanted)
    roomy = cast.roomy(layout)
    (extent,) = roomy.extents
    buffer = torch.zeros(roomy.nbytes, dtype=torch.uint8)
    buffer[extent.dest : extent.dest + nbytes] = values.view(torch.uint8)
    cast.convert(roomy.tensors, buffer)
    (bound,) = cast.as_bound(roomy.tensors)
    assert torch.equal(buffer[bound.offset : bound.offset + bound.nbytes].view(wanted), values.to(wanted))


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(("layers", "head"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("packed", [False, True])
def test_a_head_of_another_float_type_runs_with_a_gpu_too(
    tmp_path: Path, layers: torch.dtype, head: torch.dtype, gpu: bool, packed: bool
) -> None:
    """Resident or streamed in blocks, wider and narrower than it is computed with."""
    checkpoint = save_tiny(tmp_path / "model", layers=2)
    rewrite(checkpoint, lambda name, tensor: tensor.to(head if "lm_head" in name else layers))
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"dtype": str(layers).removeprefix("torch.")}))
    spec = spec_from_checkpoint(checkpoint)
    assert spec.head_bytes == 4 * spec.vocab * spec.hidden, "room for the wider of both"
    if packed:
        pack_checkpoint(checkpoint, tmp_path / "packed", None, False, lambda *_: None)
    want, got = said(load_unstreamed(checkpoint, CPU), BATCH), run(tmp_path / "packed" if packed else checkpoint, gpu)
    assert got.tokens == want.tokens and all(torch.equal(a, b) for a, b in zip(got.logits, want.logits, strict=True))


@pytest.mark.parametrize("gpu", [False, True])
def test_a_head_that_is_stored_beside_a_tied_embedding_is_the_one_that_computes(tmp_path: Path, gpu: bool) -> None:
    checkpoint = save_tiny(tmp_path / "model", layers=2)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    same_as_transformers(checkpoint, gpu)


@pytest.mark.parametrize("prefix", ["mtp.layers.0.", "model.layers.3."])
def test_layers_that_predict_further_tokens_are_left_out_and_said(tmp_path: Path, prefix: str) -> None:
    """Beside the stack, as Qwen3-Next has them, or behind its end, as DeepSeek-V3 has them."""
    checkpoint = save_tiny(tmp_path / "model", layers=3)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    tensors = load_file(checkpoint / "model.safetensors")
    more = {name.replace("model.layers.0.", prefix): tensor.clone() for name, tensor in tensors.items() if "layers.0." in name}
    save_file(tensors | more, checkpoint / "model.safetensors", metadata={"format": "pt"})
    size = sum(tensor.nbytes for tensor in more.values())
    assert spec_from_checkpoint(checkpoint).weight_bytes == sum(tensor.nbytes for tensor in tensors.values())
    (note,) = left_out(str(checkpoint))
    assert note == f"left out of plan and run: {len(more)} tensors ({show_bytes(size)}) of layers that predict further tokens at once"
    same_as_transformers(checkpoint)


def test_an_embedding_may_have_more_rows_than_the_head(tmp_path: Path) -> None:
    """Mllama's has: pictures have tokens, and none is ever said."""
    checkpoint = save_tiny(tmp_path / "model", layers=2)
    plain = spec_from_checkpoint(checkpoint)
    rewrite(checkpoint, lambda name, tensor: torch.cat([tensor, tensor[:8]]) if "embed_tokens" in name else tensor)
    longer = spec_from_checkpoint(checkpoint)
    assert (longer.vocab, longer.head_bytes) == (plain.vocab, plain.head_bytes) and longer.embed_bytes > plain.embed_bytes
