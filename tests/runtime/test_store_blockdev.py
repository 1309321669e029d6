"""A raw block device holds a packed store, and one that is in use is never touched."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.planner.common.errors import UserError
from penstock.runtime.model.skeleton import build_skeleton
from penstock.runtime.store.base import open_store
from penstock.runtime.store.blockdev import device_user, open_device
from penstock.runtime.store.verify import verify_store
from penstock.runtime.tools.pack import pack_checkpoint
from tests.runtime.test_store_inplace import assert_same_as_loaded
from tests.support import save_tiny


def quiet(done: int, total: int) -> None:
    pass


def run(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30)
    except FileNotFoundError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def loop_device(path: Path, nbytes: int) -> Iterator[Path]:
    path.write_bytes(b"\xaa" * nbytes)
    made = run("losetup", "-f", "--show", str(path))
    if made.returncode:
        pytest.skip(f"no loop device here: {made.stderr.strip()}")
    device = Path(made.stdout.strip())
    yield device
    run("losetup", "-d", str(device))


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    yield from loop_device(tmp_path / "disk.img", 4 << 20)


@pytest.fixture
def small_device(tmp_path: Path) -> Iterator[Path]:
    yield from loop_device(tmp_path / "small.img", 64 << 10)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("device") / "model", "llama", layers=2)


def test_a_block_device_is_packed_read_and_verified(checkpoint: Path, device: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    summary = pack_checkpoint(checkpoint, out, device, True, quiet)
    assert summary["weights"] == str(device) and not (out / "weights.bin").exists()
    assert_same_as_loaded(open_store(out, build_skeleton(out)), checkpoint)
    verify_store(out, quiet)


def test_a_block_device_needs_force(checkpoint: Path, device: Path, tmp_path: Path) -> None:
    before = device.read_bytes()
    with pytest.raises(UserError, match="force=true"):
        pack_checkpoint(checkpoint, tmp_path / "out", device, False, quiet)
    assert device.read_bytes() == before and not (tmp_path / "out").exists()


def test_a_block_device_that_is_too_small_is_left_as_it_was(checkpoint: Path, small_device: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pack_checkpoint(checkpoint, out, None, False, quiet)
    before = small_device.read_bytes()
    with pytest.raises(UserError, match=r"65\.5 kB and the weights need .*; name a larger one"):
        pack_checkpoint(checkpoint, out, small_device, True, quiet)
    assert small_device.read_bytes() == before
    verify_store(out, quiet)


def test_a_mounted_block_device_is_never_written(checkpoint: Path, device: Path, tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    if run("mkfs.ext2", "-q", "-F", str(device)).returncode or run("mount", str(device), str(tmp_path / "mnt")).returncode:
        pytest.skip("cannot make and mount a file system here")
    try:
        (tmp_path / "mnt" / "precious").write_text("mine")
        with pytest.raises(UserError, match=rf"{device} is mounted at .*mnt; a device in use is never written"):
            pack_checkpoint(checkpoint, tmp_path / "out", device, True, quiet)
        assert (tmp_path / "mnt" / "precious").read_text() == "mine" and not (tmp_path / "out").exists()
    finally:
        run("umount", str(tmp_path / "mnt"))


def test_an_interrupted_pack_on_a_device_is_not_accepted(checkpoint: Path, device: Path, tmp_path: Path) -> None:
    pack_checkpoint(checkpoint, tmp_path / "first", device, True, quiet)

    def stop(done: int, total: int) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        pack_checkpoint(checkpoint, tmp_path / "second", device, True, stop)
    assert not (tmp_path / "second").exists()
    with pytest.raises(UserError, match="superblock"):
        open_store(tmp_path / "first", build_skeleton(checkpoint))


def test_a_device_held_by_someone_else_is_refused_by_the_kernel_too(device: Path) -> None:
    holder = os.open(device, os.O_RDWR | os.O_EXCL)
    try:
        with pytest.raises(UserError, match=r"cannot be opened for writing \(in use\)"):
            open_device(device, True)
    finally:
        os.close(holder)


def test_the_disk_of_a_mounted_file_system_is_known_to_be_in_use() -> None:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        number, source = line.split()[2], line.split(" - ")[1].split()[1]
        if source.startswith("/dev/") and os.path.exists(source) and stat.S_ISBLK(os.stat(source).st_mode):
            major, minor = map(int, number.split(":"))
            assert "is mounted at" in str(device_user(major, minor))
            return
    pytest.skip("no mounted block device here")


def test_a_file_is_no_block_device(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UserError, match="not a block device"):
        pack_checkpoint(checkpoint, tmp_path / "out", tmp_path / "file", True, quiet)
    with pytest.raises(UserError, match="No such file"):
        pack_checkpoint(checkpoint, tmp_path / "out", tmp_path / "none", True, quiet)
    assert (tmp_path / "file").read_text() == "precious" and not (tmp_path / "out").exists()
