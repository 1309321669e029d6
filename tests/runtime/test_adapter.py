"""A LoRA adapter is merged into a store as PEFT's ``merge_and_unload`` merges it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.runtime.asked.prompts import random_ids
from penstock.runtime.engine.validate import load_unstreamed
from penstock.runtime.model.skeleton import build_skeleton
from penstock.runtime.store.adapter import Adapter
from penstock.runtime.store.manifest import read_manifest
from penstock.runtime.store.verify import verify_store
from penstock.runtime.tools.pack import pack_checkpoint
from tests.cli import lazily
from tests.runtime.running import desk
from tests.support import decisions, plan_for, save_tiny

if find_spec("peft") is None:
    pytest.skip("peft is not installed here", allow_module_level=True)
peft = lazily("peft")
CPU = torch.device("cpu")
ATTN, ALL = ["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "base", layers=2)


def load(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype="auto")


def train(base: Path, directory: Path, dtype: torch.dtype = torch.bfloat16, **config: Any) -> Path:
    """An adapter with random A and B, saved by PEFT."""
    torch.manual_seed(5)
    model = peft.get_peft_model(load(base), peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config))
    for name, p in model.named_parameters():
        if "modules_to_save" in name:
            torch.nn.init.normal_(p, std=0.05)
    model.to(dtype).save_pretrained(directory)
    return directory


def packed(base: Path, adapter: Path, out: Path) -> Path:
    pack_checkpoint(base, out, None, False, lambda done, total: None, adapter)
    return out


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ALL, "r": 4, "lora_alpha": 16},
        {"target_modules": ATTN, "r": 8, "lora_alpha": 12, "dtype": torch.float32},
        {"target_modules": ALL, "use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers\.1\.mlp.*": 3}},
        {"target_modules": [*ATTN, "embed_tokens", "lm_head"], "r": 3},
        {"target_modules": ATTN, "modules_to_save": ["lm_head"], "layers_to_transform": [1]},
    ],
)
def test_a_packed_store_holds_what_peft_merges(base: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    adapter = train(base, tmp_path / "adapter", **config)
    want = peft.PeftModel.from_pretrained(load(base), adapter).merge_and_unload().state_dict()
    got = load_unstreamed(packed(base, adapter, tmp_path / "store"), CPU).state_dict()
    assert {name: torch.equal(tensor, got[name]) for name, tensor in want.items()} == dict.fromkeys(got, True)
    assert any(not torch.equal(tensor, got[name]) for name, tensor in load(base).state_dict().items())


def test_a_store_says_what_was_merged_and_is_another_model(base: Path, tmp_path: Path) -> None:
    adapter = train(base, tmp_path / "adapter", target_modules=ATTN)
    store = packed(base, adapter, tmp_path / "store")
    manifest = read_manifest(store)
    assert manifest.adapter is not None and manifest.adapter["name"] == "adapter" and manifest.adapter["base"] == str(base)
    assert spec_from_checkpoint(store).digest == manifest.digest != spec_from_checkpoint(base).digest
    verify_store(store, lambda done, total: None)
    prompt = list(random_ids(1, 5, 300, seed=0)[0])
    merged = peft.PeftModel.from_pretrained(load(base), adapter).merge_and_unload()
    want = merged.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, 5:].tolist()
    here = desk(tmp_path, plan_for(store, decisions(batch=2, pages=16)))
    assert here.run(prompt_tokens=5, batch=1, adapter=str(adapter))["tokens"] == [want], "the adapter that it was packed with"
    saying(lora_alpha=3)(adapter)
    assert "runtime pack" in here.refusal(adapter=str(adapter)), "another one"
    refusal = desk(tmp_path, plan_for(base, decisions(batch=2, pages=16))).refusal(checkpoint=str(store))
    assert "other weights" in refusal, "a plan of the base and kept KV of it would be taken for the store's"


def test_an_adapter_of_transposed_layers_is_merged(tmp_path: Path) -> None:
    """GPT-2's, whose matrices are stored [in, out]."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2", n_layer=1, n_embd=64, n_head=4, vocab_size=300, n_positions=64, bos_token_id=0, eos_token_id=0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "gpt2")
    adapter = train(tmp_path / "gpt2", tmp_path / "adapter", target_modules=["c_attn", "c_fc"])
    want = peft.PeftModel.from_pretrained(load(tmp_path / "gpt2"), adapter).merge_and_unload().state_dict()
    got = load_unstreamed(packed(tmp_path / "gpt2", adapter, tmp_path / "store"), CPU).state_dict()
    assert [name for name, tensor in want.items() if not torch.equal(tensor, got[name])] == []


def test_what_is_for_a_tower_is_left_out(base: Path, tmp_path: Path) -> None:
    adapter = train(base, tmp_path / "adapter", target_modules=ATTN)
    tensors = load_file(adapter / "adapter_model.safetensors")
    tower = {name.replace("model.layers", "model.vision_tower.layers"): tensor.clone() for name, tensor in tensors.items()}
    plain = Adapter.open(adapter, build_skeleton(base)).changes
    save_file(tensors | tower, adapter / "adapter_model.safetensors")
    assert Adapter.open(adapter, build_skeleton(base)).changes == plain


def without_b(adapter: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({name: t for name, t in tensors.items() if "q_proj.lora_B" not in name}, adapter / "adapter_model.safetensors")


def renamed(adapter: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({name.replace("layers.1", "layers.7"): t for name, t in tensors.items()}, adapter / "adapter_model.safetensors")


def wider(adapter: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({name: t.repeat(1, 2) if "lora_A" in name else t for name, t in tensors.items()}, adapter / "adapter_model.safetensors")


def saying(**keys: Any) -> Callable[[Path], None]:
    def change(adapter: Path) -> None:
        path = adapter / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_b, "has no lora_B.weight"),
        (renamed, "changes model.layers.7.*no parameter of this model"),
        (wider, "another model's adapter"),
        (saying(use_dora=True), "use_dora=True is not merged here"),
        (saying(init_lora_weights="pissa_niter_4"), "init_lora_weights=pissa_niter_4"),
        (saying(peft_type="LOHA"), "peft_type is 'LOHA'"),
        (saying(bias="all"), "bias=all"),
        (saying(lora_alpha="much"), "lora_alpha"),
        (saying(alpha_pattern={"(": 3}), "no pattern"),
        (lambda adapter: (adapter / "adapter_model.safetensors").unlink(), "no adapter_model.safetensors"),
        (lambda adapter: (adapter / "adapter_config.json").unlink(), "no adapter_config.json"),
        (lambda adapter: (adapter / "adapter_model.safetensors").write_bytes(b"junk"), "corrupt|truncated"),
        (shutil.rmtree, "no such directory"),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_refused_and_nothing_is_left(
    base: Path, tmp_path: Path, change: Callable[[Path], None], said: str
) -> None:
    adapter = train(base, tmp_path / "adapter", target_modules=ATTN)
    change(adapter)
    with pytest.raises(UserError, match=said) as refused:
        packed(base, adapter, tmp_path / "store")
    assert "\n" not in str(refused.value) and not (tmp_path / "store").exists()


def test_a_head_that_is_the_embedding_is_not_changed_alone(tmp_path: Path) -> None:
    tied = save_tiny(tmp_path / "tied", layers=1, tied=True)
    adapter = train(tied, tmp_path / "adapter", target_modules=["embed_tokens"])
    with pytest.raises(UserError, match="shared with another parameter"):
        packed(tied, adapter, tmp_path / "store")
