"""A synthetic checkpoint is one that transformers, safetensors and the store take for real."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.planner.contract.config.config_schema import ModelConfig
from penstock.planner.contract.config.geometry import spec_from_geometry
from penstock.planner.contract.given.formats import Dtype
from penstock.runtime.model.skeleton import build_skeleton
from penstock.runtime.store.base import open_store
from penstock.runtime.tools import runtime_verbs
from penstock.runtime.tools import synth as synth_module
from penstock.runtime.tools.synth import synthesize
from tests.cli import HANGS_S, refusal
from tests.runtime.test_store_inplace import assert_same_as_loaded

ROOT = Path(__file__).parents[2]
BASE = ModelConfig(name="tiny", model_type="llama", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, vocab=256, ffn=128)
MOE = {"ffn": 0, "experts": 12, "top_k": 2, "expert_ffn": 32}
MODELS = {
    "llama": BASE,
    "llama, tied": replace(BASE, tied=True),
    "mistral": replace(BASE, model_type="mistral"),
    "qwen2": replace(BASE, model_type="qwen2", qkv_bias=True),
    "qwen3": replace(BASE, model_type="qwen3", qk_norm=True),
    "mixtral": replace(BASE, model_type="mixtral", **MOE),
    "qwen3_moe": replace(BASE, model_type="qwen3_moe", qk_norm=True, **MOE),
    "llama in float32": replace(BASE, dtype=Dtype.float32),
}


def quiet(done: int, total: int) -> None:
    assert 0 <= done <= total


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_it_with_nothing_missing_or_left_over(tmp_path: Path, name: str) -> None:
    out = tmp_path / "a model=x"
    summary = synthesize(MODELS[name], out, 1, 100_000, quiet)
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    assert model.dtype == getattr(torch, MODELS[name].dtype)
    assert model.generation_config.eos_token_id is None and model.config.eos_token_id is None
    assert summary["nbytes"] == sum(p.nbytes for p in model.parameters())
    assert_same_as_loaded(open_store(out, build_skeleton(out)), out)


@pytest.mark.parametrize("name", MODELS)
def test_its_bytes_are_those_of_the_geometry(tmp_path: Path, name: str) -> None:
    synthesize(MODELS[name], tmp_path / "out", 1, 100_000, quiet)
    found, planned = spec_from_checkpoint(tmp_path / "out"), spec_from_geometry(MODELS[name])
    for figure in ("attn_bytes", "ffn_bytes", "norm_bytes", "embed_bytes", "head_bytes", "tied", "kv_width", "experts"):
        assert getattr(found, figure) == getattr(planned, figure), figure


def test_files_are_byte_for_byte_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    synthesize(MODELS["qwen3_moe"], tmp_path / "out", 1, 100_000, quiet)
    paths = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(paths) > 2
    for path in paths:
        save_file(load_file(path), tmp_path / "again", metadata={"format": "pt"})
        assert path.read_bytes() == (tmp_path / "again").read_bytes()


def test_the_index_names_every_tensor_once(tmp_path: Path) -> None:
    summary = synthesize(MODELS["mixtral"], tmp_path / "out", 1, 100_000, quiet)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted({*index["weight_map"].values()})
    assert shards == [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(summary["shards"])]
    assert index["metadata"]["total_size"] == summary["nbytes"] and len(index["weight_map"]) == summary["tensors"]


def test_weights_are_random_norms_are_one_and_a_seed_repeats_itself(tmp_path: Path) -> None:
    for out, seed in (("a", 1), ("b", 1), ("c", 2)):
        synthesize(MODELS["qwen3"], tmp_path / out, seed, 1 << 30, quiet)
    a, b, c = (load_file(tmp_path / out / "model.safetensors") for out in ("a", "b", "c"))
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name])
        if name.endswith("norm.weight"):
            assert (tensor == 1).all()
        else:
            assert not torch.equal(tensor, c[name])
            assert abs(tensor.float().std() - 0.02) < 0.004 and abs(tensor.float().mean()) < 0.004
    q = "self_attn.q_proj.weight"
    assert not torch.equal(a[f"model.layers.0.{q}"], a[f"model.layers.1.{q}"])


def test_a_tensor_longer_than_the_pool_of_random_numbers_never_repeats_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synth_module, "POOL_ELEMENTS", 4099)
    synthesize(BASE, tmp_path / "out", 1, 1 << 30, quiet)
    table = load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"]
    assert len(torch.unique(table.float(), dim=0)) == len(table)


def test_progress_counts_all_bytes_once(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    summary = synthesize(BASE, tmp_path / "out", 1, 100_000, lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, summary["nbytes"]) and seen[-1] == (summary["nbytes"], summary["nbytes"]) and seen == sorted(seen)


def test_a_checkpoint_is_no_geometry(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="model.checkpoint=there: has weights of its own; choose a geometry"):
        synthesize(ModelConfig(name="hf", checkpoint="there"), tmp_path / "out", 1, 1 << 30, quiet)


def test_what_is_there_already_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("mine")
    with pytest.raises(UserError, match="something is there already"):
        synthesize(BASE, tmp_path / "out", 1, 1 << 30, quiet)
    assert (tmp_path / "out" / "precious").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    synthesize(BASE, tmp_path / "empty", 1, 1 << 30, quiet)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_synth_leaves_nothing(tmp_path: Path, error: BaseException | type[BaseException]) -> None:
    def progress(done: int, total: int) -> None:
        if done > total // 2:
            raise error

    expected = UserError if isinstance(error, OSError) else error
    with pytest.raises(expected):
        synthesize(BASE, tmp_path / "out", 1, 100_000, progress)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(synth_module.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UserError, match=r"1 kB free, the checkpoint needs .*; set model\.layers lower"):
        synthesize(BASE, tmp_path / "out", 1, 1 << 30, quiet)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_synth_leaves_no_checkpoint_and_the_next_one_succeeds(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from penstock.planner.contract.config.config_schema import ModelConfig
from penstock.runtime.tools.synth import synthesize
model = ModelConfig(name="tiny", model_type="llama", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, vocab=256, ffn=128)
synthesize(model, Path(sys.argv[1]), 1, 100_000, lambda done, total: done > total // 2 and os.kill(os.getpid(), signal.SIGKILL))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=HANGS_S)
    assert done.returncode == -signal.SIGKILL and not (tmp_path / "out").exists()
    synthesize(BASE, tmp_path / "out", 1, 100_000, quiet)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (f"model.layers={10**30}", "must be at most 10000"),
        ("model.heads=5 model.kv_heads=5", "model.heads=5: must divide model.hidden=1536 in a llama model; change one of them"),
        (f"model.vocab={10**18}", "model.vocab="),
        ("model.norm_eps=2", "model.norm_eps=2.0: must be at most 1"),
        (f"seed={10**30}", "must be at most 9223372036854775807"),
        ("shard_bytes=0", "shard_bytes=0: must be 1 or more"),
        ("out=/proc/made", "out=/proc/made: /proc is not a directory that can be written to"),
        ("out=.", "out=.: something is there already; name a new directory"),
    ],
)
def test_a_geometry_that_cannot_be_is_one_line_without_torch(
    typed: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some were tracebacks of transformers and torch, one never ended."""
    monkeypatch.setattr(runtime_verbs, "import_torch", lambda: pytest.fail("torch was imported first"))
    (tmp_path / "kept").touch()
    assert line in refusal("runtime", "synth", "model=demo", "out=made", *typed.split(), cwd=tmp_path)
