"""The comparison with llama.cpp's rate: the files that it writes, and what it takes of what llama-bench says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gguf import GGUFReader

from bench.beside_rates import Rates
from bench.coded_synth import gguf_tensors, write_gguf
from bench.peers.llama_rate import MODES, TABLE, llama_runs

CONFIG = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
    "num_hidden_layers": 1, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip
FAKE = """#!/usr/bin/env python3
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
rates = {"2": 3.0, "4": 9.0 if given["-lm"] == "none" else 5.0}
print(json.dumps([{"avg_ts": rates[n], "n_threads": int(n)} for n in given["-t"].split(",")]))
"""


@pytest.mark.parametrize("form", ["BF16", "Q4_0"])
def test_a_file_of_one_format_is_read_by_the_formats_own_library(form: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", CONFIG, form, form, {"tokenizer.ggml.model": "none"})
    read = GGUFReader(tmp_path / "a.gguf")
    wanted = {one.name: one.nbytes for one in gguf_tensors(CONFIG, form, form)}
    assert {one.name: one.n_bytes for one in read.tensors} == wanted and TABLE in wanted
    assert {one.tensor_type.name for one in read.tensors} == {form, "F32"}
    assert bytes(read.fields["tokenizer.ggml.model"].parts[-1]).decode() == "none"


def test_every_number_of_threads_is_run_in_both_ways_of_loading(tmp_path: Path) -> None:
    program = tmp_path / "llama-bench"
    program.write_text(FAKE)
    os.chmod(program, 0o755)
    told = list(llama_runs(program, tmp_path / "a.gguf", [2, 4], 8))
    assert [(one.threads, one.mode) for one in told] == [(n, mode) for mode in MODES for n in (2, 4)]
    best = max(told, key=lambda one: one.tokens_s)
    assert (best.tokens_s, best.threads, best.mode) == (9.0, 4, "none")
    program.write_text("#!/bin/sh\necho 'no such model' >&2; exit 1\n")
    with pytest.raises(SystemExit, match="no such model"):
        list(llama_runs(program, tmp_path / "a.gguf", [2], 8))


def test_the_bus_carries_what_was_seen_to_pass_it_by_whatever_passed() -> None:
    rates = Rates(80.0, 55.0, {"BF16": 90.0}, {"BF16": (70.0, 50.0)}, (60.0, 54.0))
    assert rates.bus_gbps("BF16") == 120.0
    assert Rates(80.0, 0.0, {"BF16": 60.0}, {"BF16": (60.0, 0.0)}, (80.0, 0.0)).bus_gbps("BF16") == 80.0
