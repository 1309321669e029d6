"""The comparison with llama.cpp's rate: the files of one format that it writes, and the bus that both are held against."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFReader

from bench.beside_rates import Rates
from bench.coded_synth import gguf_tensors, write_gguf
from bench.llama_layers import TABLE

CONFIG = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
    "num_hidden_layers": 1, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip


@pytest.mark.parametrize("form", ["BF16", "Q4_0"])
def test_a_file_of_one_format_is_read_by_the_formats_own_library(form: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", CONFIG, form, form, {"tokenizer.ggml.model": "none"})
    read = GGUFReader(tmp_path / "a.gguf")
    wanted = {one.name: one.nbytes for one in gguf_tensors(CONFIG, form, form)}
    assert {one.name: one.n_bytes for one in read.tensors} == wanted and TABLE in wanted
    assert {one.tensor_type.name for one in read.tensors} == {form, "F32"}
    assert bytes(read.fields["tokenizer.ggml.model"].parts[-1]).decode() == "none"


def test_the_bus_carries_what_was_seen_to_pass_it_by_whatever_passed() -> None:
    rates = Rates(80.0, 55.0, {"BF16": 90.0}, {"BF16": (70.0, 50.0)}, (60.0, 54.0))
    assert rates.bus_gbps("BF16") == 120.0
    assert Rates(80.0, 0.0, {"BF16": 60.0}, {"BF16": (60.0, 0.0)}, (80.0, 0.0)).bus_gbps("BF16") == 80.0
