"""A packed store holds the checkpoint's parameters, and nothing but a whole one is ever accepted."""

from __future__ import annotations

import itertools
import json
import multiprocessing.context
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import ALIGN
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.model.skeleton import build_skeleton
from penstock.runtime.reading.store_errors import StoreError
from penstock.runtime.store.base import open_store
from penstock.runtime.store.manifest import MANIFEST, WEIGHTS, read_manifest
from penstock.runtime.store.verify import verify_store
from penstock.runtime.tools import pack as pack_module
from penstock.runtime.tools import runtime_verbs
from penstock.runtime.tools.pack import pack_checkpoint
from penstock.runtime.tools.pack_asked import check_packed
from tests.cli import HANGS_S, refusal
from tests.runtime.test_store_inplace import SHARED, assert_same_as_loaded
from tests.support import save_tiny

ROOT = Path(__file__).parents[2]


def quiet(done: int, total: int) -> None:
    assert 0 <= done <= total


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("pack") / "a model=x", "mixtral", layers=2, shard="150kB")


@pytest.fixture(scope="module")
def packed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "out"
    pack_checkpoint(checkpoint, out, None, False, quiet)
    return out


@pytest.fixture
def store(packed: Path, tmp_path: Path) -> Path:
    """A packed store that a test may damage."""
    shutil.copytree(packed, tmp_path / "store")
    return tmp_path / "store"


def accepted(path: Path, checkpoint: Path) -> bool:
    """Whether anything would run from ``path``."""
    for attempt in (lambda: open_store(path, build_skeleton(checkpoint)), lambda: verify_store(path, quiet)):
        try:
            attempt()
        except UserError as error:
            assert "\n" not in str(error)
        else:
            return True
    return False


@pytest.mark.parametrize(("model_type", "tied"), [("llama", True), ("gemma3_text", True), ("mixtral", False), ("qwen3_moe", False)])
def test_a_packed_store_holds_what_transformers_loads(tmp_path: Path, model_type: str, tied: bool) -> None:
    directory = save_tiny(tmp_path / "model", model_type, tied, layers=2, shard="150kB")
    pack_checkpoint(directory, tmp_path / "out", None, False, quiet)
    assert_same_as_loaded(open_store(tmp_path / "out", build_skeleton(tmp_path / "out")), directory)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mixtral"])
def test_trained_models_pack(tmp_path: Path, name: str) -> None:
    if not (SHARED / name).is_dir():
        pytest.skip(f"no {SHARED / name}")
    pack_checkpoint(SHARED / name, tmp_path / "out", None, False, quiet)
    assert_same_as_loaded(open_store(tmp_path / "out", build_skeleton(tmp_path / "out")), SHARED / name, block_bytes=1 << 20)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (SHARED / name / "tokenizer.json").read_bytes()


def test_every_unit_is_one_aligned_extent_in_forward_order(checkpoint: Path, packed: Path) -> None:
    manifest = read_manifest(packed)
    experts = [[f"expert.{layer}.{e}" for e in range(4)] for layer in range(2)]
    assert [s.name for s in manifest.units] == ["attn.0", "ffn.0", *experts[0], "attn.1", "ffn.1", *experts[1]]
    position = ALIGN
    for section in (*manifest.units, *manifest.others):
        assert section.offset == position and section.nbytes % ALIGN == 0
        assert all(t.offset % 256 == 0 for t in section.tensors)
        position += section.nbytes
    assert position == manifest.end == (packed / WEIGHTS).stat().st_size
    (extent,) = open_store(packed, build_skeleton(packed)).unit(Unit("expert", 1, 3)).extents
    assert extent.owns_pages and extent.dest == 0 and extent.offset % ALIGN == 0


def test_a_packed_store_describes_the_same_model_as_its_checkpoint(checkpoint: Path, packed: Path) -> None:
    from dataclasses import replace

    whole, source = spec_from_checkpoint(packed), spec_from_checkpoint(checkpoint)
    assert replace(whole, name=source.name, checkpoint=source.checkpoint) == source
    assert open_store(packed, build_skeleton(packed)).digest == source.digest


def test_packing_twice_gives_the_same_weights(checkpoint: Path, packed: Path, tmp_path: Path) -> None:
    pack_checkpoint(checkpoint, tmp_path / "again", None, False, quiet)
    assert (tmp_path / "again" / WEIGHTS).read_bytes()[ALIGN:] == (packed / WEIGHTS).read_bytes()[ALIGN:]


def test_progress_counts_all_bytes_once(checkpoint: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    summary = pack_checkpoint(checkpoint, tmp_path / "out", None, False, lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1] == (summary["nbytes"], summary["nbytes"])
    seen.clear()
    verify_store(tmp_path / "out", lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[0][0] == 0 and seen[-1][0] == seen[-1][1]


def test_an_old_store_is_replaced_only_with_force(checkpoint: Path, store: Path) -> None:
    before = (store / MANIFEST).read_bytes()
    with pytest.raises(UserError, match="force=true"):
        pack_checkpoint(checkpoint, store, None, False, quiet)
    assert (store / MANIFEST).read_bytes() == before
    pack_checkpoint(checkpoint, store, None, True, quiet)
    assert (store / MANIFEST).read_bytes() != before
    verify_store(store, quiet)


def test_a_checkpoint_is_never_packed_over(checkpoint: Path, tmp_path: Path) -> None:
    other = shutil.copytree(checkpoint, tmp_path / "other")
    for out in (checkpoint, other):
        with pytest.raises(UserError, match="name another directory"):
            pack_checkpoint(checkpoint, out, None, True, quiet)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UserError, match="a file is there"):
        pack_checkpoint(checkpoint, tmp_path / "file", None, True, quiet)
    assert (tmp_path / "file").read_text() == "precious"


class Stop(Exception):
    pass


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("after", [0, 1, 3, 99])
def test_an_interrupted_pack_removes_what_it_wrote(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, error: type[BaseException]
) -> None:
    calls = iter(range(1000))

    def progress(done: int, total: int) -> None:
        if next(calls) == after:
            raise error

    if after == 99:
        monkeypatch.setattr(pack_module, "_write_manifest", lambda out, manifest: (_ for _ in ()).throw(error()))
    with pytest.raises(error):
        pack_checkpoint(checkpoint, tmp_path / "out", None, False, progress)
    assert not (tmp_path / "out").exists()


def test_an_interrupted_replacement_leaves_no_store(checkpoint: Path, store: Path) -> None:
    def progress(done: int, total: int) -> None:
        if done:
            raise Stop

    (store / "notes.md").write_text("mine")
    with pytest.raises(Stop):
        pack_checkpoint(checkpoint, store, None, True, progress)
    assert not accepted(store, checkpoint)
    assert (store / "notes.md").read_text() == "mine"


def pack_and_die(source: Path, out: Path, point: int) -> None:
    """Pack, and be killed at the ``point``-th block, at 100 before the manifest is written, at 101 before it takes its place."""
    blocks = itertools.count(1)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if point == 100:
        pack_module._write_manifest = lambda out, m: die()
    if point == 101:
        os.replace = lambda a, b: die()
    pack_checkpoint(source, out, None, True, lambda done, total: die() if next(blocks) == point else None)


@pytest.fixture(scope="module")
def nursery() -> multiprocessing.context.ForkServerContext:
    """Starts processes that have imported torch and the model's module once between them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "transformers.models.mixtral.modeling_mixtral"])
    return context


@pytest.mark.parametrize(("point", "over"), [(1, False), (3, False), (3, True), (100, True), (101, True)])
def test_a_killed_pack_leaves_nothing_that_a_run_accepts(
    checkpoint: Path, store: Path, tmp_path: Path, nursery: multiprocessing.context.ForkServerContext, point: int, over: bool
) -> None:
    out = store if over else tmp_path / "new"
    process = nursery.Process(target=pack_and_die, args=(checkpoint, out, point))
    process.start()
    process.join(HANGS_S)
    assert process.exitcode == -signal.SIGKILL
    assert out.exists() and not accepted(out, checkpoint)
    pack_checkpoint(checkpoint, out, None, False, quiet)
    assert accepted(out, checkpoint)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    checkpoint: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(pack_module.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UserError, match=r"out=.*: 1 kB free, the packed store needs .* free space"):
        pack_checkpoint(checkpoint, tmp_path / "deep" / "out", None, False, quiet)
    assert not (tmp_path / "deep").exists()


def test_a_disk_that_fills_up_on_the_way_is_one_line_and_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., int] = os.pwrite

    def pwrite(fd: int, data: bytes, position: int) -> int:
        if position > 100_000:
            raise OSError(28, "No space left on device")
        return real(fd, data, position)

    monkeypatch.setattr(pack_module.os, "pwrite", pwrite)
    with pytest.raises(UserError, match=r"weights\.bin: the disk is full \(No space left on device\)") as caught:
        pack_checkpoint(checkpoint, tmp_path / "out", None, False, quiet)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_a_directory_that_may_not_be_written_is_one_line(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuses_writes(path: Any, flags: int, *more: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR) and str(path).endswith(WEIGHTS):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, flags, *more)

    monkeypatch.setattr(pack_module.os, "open", refuses_writes)
    with pytest.raises(UserError, match="writing failed.*Permission denied"):
        pack_checkpoint(checkpoint, tmp_path / "out", None, False, quiet)


@pytest.mark.parametrize("where", ["first", "last"])
def test_verify_names_the_first_bad_section(store: Path, where: str) -> None:
    manifest = read_manifest(store)
    section = manifest.units[1] if where == "first" else manifest.others[-1]
    with open(store / WEIGHTS, "r+b") as file:
        file.seek(section.offset + section.tensors[0].nbytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(UserError, match=rf"weights\.bin: {section.name} at offset {section.offset} .*does not match its checksum"):
        verify_store(store, quiet)


def test_a_corrupt_manifest_is_refused_in_one_line(checkpoint: Path, store: Path) -> None:
    text = (store / MANIFEST).read_text()
    offset = str(read_manifest(store).units[1].offset)
    edited = (text.replace(offset, "8192", 1), text.replace('"penstock_pack": 2', '"penstock_pack": 3'))
    for damaged in (text[: len(text) // 2], "", "[]", "{}", *edited):
        assert damaged != text
        (store / MANIFEST).write_text(damaged)
        assert not accepted(store, checkpoint)
    (store / MANIFEST).write_bytes(b"\xff\xfe\x00")
    assert not accepted(store, checkpoint)


def test_a_manifest_of_another_pack_is_refused(checkpoint: Path, store: Path, tmp_path: Path) -> None:
    pack_checkpoint(checkpoint, tmp_path / "other", None, False, quiet)
    shutil.copy(tmp_path / "other" / MANIFEST, store / MANIFEST)
    with pytest.raises(UserError, match="superblock"):
        open_store(store, build_skeleton(checkpoint))


def test_truncated_weights_are_refused(checkpoint: Path, store: Path) -> None:
    os.truncate(store / WEIGHTS, (store / WEIGHTS).stat().st_size - 1)
    with pytest.raises(UserError, match="truncated"):
        open_store(store, build_skeleton(checkpoint))
    (store / WEIGHTS).unlink()
    assert not accepted(store, checkpoint)


def test_a_packed_store_of_another_model_names_the_parameter(store: Path, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", "mixtral", layers=3)
    with pytest.raises(UserError, match=r"parameter model\.layers\.2\.self_attn\.q_proj\.weight .* lacks it"):
        open_store(store, build_skeleton(other))


def test_the_manifest_is_plain_json_that_names_the_original_tensors(packed: Path) -> None:
    body = json.loads((packed / MANIFEST).read_text())
    assert body["penstock_pack"] == 2 and len(body["checksum"]) == 32
    entry = body["tensors"]["model.layers.0.block_sparse_moe.experts.0.w1.weight"]
    assert entry == {"dtype": "BF16", "shape": [160, 64], "nbytes": 160 * 64 * torch.bfloat16.itemsize}


def test_verify_says_what_is_missing(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such directory"):
        check_packed(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no manifest.json"):
        check_packed(checkpoint)
    with pytest.raises(UserError, match=r"manifest.json: cannot be read"):
        verify_store(checkpoint, quiet)


def _made_anew(store: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """The manifest after ``edit``, with its checksum right."""
    body = json.loads((store / MANIFEST).read_text())
    body.pop("checksum")
    edit(body)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    body["checksum"] = xxhash.xxh3_128_hexdigest(text.encode())
    (store / MANIFEST).write_text(json.dumps(body))


EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a parameter past its unit": (lambda b: b["units"][0]["parameters"][0].__setitem__(3, b["units"][0]["nbytes"]), "past the end"),
    "a parameter far away": (lambda b: b["units"][0]["parameters"][0].__setitem__(3, 10**12), "past the end"),
    "a parameter before its unit": (lambda b: b["units"][0]["parameters"][0].__setitem__(3, -256), "no valid shape"),
    "a parameter on another": (lambda b: b["units"][0]["parameters"][1].__setitem__(3, 0), "overlaps another"),
    "a parameter off its place": (lambda b: b["units"][0]["parameters"][0].__setitem__(3, 1), "no valid shape"),
    "no bytes": (lambda b: b["units"][0]["parameters"][0].__setitem__(4, 0), "not those of its shape"),
    "fewer bytes than none": (lambda b: b["units"][0]["parameters"][0].__setitem__(4, -8), "no valid shape"),
    "bytes without end": (lambda b: b["units"][0]["parameters"][0].__setitem__(4, float("inf")), "Infinity is no number"),
    "a section of no bytes": (lambda b: b["units"][0].__setitem__("nbytes", 0), "past the end"),
    "a section's bytes as text": (lambda b: b["units"][0].__setitem__("nbytes", "4096"), "multiples of 4096"),
    "a section off its place": (lambda b: b["units"][0].__setitem__("offset", 1), "multiples of 4096"),
    "a section on another": (lambda b: b["units"][0].__setitem__("offset", b["units"][1]["offset"]), "overlaps section"),
    "a section on the superblock": (lambda b: b["units"][0].__setitem__("offset", 0), "on the superblock"),
    "weights with a null byte": (lambda b: b.__setitem__("weights", "\0"), "must name a file"),
    "weights elsewhere": (lambda b: b.__setitem__("weights", "../gold/weights.bin"), "must name a file"),
    "another uuid's type": (lambda b: b.__setitem__("uuid", 5), "not a manifest of this version"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_manifest_that_lies_is_refused_by_verify_as_by_a_run(checkpoint: Path, store: Path, edit: str) -> None:
    change, complaint = EDITS[edit]
    _made_anew(store, change)
    with pytest.raises(UserError, match=complaint) as refused:
        read_manifest(store)
    assert "pack the checkpoint again" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", [MANIFEST, WEIGHTS])
def test_a_pipe_in_a_stores_place_is_refused_at_once(store: Path, name: str) -> None:
    (store / name).unlink()
    os.mkfifo(store / name)
    with pytest.raises((UserError, StoreError), match="a pipe, not a file"):
        read_manifest(store)


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("checkpoint=none out=here", "none: no such directory; name the one of a downloaded Hugging Face checkpoint"),
        ("checkpoint=model out=model", "out=model: is the checkpoint itself"),
        ("checkpoint=model out=/proc/made", "out=/proc/made: /proc is not a directory that can be written to; choose another out="),
        ("checkpoint=model out=made adapter=none", "adapter=none: no such directory; name a PEFT adapter's"),
        ("checkpoint=model out=made format=int4 adapter=here", "cannot be merged at the same time"),
        ("checkpoint=model out=made device=/dev/null", "device=/dev/null: not a block device"),
    ],
)
def test_a_mistake_is_one_line_without_torch(typed: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is not there was a traceback where `out` was, and all others came behind torch's import."""
    monkeypatch.setattr(runtime_verbs, "import_torch", lambda: pytest.fail("torch was imported first"))
    save_tiny(tmp_path / "model")
    (tmp_path / "here").mkdir()
    assert line in refusal("runtime", "pack", *typed.split(), cwd=tmp_path)
