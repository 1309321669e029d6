"""Headers of GGUF files: read without torch, refused in one line that names the file, whatever a byte says."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.gguf_checkpoint import gguf_source
from penstock.planner.contract.gguf.gguf_header import Items, read_gguf, without_tensors
from penstock.planner.contract.gguf.gguf_names import hf_name

STRING, U32, F32, ARRAY = 8, 4, 6, 9


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """``shape`` as torch has it."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)


def gguf(pairs: list[bytes], tensors: list[bytes], data: int = 0, version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % 32 + data)


NAMED = pair("general.architecture", STRING, text("llama"))
WORDS = pair("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, 5000) + text("word") * 5000)
SOUND = gguf([NAMED, WORDS, pair("llama.x", F32, struct.pack("<f", 0.5))], [tensor("a", (2, 256), 12, 0), tensor("b", (3,), 0, 288)], 300)


def written(place: Path, content: bytes) -> Path:
    place.write_bytes(content)
    return place


def refusal(place: Path, content: bytes) -> str:
    with pytest.raises(UserError) as refused:
        read_gguf(written(place, content))
    line = str(refused.value)
    assert line.startswith(str(place)) and "\n" not in line
    return line


def test_a_header_says_where_everything_lies(tmp_path: Path) -> None:
    found = read_gguf(written(tmp_path / "m.gguf", SOUND))
    assert dict(found.metadata) == {"general.architecture": "llama", "tokenizer.ggml.tokens": Items(5000), "llama.x": 0.5}
    a, b = found.tensors["a"], found.tensors["b"]
    assert (a.shape, a.block.name, a.nbytes, b.shape, b.block.name, b.nbytes) == ((2, 256), "Q4_K", 288, (3,), "F32", 12)
    assert a.offset % 32 == 0 and b.offset == a.offset + 288 and b.offset + 12 == len(SOUND)


def test_what_is_kept_of_a_file_for_its_tokenizer_has_its_metadata_alone(tmp_path: Path) -> None:
    kept = read_gguf(written(tmp_path / "v.gguf", without_tensors(written(tmp_path / "m.gguf", SOUND))))
    assert kept.metadata == read_gguf(tmp_path / "m.gguf").metadata and not kept.tensors


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a GGUF file"),
        (b"PK\3\4" + bytes(40), "not a GGUF file"),
        (gguf([NAMED], [], version=1), "version 1, read are 2 and 3"),
        (gguf([NAMED], [], version=3 << 24), "byte order"),
        (SOUND[:4000], "truncated"),
        (SOUND[:-1], "ends at byte"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "claims"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "claims"),
        (gguf([pair("k", STRING, struct.pack("<Q", 2**63))], []), "bytes more"),
        (gguf([pair("k", ARRAY, struct.pack("<IQ", STRING, 2**62))], []), "claims"),
        (gguf([pair("k", ARRAY, struct.pack("<IQ", STRING, 4) + struct.pack("<Q", 2**64 - 1) * 4)], []), "bytes more"),
        (gguf([pair("k", ARRAY, struct.pack("<IQ", STRING, 5000) + bytes(8 * 4999) + struct.pack("<Q", 2**40))], []), "beyond the file"),
        (gguf([pair("k", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(20))], []), "array of type 9"),
        (gguf([pair("k", 77, bytes(8))], []), "type 77"),
        (gguf([NAMED, NAMED], []), "twice"),
        (b"version https://git-lfs.github.com/spec/v1\n", "m.gguf: a pointer of Git LFS, not the file itself; run `git lfs pull`"),
        (gguf([pair("k", STRING, struct.pack("<Q", 1) + b"\xff")], []), "UTF-8"),
        (gguf([pair("general.alignment", U32, struct.pack("<I", 0))], []), "alignment"),
        (gguf([pair("general.alignment", U32, struct.pack("<I", 24))], []), "alignment"),
        (gguf([], [tensor("a", (2, 256), 10, 0)], 999), "type Q2_K, read are F32, F16, BF16, Q4_0, Q8_0, Q4_K, Q5_K, Q6_K"),
        (gguf([], [tensor("a", (2, 256), 1234, 0)], 999), "type number 1234"),
        (gguf([], [tensor("a", (2, 128), 12, 0)], 999), "blocks of Q4_K hold 256"),
        (gguf([], [tensor("a", (1,) * 5, 0, 0)], 999), "5 dimensions"),
        (gguf([], [tensor("a", (2**40, 2**40), 0, 0)], 999), "shape"),
        (gguf([], [tensor("a", (0, 4), 0, 0)], 999), "shape"),
        (gguf([], [tensor("a", (4,), 0, 8)], 999), "no multiple of 32"),
        (gguf([], [tensor("a", (4,), 0, 2**63)], 999), "ends at byte"),
        (gguf([], [tensor("a", (4,), 0, 0), tensor("a", (4,), 0, 32)], 999), "twice"),
        (gguf([], [tensor("a", (40,), 0, 0), tensor("b", (4,), 0, 32)], 999), "'b' overlaps 'a'"),
    ],
)
def test_a_hostile_header_is_refused_in_one_line(content: bytes, said: str, tmp_path: Path) -> None:
    assert said in refusal(tmp_path / "m.gguf", content)


def test_no_byte_of_a_header_bites(tmp_path: Path) -> None:
    small = gguf([NAMED, pair("n", U32, struct.pack("<I", 7))], [tensor("a", (2, 32), 8, 0), tensor("b", (8,), 1, 96)], 112)
    place = tmp_path / "m.gguf"
    assert read_gguf(written(place, small)).tensors
    for at in range(len(small) - 112):
        for change in (0x00, 0xFF, 0x80):
            content = bytearray(small)
            content[at] = change
            try:
                read_gguf(written(place, bytes(content)))
            except UserError as error:
                assert "\n" not in str(error)


def test_a_name_in_a_split_that_cannot_be_is_refused(tmp_path: Path) -> None:
    for name in ("m-00000-of-00002.gguf", "m-00003-of-00002.gguf"):
        (tmp_path / name).touch()
        with pytest.raises(UserError, match="no part of 2"):
            gguf_source(tmp_path / name)
        (tmp_path / name).unlink()


def test_names_are_those_of_a_checkpoint() -> None:
    assert hf_name("blk.12.ffn_down.weight", "llama") == "model.layers.12.mlp.down_proj.weight"
    assert hf_name("blk.0.ffn_up_exps.weight", "mixtral") == "model.layers.0.block_sparse_moe.experts.*.w3.weight"
    assert hf_name("blk.0.attn_k.bias", "qwen2") == "model.layers.0.self_attn.k_proj.bias"
    assert hf_name("output.weight", "llama") == "lm_head.weight"
    assert hf_name("blk.0.ssm_a", "llama") is None and hf_name("v.patch_embd.weight", "llama") is None
