"""llama.cpp beside us: the files that it is given, what of them fits into VRAM, what its programs say, and the targets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gguf import GGUFReader

from bench.beside_llama import LEAST_SHARE, least, parts
from bench.gguf_synth import GgufModel, dense_gguf, gguf_of, gpt_oss_gguf, mixtral_gguf, vocabulary
from bench.gpt_oss_synth import gpt_oss_config
from bench.llama_layers import ALL, LlamaLayers, Split
from bench.llama_programs import LlamaPrograms, Work, environment
from bench.llama_side import Best, LlamaSide, Tried
from bench.vram_used import VramUsed
from penstock.planner.common.errors import UserError

DENSE = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
    "num_hidden_layers": 4, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip
MIXTRAL = DENSE | {"num_local_experts": 4, "num_experts_per_tok": 2}
GPT_OSS = gpt_oss_config({"layers": "2", "hidden": "64", "experts": "8", "vocab": "300"})
BENCH = """#!/usr/bin/env python3
import json, sys
print("what is no JSON")
words = [word for word in sys.argv[1:] if word != "--no-warmup"]
given = dict(zip(words[::2], words[1::2]))
for mode in given["-lm"].split(","):
    for n in given["-t"].split(","):
        rate = int(n) * (3.0 if mode == "none" else 2.0)
        row = {"avg_ts": rate, "n_threads": int(n), "load_mode": mode, "n_prompt": int(given["-p"]), "n_gen": int(given["-n"])}
        print(json.dumps(row | {"model_filename": given["-m"], "n_gpu_layers": int(given["-ngl"])}), flush=True)
"""
BATCHED = """#!/usr/bin/env python3
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("\\n".join(json.dumps({"pl": int(n), "speed_tg": 10.0 * int(n) + int(given["-t"])}) for n in given["-npl"].split(",") if n != "99"))
"""


@pytest.fixture
def programs(tmp_path: Path) -> LlamaPrograms:
    (tmp_path / "bin").mkdir()
    for name, code in (("llama-bench", BENCH), ("llama-batched-bench", BATCHED)):
        (tmp_path / "bin" / name).write_text(code)
        os.chmod(tmp_path / "bin" / name, 0o755)
    return LlamaPrograms(tmp_path, card=False)


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        (dense_gguf(DENSE), {"BF16", "F32"}),
        (dense_gguf(DENSE, "Q4_0", "Q6_K"), {"Q4_0", "Q6_K", "F32"}),
        (mixtral_gguf(MIXTRAL), {"BF16", "F32"}),
        (gpt_oss_gguf(GPT_OSS), {"BF16", "MXFP4", "F32"}),
    ],
)
def test_files_of_all_geometries_are_read_by_the_formats_own_library(model: GgufModel, kinds: set[str], tmp_path: Path) -> None:
    model.write(tmp_path / "a.gguf")
    read = GGUFReader(tmp_path / "a.gguf")
    assert {one.name: (one.n_bytes, tuple(reversed(one.shape.tolist()))) for one in read.tensors} == {
        one.name: (one.nbytes, one.shape) for one in model.tensors
    }
    assert {one.tensor_type.name for one in read.tensors} == kinds
    for one, wrote in zip(read.tensors, model.tensors, strict=True):
        assert one.data.tobytes() == b"".join(wrote.pieces()), one.name
    assert bytes(read.fields["general.architecture"].parts[-1]).decode() == model.architecture
    assert len(read.fields["tokenizer.ggml.tokens"].data) == model.vocab
    for key, value in model.figures.items():
        assert read.fields[key].contents() == pytest.approx(value), key


def test_a_vocabulary_has_each_word_once_and_each_letter_of_a_byte() -> None:
    words = vocabulary(1000)["tokenizer.ggml.tokens"]
    assert isinstance(words, list) and len(set(words)) == 1000
    assert {"A", "~", "\u0120", "\u010a"} <= set(words[:256])  # a space and a newline, as GPT-2 writes them
    assert len(vocabulary(200)["tokenizer.ggml.tokens"]) == 200  # type: ignore[arg-type]


def test_experts_of_mxfp4_begin_with_their_exponent_in_every_block() -> None:
    one = next(one for one in gpt_oss_gguf(GPT_OSS).tensors if one.dtype == "MXFP4")
    raw = b"".join(one.pieces())
    assert one.nbytes == 8 * 64 * 64 // 32 * 17
    assert set(raw[::17]) == {120} and len(set(raw[1::17])) > 100


def test_a_format_that_is_not_written_is_refused() -> None:
    with pytest.raises(UserError, match="format=Q5_K: choose from"):
        gguf_of({"format": "Q5_K"})
    assert gguf_of({"model": "demo", "layers": "1", "format": "Q4_0"}).layers == 1


def test_layers_of_a_dense_model_go_into_vram_from_the_last_behind_the_head() -> None:
    model = dense_gguf(DENSE)
    layer = sum(one.nbytes for one in model.tensors if one.name.startswith("blk.0."))
    end = sum(one.nbytes for one in model.tensors if one.name.startswith("output"))
    layers = LlamaLayers(model, kv_bytes=1000)
    assert [layers.vram_bytes(Split(n)) for n in range(6)] == [0, *(end + k * (layer + 1000) for k in range(5))]
    assert [layers.read_bytes(Split(n)) for n in range(6)] == [end + 4 * layer, *((4 - k) * layer for k in range(5))]
    table = model.nbytes - end - 4 * layer
    assert layers.dram_bytes(Split(3)) == table + 2 * layer
    for budget, split in ((0, Split(0)), (end + 999, Split(1)), (end + layer + 1000, Split(2)), (model.nbytes * 9, Split(5))):
        assert layers.fit(budget + 77, 77) == split
    assert layers.less(Split(3)) == Split(2) and layers.less(Split(0)) is None


def test_experts_of_the_first_layers_stay_and_a_token_reads_its_own_alone() -> None:
    model = mixtral_gguf(MIXTRAL)
    experts = sum(one.nbytes for one in model.tensors if one.name.startswith("blk.1.") and "_exps" in one.name)
    layers = LlamaLayers(model)
    assert layers.splits == [Split(ALL, n) for n in (4, 3, 2, 1, 0)]
    least_vram = layers.vram_bytes(Split(ALL, 4))
    assert [layers.vram_bytes(split) - least_vram for split in layers.splits] == [n * experts for n in range(5)]
    assert layers.read_bytes(Split(ALL, 3)) == 3 * experts // 2
    assert layers.fit(least_vram + 2 * experts, 0) == Split(ALL, 2) and layers.fit(least_vram + 2 * experts, 1) == Split(ALL, 3)
    assert Split(ALL, 3).flags == ("-ngl", "99", "-ncmoe", "3") and Split(7).flags == ("-ngl", "7")
    rest = layers.read_bytes(Split(0)) - 4 * experts // 2
    assert rest == layers.vram_bytes(Split(ALL, 4))


def test_every_number_of_threads_is_run_in_both_ways_of_loading_and_the_best_is_kept(
    programs: LlamaPrograms, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = programs.bench(tmp_path / "a.gguf", Split(3), Work(new=8), [2, 4])
    assert [(one.threads, one.mode, one.tokens_s) for one in ran.told] == [(2, "none", 6), (4, "none", 12), (2, "auto", 4), (4, "auto", 8)]
    assert (ran.best.threads, ran.best.mode, ran.vram_bytes) == (4, "none", 0)
    assert "-ngl 3, step: 12 tok/s, 4 threads, -lm none" in capsys.readouterr().out
    assert programs.bench(tmp_path / "a.gguf", Split(0), Work(prompt=64, warm=False), [1], ["auto"]).best.prompt == 64


def test_a_batch_of_which_nothing_is_said_and_a_program_that_fails_are_told(programs: LlamaPrograms, tmp_path: Path) -> None:
    asked = {"prompt": 8, "new": 4, "room": 64, "batch": 16, "threads": 2, "mode": "none"}
    assert programs.batched(tmp_path / "a.gguf", Split(0), [2, 4], **asked) == ({2: 22.0, 4: 42.0}, 0)  # type: ignore[arg-type]
    with pytest.raises(SystemExit, match="said nothing of batch 99; its context of 64 tokens is too small"):
        programs.batched(tmp_path / "a.gguf", Split(0), [2, 99], **asked)  # type: ignore[arg-type]
    (tmp_path / "bin" / "llama-bench").write_text("#!/bin/sh\necho 'no such model' >&2; exit 3\n")
    with pytest.raises(SystemExit, match="llama-bench: status 3: no such model"):
        programs.bench(tmp_path / "a.gguf", Split(0), Work(new=1), [1])
    with pytest.raises(UserError, match="has no program llama-server"):
        programs.program("llama-server")


def test_libraries_of_pip_are_found_behind_those_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/given")
    found = environment(Path("/programs/llama-bench"))["LD_LIBRARY_PATH"].split(":")
    assert (found[0], found[-1]) == ("/given", "/programs")
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert environment(Path("/programs/llama-bench"))["LD_LIBRARY_PATH"].split(":") == found[1:]


def side(programs: LlamaPrograms, budget: int | None) -> LlamaSide:
    return LlamaSide(programs, dense_gguf(DENSE), Path("a.gguf"), budget, [2, 4])


def test_a_trial_says_what_lies_beside_the_weights_and_a_layer_goes_where_it_was_too_much(programs: LlamaPrograms) -> None:
    layers = LlamaLayers(dense_gguf(DENSE))
    beside, budget = 5000, layers.vram_bytes(Split(4)) + 5000
    tried: list[Split] = []

    def ran(split: Split, more: int) -> Tried:
        tried.append(split)
        vram = layers.vram_bytes(split) + beside + more
        return {1: Best(1.0, 1, "none", split, vram)}, vram

    def found(more: int) -> Split:
        tried.clear()
        return side(programs, budget).within(layers, 16, lambda split: ran(split, 0), lambda split: ran(split, more))[1].split

    assert found(0) == Split(4) and tried == [Split(0), Split(4)]  # the guess of CUDA's context is far above this model
    assert found(1) == Split(3) and tried == [Split(0), Split(4), Split(3)]
    with pytest.raises(SystemExit, match="-ngl 0: llama.cpp took no VRAM, so it found no card"):
        side(programs, budget).within(layers, 16, lambda split: ({}, 0), lambda split: ran(split, 0))


def test_without_a_card_nothing_is_in_vram(programs: LlamaPrograms) -> None:
    one = side(programs, None)
    best = one.step(4)
    assert (best.split, best.threads, best.mode, best.tokens_s) == (Split(0), 4, "none", 12.0)
    assert one.prefill(2, 32).tokens_s == 6.0
    assert {size: (best.tokens_s, best.threads) for size, best in one.batches([2, 8], 16, 4).items()} == {2: (24.0, 4), 8: (84.0, 4)}
    assert one.layers(10).kv_bytes == 2 * 2 * 64 * 2 * 10


def test_a_file_is_there_for_a_block_and_is_removed_when_it_fails(programs: LlamaPrograms, tmp_path: Path) -> None:
    one = LlamaSide(programs, dense_gguf(DENSE), tmp_path / "a.gguf", None, [1])
    with pytest.raises(RuntimeError), one.written():
        assert one.file.stat().st_size > one.model.nbytes
        raise RuntimeError
    assert not one.file.exists()


def test_the_most_vram_that_others_took_is_counted_beyond_what_was_there() -> None:
    said = [500, 800, 2500, 900]

    class Played:
        def used_bytes(self) -> int:
            return said.pop(0) if len(said) > 1 else said[0]

    with VramUsed(Played()) as used:  # type: ignore[arg-type]
        while len(said) > 1:
            pass
    assert used.most_bytes == 2000
    with VramUsed(Played(), 100) as used:  # type: ignore[arg-type]
        pass
    assert used.most_bytes == 800
    with VramUsed(None) as used:
        pass
    assert used.most_bytes == 0


def test_targets_follow_what_cpu_and_link_carry_together_and_files_that_do_not_fit_are_parted() -> None:
    assert LEAST_SHARE == 0.92 and least(150.0, 92.0) == ">= 1.500" and least(150.0, 0.0) == ""
    gib = 1 << 30
    assert not parts(16 * gib, 16 * gib, 128 * gib)
    assert parts(46 * gib, 46 * gib, 128 * gib)
