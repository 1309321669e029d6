"""A safetensors header is read exactly as the library reads it, or refused in one line."""

from __future__ import annotations

import json
import struct

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.safetensors_header import read_header

A = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


def header_bytes(header: object) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def test_a_header_without_tensors_is_read(tmp_path):
    file = tmp_path / "x.safetensors"
    file.write_bytes(header_bytes({"__metadata__": {"format": "pt"}}))
    assert read_header(file) == {}


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "truncated"),
        (b"1234567", "truncated"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n", "a pointer of Git LFS, .*; run `git lfs pull` there"),
        (struct.pack("<Q", 0), "header claims 0 bytes"),
        (struct.pack("<Q", 2**63), "header claims"),
        (struct.pack("<Q", 100) + b"{}", "truncated, its header needs 108 bytes"),
        (header_bytes(b"{nope"), "not JSON"),
        (header_bytes(b"[" * 100_000), "not JSON"),
        (header_bytes(b"\xff\xfe"), "not JSON"),
        (header_bytes(b'{"\\ud800": {}}'), "not JSON"),
        (header_bytes(b'{"a": 1, "a": 2}'), "a key appears twice"),
        (header_bytes([]), "not a JSON object"),
        (header_bytes({"a": 1}), "'a' has no dtype"),
        (header_bytes({"a": {**A, "dtype": "Q4"}}), "'a' has dtype 'Q4'"),
        (header_bytes({"a": {**A, "dtype": None}}), "'a' has dtype"),
        (header_bytes({"a": {**A, "shape": [-4]}}), "no valid shape"),
        (header_bytes({"a": {**A, "shape": [4.0]}}), "no valid shape"),
        (header_bytes({"a": {**A, "shape": [True]}}), "no valid shape"),
        (header_bytes({"a": {**A, "data_offsets": [4]}}), "no valid data_offsets"),
        (header_bytes({"a": {**A, "data_offsets": [4, 0]}}), "no valid data_offsets"),
        (header_bytes({"a": {**A, "data_offsets": [0, 5]}}) + b"12345", "do not fit its dtype and shape"),
        (header_bytes({"a": {**A, "data_offsets": [1, 5]}}) + b"12345", "'a' follows a gap"),
        (header_bytes({"a": A, "b": {**A, "data_offsets": [2, 6]}}) + b"123456", "'b' overlaps"),
        (header_bytes({"a": A}) + b"123", "truncated"),
        (header_bytes({"a": {**A, "shape": [2**62], "data_offsets": [0, 2**62]}}), "truncated"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path, content, says):
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    with pytest.raises(UserError, match=says) as error:
        read_header(file)
    assert str(error.value).startswith(f"{file}: ") and "\n" not in str(error.value)
