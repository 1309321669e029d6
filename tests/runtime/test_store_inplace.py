"""A store's buffers hold exactly the parameters that transformers loads."""

from __future__ import annotations

import json
import mmap
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import ALIGN
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.model.skeleton import build_skeleton
from penstock.runtime.reading.reader import ReadPool
from penstock.runtime.store.base import Store, UnitLayout, open_store
from penstock.runtime.store.parameters import model_slots
from tests.support import save_tiny

SHARED = Path(__file__).parents[2].parent / "shared" / "models"
FAMILIES = [
    ("llama", False),
    ("llama", True),
    ("qwen3", False),
    ("mistral", False),
    ("gemma2", True),
    ("gemma3_text", True),
    ("mixtral", False),
    ("qwen3_moe", False),
]


def read_layout(pool: ReadPool, layout: UnitLayout) -> dict[str, torch.Tensor]:
    """The layout's parameters, read into a fresh buffer."""
    buffer = mmap.mmap(-1, layout.nbytes)
    pool.read_now(layout.extents, memoryview(buffer))
    flat = torch.frombuffer(buffer, dtype=torch.uint8)
    return {t.name: flat[t.offset : t.offset + t.nbytes].view(t.dtype).view(t.shape) for t in layout.tensors}


def assert_same_as_loaded(store: Store, directory: Path, block_bytes: int = 1 << 16, direct: bool = True) -> None:
    """Every parameter, bit for bit, and none left out."""
    expected = dict(AutoModelForCausalLM.from_pretrained(directory).named_parameters())
    slots = model_slots(build_skeleton(directory))
    seen = set()
    with ReadPool(3, block_bytes, direct=direct) as pool:
        for unit, group in slots.units.items():
            found = read_layout(pool, store.unit(unit))
            for slot in group:
                whole = expected[slot.full_name]
                assert torch.equal(found[slot.name], whole if slot.part is None else whole[slot.part]), slot.full_name
                seen |= {slot.full_name} if slot.part is None or slot.part + 1 == len(whole) else set()
        for name, layout in store.others().items():
            assert torch.equal(read_layout(pool, layout)[name], expected[name]), name
            seen.add(name)
    assert seen == set(expected)


@pytest.mark.parametrize("shard", ["50GB", "150kB"])
@pytest.mark.parametrize(("model_type", "tied"), FAMILIES)
def test_buffers_hold_what_transformers_loads(tmp_path: Path, model_type: str, tied: bool, shard: str) -> None:
    directory = save_tiny(tmp_path / "model", model_type, tied, layers=3, shard=shard)
    assert_same_as_loaded(open_store(directory, build_skeleton(directory)), directory)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mixtral"])
def test_trained_models_are_read_as_transformers_loads_them(name: str) -> None:
    if not (SHARED / name).is_dir():
        pytest.skip(f"no {SHARED / name}")
    assert_same_as_loaded(open_store(SHARED / name, build_skeleton(SHARED / name)), SHARED / name, block_bytes=1 << 20)


def test_buffered_reads_give_the_same_bytes(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path / "model", "mixtral", layers=2, shard="150kB")
    assert_same_as_loaded(open_store(directory, build_skeleton(directory)), directory, direct=False)


def test_an_older_checkpoint_with_fused_experts_is_read_too(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path / "model", "qwen3_moe", layers=2)
    model = AutoModelForCausalLM.from_pretrained(directory)
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    names = json.dumps(sorted(_tensor_names(tmp_path / "fused")))
    assert "experts.gate_up_proj" in names and "experts.0." not in names
    assert_same_as_loaded(open_store(tmp_path / "fused", build_skeleton(tmp_path / "fused")), tmp_path / "fused")


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mixtral", "qwen3_moe"])
def test_a_units_parameters_have_the_bytes_that_the_planner_counts(tmp_path: Path, model_type: str) -> None:
    directory = save_tiny(tmp_path / "model", model_type, layers=2)
    store = open_store(directory, build_skeleton(directory))
    for spec in spec_from_checkpoint(directory).units:
        if spec.layer is not None:
            units = [Unit(spec.kind, spec.layer, e if spec.kind == "expert" else None) for e in range(spec.count)]
            assert {store.unit(unit).payload_bytes for unit in units} == {spec.stored_bytes}


def test_a_dense_unit_is_one_extent_that_keeps_its_place_in_the_page(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path / "model", layers=2)
    store = open_store(directory, build_skeleton(directory))
    for unit in (Unit("attn", 1), Unit("ffn", 0)):
        layout = store.unit(unit)
        (extent,) = layout.extents
        assert extent.owns_pages and extent.dest % ALIGN == extent.offset % ALIGN
        assert layout.nbytes % ALIGN == 0 and layout.nbytes <= layout.payload_bytes + 2 * ALIGN
        assert sum(t.nbytes for t in layout.tensors) == layout.payload_bytes


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path / "model", layers=2)
    skeleton = build_skeleton(directory)
    _edit_config(directory, num_hidden_layers=3)
    with pytest.raises(UserError, match=r"no tensor for parameter model\.layers\.2\.self_attn\.q_proj\.weight"):
        open_store(directory, build_skeleton(directory))
    assert open_store(directory, skeleton).digest


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path / "model", layers=2)
    _edit_config(directory, intermediate_size=128)
    with pytest.raises(UserError, match=r"tensor model\.layers\.0\.mlp\.\w+\.weight has shape .* config\.json and the weights"):
        open_store(directory, build_skeleton(directory))


def test_a_tensor_of_another_dtype_is_named(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path / "model", layers=2)
    _edit_config(directory, dtype="float32")
    with pytest.raises(UserError, match=r"tensor model\.layers\.0\.self_attn\.q_proj\.weight is BF16 and parameter .* float32"):
        open_store(directory, build_skeleton(directory))


def test_a_path_with_spaces_and_equals_signs_is_no_obstacle(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path / "a model=x, y", layers=2)
    assert_same_as_loaded(open_store(directory, build_skeleton(directory)), directory)


def test_a_tied_checkpoint_that_stores_the_head_alone_is_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    directory = save_tiny(tmp_path / "model", tied=True, layers=2)
    shutil.copytree(directory, tmp_path / "head")
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "head" / "model.safetensors", metadata={"format": "pt"})
    store = open_store(tmp_path / "head", build_skeleton(tmp_path / "head"))
    with ReadPool(1, 1 << 16) as pool:
        embedding = read_layout(pool, store.others()["model.embed_tokens.weight"])["model.embed_tokens.weight"]
    assert torch.equal(embedding, tensors["lm_head.weight"])


def _edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _tensor_names(directory: Path) -> list[str]:
    from safetensors import safe_open

    names: list[str] = []
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names += file.keys()
    return names
