"""A checkpoint is read from its headers alone, and whatever is wrong with it is said in one line."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import read_checkpoint, spec_from_checkpoint
from penstock.planner.contract.checkpoint.tensor_names import classify
from tests.planner.test_geometry import spec_bytes

SHARED = Path(__file__).parents[2].parent / "shared" / "models"
SIZES = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=64
)


def save(directory: Path, model_type: str = "llama", shard: str = "1GB", **sizes) -> Path:
    """A random checkpoint made by transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**SIZES, **sizes})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory, max_shard_size=shard)
    return directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("llama"), tie_word_embeddings=False)


@pytest.fixture
def copy(llama, tmp_path) -> Path:
    """A checkpoint to break."""
    return Path(shutil.copytree(llama, tmp_path / "a copy=1"))


def tensors_of(directory: Path) -> dict[str, int]:
    """Bytes of every tensor as the safetensors library reads them."""
    from safetensors import safe_open

    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            for name in handle.keys():  # noqa: SIM118 (safe_open is no mapping)
                tensor = handle.get_tensor(name)
                found[name] = tensor.numel() * tensor.element_size()
    return found


def refused(directory: Path, says: str) -> str:
    """The one line with which the checkpoint is refused."""
    with pytest.raises(UserError, match=says) as error:
        spec_from_checkpoint(directory)
    assert "\n" not in str(error.value)
    return str(error.value)


def edit_config(directory: Path, **changes) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


class TestReading:
    @pytest.mark.parametrize(
        "sizes",
        [
            dict(tie_word_embeddings=False),
            dict(tie_word_embeddings=True),
            dict(tie_word_embeddings=False, shard="20KB"),
            dict(model_type="qwen3", tie_word_embeddings=True),
            dict(model_type="mistral", tie_word_embeddings=False),
            dict(model_type="gemma2", tie_word_embeddings=True),
            dict(model_type="gemma3_text", tie_word_embeddings=True),
            dict(model_type="phi3", tie_word_embeddings=False, pad_token_id=0, eos_token_id=1),
            dict(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False),
            dict(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, mlp_only_layers=[0], shard="20KB"),
        ],
        ids=lambda sizes: " ".join(f"{k}={v}" for k, v in sizes.items()),
    )
    def test_every_tensor_is_counted_once_in_its_unit(self, tmp_path, sizes):
        directory = save(tmp_path, **sizes)
        spec, stored = spec_from_checkpoint(directory), tensors_of(directory)
        expected: Counter = Counter()
        for name, nbytes in stored.items():
            role = classify(name)
            expected[role.kind, None if role.kind == "norm" else role.layer] += nbytes
        assert spec_bytes(spec) == expected
        assert spec.weight_bytes == sum(stored.values())
        assert spec.tied == ("lm_head.weight" not in stored)
        assert (spec.vocab, spec.hidden, spec.attn_width, spec.kv_width, spec.compute_dtype) == (64, 32, 32, 16, "bfloat16")

    def test_offsets_are_where_the_bytes_are(self, tmp_path):
        from safetensors import safe_open

        directory = save(tmp_path, shard="20KB")
        found = read_checkpoint(directory)
        assert len({entry.file for entry in found.tensors.values()}) > 1
        for name, entry in found.tensors.items():
            with safe_open(entry.file, "pt") as handle:
                import torch

                expected = handle.get_tensor(name).contiguous().view(torch.uint8).flatten().numpy().tobytes()
            with entry.file.open("rb") as file:
                file.seek(entry.offset)
                assert file.read(entry.nbytes) == expected

    def test_experts_are_counted_and_dense_layers_among_them(self, tmp_path):
        spec = spec_from_checkpoint(
            save(tmp_path, "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, mlp_only_layers=[0])
        )
        assert (spec.experts.count, spec.experts.top_k, spec.experts.expert_bytes) == (4, 2, 3 * 32 * 16 * 2)
        assert spec.ffn_bytes == (3 * 32 * 48 * 2, *(4 * 32 * 2,) * 2) and spec.experts.layers == (1, 2)
        assert spec.ffn_width == 48

    def test_a_single_file_of_another_name_is_found(self, copy):
        (copy / "model.safetensors").rename(copy / "weights.safetensors")
        assert spec_from_checkpoint(copy).layers == 3

    def test_a_head_that_is_stored_beside_the_embedding_is_used_whatever_the_config_says_of_a_tie(self, copy, llama):
        edit_config(copy, tie_word_embeddings=True)
        said, untied = spec_from_checkpoint(copy), spec_from_checkpoint(llama)
        assert (said.tied, said.head_bytes) == (False, untied.head_bytes)

    def test_the_digest_names_the_content_and_not_the_place(self, copy, llama):
        assert read_checkpoint(copy).digest == read_checkpoint(llama).digest == spec_from_checkpoint(llama).digest
        edit_config(copy, rope_theta=1.0)
        assert read_checkpoint(copy).digest != read_checkpoint(llama).digest
        assert len(read_checkpoint(llama).digest) == 32

    def test_a_relative_path_and_links_are_followed(self, copy, tmp_path, monkeypatch):
        links = tmp_path / "links"
        links.mkdir()
        for file in copy.iterdir():
            (links / file.name).symlink_to(file)
        monkeypatch.chdir(tmp_path)
        assert spec_from_checkpoint(Path("links")).digest == spec_from_checkpoint(copy).digest
        assert spec_from_checkpoint(Path("links")).checkpoint == str(links)

    def test_neither_torch_nor_numpy_is_imported(self, llama):
        code = (
            "import sys; from pathlib import Path; from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint\n"
            f"spec_from_checkpoint(Path({str(llama)!r}))\n"
            "print([m for m in ('torch', 'transformers', 'numpy', 'safetensors') if m in sys.modules])"
        )
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
        assert out.stdout.strip() == "[]"


@pytest.mark.skipif(not SHARED.exists(), reason="the shared checkpoints are not here")
class TestSharedCheckpoints:
    def test_tiny_llama_has_six_layers_and_ties_its_embeddings(self):
        spec = spec_from_checkpoint(SHARED / "tiny-llama")
        assert (spec.name, spec.model_type, spec.layers, spec.tied, spec.experts) == ("tiny-llama", "llama", 6, True, None)
        assert spec.weight_bytes == sum(tensors_of(SHARED / "tiny-llama").values())

    def test_tiny_mixtral_has_eight_experts_over_four_shards(self):
        found, spec = read_checkpoint(SHARED / "tiny-mixtral"), spec_from_checkpoint(SHARED / "tiny-mixtral")
        assert len({entry.file for entry in found.tensors.values()}) == 4
        assert (spec.experts.count, spec.experts.top_k, spec.experts.expert_bytes) == (8, 2, 3 * 256 * 512 * 2)
        assert spec.weight_bytes == 42_236_416
        assert set(spec.ffn_bytes) == {8 * 256 * 2}


class TestBadFiles:
    def test_a_directory_that_is_none(self, tmp_path, llama):
        refused(tmp_path / "absent", "no such directory")
        refused(llama / "config.json", "not a directory")
        (tmp_path / "empty").mkdir()
        refused(tmp_path / "empty", "empty")

    def test_no_config(self, copy):
        (copy / "config.json").unlink()
        refused(copy, "needs config.json")

    @pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b'{"a": ' + b"[" * 100_000])
    def test_a_damaged_config(self, copy, text):
        (copy / "config.json").write_bytes(text)
        refused(copy, r"config\.json: corrupt")

    def test_no_weights(self, copy):
        (copy / "model.safetensors").unlink()
        refused(copy, "no model.safetensors and no model.safetensors.index.json; use a checkpoint in safetensors format")

    def test_shards_without_their_index(self, copy):
        for name in ("a", "b"):
            shutil.copy(copy / "model.safetensors", copy / f"{name}.safetensors")
        (copy / "model.safetensors").unlink()
        refused(copy, "2 safetensors files and no model.safetensors.index.json")

    def test_a_missing_shard(self, tmp_path):
        directory = save(tmp_path, shard="20KB")
        shard = sorted(directory.glob("*.safetensors"))[1]
        shard.unlink()
        refused(directory, f"{shard.name}: no such file; download")

    def test_a_shard_that_lacks_a_tensor_of_the_index(self, tmp_path):
        directory = save(tmp_path, shard="20KB")
        first, second, *_ = sorted(directory.glob("*.safetensors"))
        shutil.copy(second, first)
        refused(directory, rf"{first.name}: tensor .* is missing")

    @pytest.mark.parametrize(
        "index",
        [
            b"{",
            b"{}",
            b'{"weight_map": []}',
            b'{"weight_map": {"a": 1}}',
            b'{"weight_map": {"a": "../b.safetensors"}}',
        ],
    )
    def test_a_damaged_index(self, copy, index):
        (copy / "model.safetensors").unlink()
        (copy / "model.safetensors.index.json").write_bytes(index)
        refused(copy, r"index\.json: corrupt")

    def test_an_unreadable_file(self, copy, monkeypatch):
        opened = os.open

        def deny(path, *args, **kwargs):
            if Path(path).name == "model.safetensors":
                raise PermissionError(13, "Permission denied")
            return opened(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", deny)
        assert "check its permissions" in refused(copy, r"model\.safetensors: cannot be read \(Permission denied\)")

    def test_a_directory_in_a_files_place(self, copy):
        (copy / "model.safetensors").unlink()
        (copy / "model.safetensors").mkdir()
        refused(copy, r"model\.safetensors: cannot be read")

    def test_a_link_to_nowhere(self, copy):
        (copy / "model.safetensors").unlink()
        (copy / "model.safetensors").symlink_to(copy / "gone")
        refused(copy, r"model\.safetensors: no such file")

    def test_a_truncated_file_says_how_long_it_should_be(self, copy):
        file = copy / "model.safetensors"
        whole = file.stat().st_size
        with file.open("r+b") as handle:
            handle.truncate(whole - 1)
        assert f"needs {whole} bytes and the file has {whole - 1}" in refused(copy, r"model\.safetensors: truncated")

    def test_bytes_after_the_last_tensor(self, copy):
        with (copy / "model.safetensors").open("ab") as handle:
            handle.write(b"x")
        refused(copy, "1 bytes after its last tensor")


class TestRandomDamage:
    @settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_no_damage_raises_anything_but_a_user_error(self, copy, llama, data):
        """Bit flips in the header and cuts anywhere: read as the library reads it, or refused."""
        whole = (llama / "model.safetensors").read_bytes()
        header = 8 + struct.unpack("<Q", whole[:8])[0]
        damaged = bytearray(whole)
        for position in data.draw(st.lists(st.integers(0, header - 1), max_size=4)):
            damaged[position] ^= 1 << data.draw(st.integers(0, 7))
        cut = data.draw(st.one_of(st.none(), st.integers(0, len(whole))))
        (copy / "model.safetensors").write_bytes(damaged[:cut])
        try:
            spec_from_checkpoint(copy)
        except UserError as error:
            assert "\n" not in str(error)
        else:
            assert len(damaged[:cut]) == len(whole)

    @settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        config=st.dictionaries(
            st.sampled_from([*SIZES, "text_config", "num_experts", "tie_word_embeddings", "quantization_config", "kv_lora_rank"]),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda x: st.lists(x, max_size=3), max_leaves=3
            ),
        )
    )
    def test_no_config_raises_anything_but_a_user_error(self, copy, llama, config):
        original = json.loads((llama / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(original | config))
        try:
            assert spec_from_checkpoint(copy).layers == 3
        except UserError as error:
            assert "\n" not in str(error)


class TestPackedStore:
    @pytest.fixture
    def packed(self, llama, tmp_path) -> Path:
        """A directory with what the planner reads of a packed store."""
        directory = tmp_path / "packed"
        directory.mkdir()
        shutil.copy(llama / "config.json", directory)
        found = read_checkpoint(llama)
        tensors = {name: {"dtype": e.dtype, "shape": list(e.shape), "nbytes": e.nbytes} for name, e in found.tensors.items()}
        self.write(directory, {"penstock_pack": 2, "digest": found.digest, "tensors": tensors})
        return directory

    def write(self, directory: Path, body: dict) -> None:
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        (directory / "manifest.json").write_text(json.dumps(body | {"checksum": xxhash.xxh3_128_hexdigest(text.encode())}))

    def test_it_has_the_spec_of_its_checkpoint(self, packed, llama):
        from dataclasses import replace

        original = spec_from_checkpoint(llama)
        assert spec_from_checkpoint(packed) == replace(original, name="packed", checkpoint=str(packed))

    def test_a_damaged_manifest_is_refused(self, packed):
        text = (packed / "manifest.json").read_text()
        (packed / "manifest.json").write_text(text[:-9])
        refused(packed, r"manifest\.json: corrupt, not JSON")
        (packed / "manifest.json").write_text(text.replace("BF16", "F16"))
        refused(packed, "checksum does not match")

    @pytest.mark.parametrize(
        "body, says",
        [
            ({"penstock_pack": 1}, "penstock_pack is '1', this version reads 2"),
            ({}, "penstock_pack is 'None'"),
            ({"penstock_pack": 2}, "needs tensors and the source's digest"),
            ({"penstock_pack": 2, "digest": "d", "tensors": {"a": {}}}, "tensor 'a' needs nbytes, shape and dtype"),
        ],
    )
    def test_a_manifest_that_lacks_something_is_refused(self, packed, body, says):
        self.write(packed, body)
        refused(packed, says)
