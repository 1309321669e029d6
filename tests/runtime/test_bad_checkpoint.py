"""A checkpoint or a packed store that is missing, damaged or another model is refused in one line, and nothing is left behind."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.runtime.store.manifest import MANIFEST, WEIGHTS, read_manifest
from penstock.runtime.tools.pack import pack_checkpoint
from tests.runtime.running import Desk, desk
from tests.support import decisions, plan_for, save_tiny

SHARD = "model.safetensors"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("checkpoint") / "sharded", shard="150kB")


def damage(path: Path, position: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(data)


def test_a_missing_checkpoint_is_refused(here: Desk, own_checkpoint: Path) -> None:
    shutil.rmtree(own_checkpoint)
    assert str(own_checkpoint) in here.refusal() and "no such directory" in here.refusal()
    assert "elsewhere" in here.refusal(checkpoint=str(own_checkpoint.with_name("elsewhere")))


def test_a_missing_weights_file_is_refused(here: Desk, own_checkpoint: Path) -> None:
    (own_checkpoint / SHARD).unlink()
    assert SHARD in here.refusal()


def test_truncated_weights_are_refused(here: Desk, own_checkpoint: Path) -> None:
    os.truncate(own_checkpoint / SHARD, (own_checkpoint / SHARD).stat().st_size - 1)
    assert str(own_checkpoint / SHARD) in here.refusal() and "truncated" in here.refusal()


@pytest.mark.parametrize("junk", [b"\xff" * 8, b"\x00" * 8, b"\x40\x00\x00\x00\x00\x00\x00\x00}}}}"])
def test_a_corrupt_header_is_refused(here: Desk, own_checkpoint: Path, junk: bytes) -> None:
    damage(own_checkpoint / SHARD, 0, junk)
    assert str(own_checkpoint / SHARD) in here.refusal()


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe"])
def test_a_corrupt_config_is_refused(here: Desk, own_checkpoint: Path, text: bytes) -> None:
    (own_checkpoint / "config.json").write_bytes(text)
    assert str(own_checkpoint / "config.json") in here.refusal()


def test_a_missing_shard_is_refused(sharded: Path, tmp_path: Path) -> None:
    own_checkpoint = shutil.copytree(sharded, tmp_path / "sharded")
    here = desk(tmp_path, plan_for(own_checkpoint, decisions()))
    shard = sorted(own_checkpoint.glob("*.safetensors"))[1]
    shard.unlink()
    assert str(shard) in here.refusal()


def test_a_corrupt_tokenizer_is_refused(here: Desk, own_checkpoint: Path) -> None:
    (own_checkpoint / "tokenizer.json").write_text('{"model": ')
    assert "tokenizer" in here.refusal(prompt="hello")


def test_a_corrupt_generation_config_is_refused(here: Desk, own_checkpoint: Path) -> None:
    (own_checkpoint / "generation_config.json").write_text("{")
    assert "generation_config.json" in here.refusal()


def test_a_checkpoint_of_another_model_is_refused(here: Desk, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", layers=5)
    line = here.refusal(checkpoint=str(other))
    assert str(other) in line and "layers is 5, the plan says 6" in line and "model.checkpoint=" in line


def test_a_checkpoint_of_another_kind_is_refused(here: Desk, tmp_path: Path) -> None:
    assert "model_type is qwen3, the plan says llama" in here.refusal(checkpoint=str(save_tiny(tmp_path / "other", "qwen3")))


def test_a_checkpoint_of_the_same_shape_and_other_layout_is_refused(here: Desk, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", shard="150kB")
    assert "digests differ" in here.refusal(checkpoint=str(other))


def test_a_preset_without_weights_asks_for_a_checkpoint(here: Desk) -> None:
    plan = yaml.safe_load(here.plan.read_text())
    plan["model"]["checkpoint"] = plan["model"]["digest"] = None
    here.plan.write_text(yaml.safe_dump(plan))
    assert "checkpoint=DIR" in here.refusal()


@pytest.fixture(scope="module")
def packed_once(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "store"
    pack_checkpoint(checkpoint, out, None, False, lambda done, total: None)
    return out


@pytest.fixture
def packed(packed_once: Path, tmp_path: Path) -> Path:
    return shutil.copytree(packed_once, tmp_path / "a store=1")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"penstock_pack": 3}'])
def test_a_corrupt_manifest_is_refused(here: Desk, packed: Path, text: str) -> None:
    (packed / MANIFEST).write_text(text)
    assert str(packed / MANIFEST) in here.refusal(checkpoint=str(packed))


def test_an_edited_manifest_is_refused(here: Desk, packed: Path) -> None:
    offset = str(read_manifest(packed).units[1].offset)
    (packed / MANIFEST).write_text((packed / MANIFEST).read_text().replace(offset, "8192", 1))
    assert "checksum" in here.refusal(checkpoint=str(packed))


def test_a_missing_manifest_or_weights_file_is_refused(here: Desk, packed: Path) -> None:
    (packed / WEIGHTS).rename(packed / "moved")
    assert str(packed / WEIGHTS) in here.refusal(checkpoint=str(packed))
    (packed / MANIFEST).unlink()
    assert str(packed) in here.refusal(checkpoint=str(packed))


def test_truncated_packed_weights_are_refused(here: Desk, packed: Path) -> None:
    os.truncate(packed / WEIGHTS, (packed / WEIGHTS).stat().st_size - 4096)
    assert "truncated" in here.refusal(checkpoint=str(packed))


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_a_text_models_config_beside_a_wrappers_tensors_is_refused_when_it_is_planned(own_checkpoint: Path, prefix: str) -> None:
    """transformers fills none of them: every weight would be random."""
    tensors = load_file(own_checkpoint / SHARD)
    save_file({prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()}, own_checkpoint / SHARD)
    with pytest.raises(UserError, match=rf"the text model 'llama' alone, and the tensors lie under {re.escape(prefix[:-1])}, as a multi"):
        spec_from_checkpoint(own_checkpoint)
