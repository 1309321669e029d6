"""The file system that weights are read from."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from penstock.planner.common.cgroup import read_text
from penstock.planner.common.errors import UserError
from penstock.planner.common.host_memory import memory_facts
from penstock.planner.common.measures import ALIGN, GB, show_bytes
from penstock.planner.doctor.finding import Finding, Verdict
from penstock.planner.probe.findings import CannotMeasure
from penstock.planner.probe.scratch_file import MEMORY, file_system, free_bytes, scratch_file

NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse", "fuseblk", "virtiofs", "ceph", "lustre")
LEAST_FREE_BYTES = 2**20
"""A plan file and a report, which are written where a program is called."""
FEW_FREE_BYTES = 10 * GB


def disk_findings(path: Path, root: Path = Path("/")) -> Iterator[Finding]:
    """File system, O_DIRECT, free space and kind of drive of ``path``, and the working directory. Leaves nothing behind. UserError where
    there is no ``path``."""
    if not path.exists():
        raise UserError(f"path={path}: no such file or directory; name one on the file system that holds the checkpoint")
    yield _file_system(file_system(path, root))
    yield _direct(path)
    yield _free(path)
    yield _drive(path, root)
    yield _here(Path.cwd())


def _file_system(kind: str) -> Finding:
    if kind in MEMORY:
        return Finding("file system", kind, Verdict.fair, "put the checkpoint on a drive: this is DRAM, so weights take it twice")
    if kind.partition(".")[0] in NETWORK:
        return Finding("file system", kind, Verdict.fair, "copy the checkpoint to a local drive: streaming goes at the network's rate")
    return Finding("file system", kind, Verdict.unknown if kind == "unknown" else Verdict.good)


def _direct(path: Path) -> Finding:
    change = "use ext4 or xfs on a local drive: reads pass through the page cache, which costs a copy and DRAM"
    try:
        works = _reads(path) if path.is_file() else _writes(path)
    except (OSError, CannotMeasure) as error:
        return Finding("O_DIRECT", f"could not be tried: {error}", Verdict.unknown, "run it with path= a file that you may read")
    return Finding("O_DIRECT", "works", Verdict.good) if works else Finding("O_DIRECT", "refused", Verdict.fair, change)


def _reads(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if isinstance(error, PermissionError):
            raise
        return False
    try:
        os.preadv(fd, [mmap.mmap(-1, ALIGN)], 0)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _writes(directory: Path) -> bool:
    with scratch_file(directory) as (_, direct):
        return direct


def _free(path: Path) -> Finding:
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return Finding("free space", "read-only", Verdict.good)
    nbytes = free_bytes(path)
    found = f"{show_bytes(nbytes)} free"
    if nbytes < FEW_FREE_BYTES:
        return Finding("free space", found, Verdict.fair, "delete something: packed stores and kept KV need as much as they hold")
    return Finding("free space", found, Verdict.good)


def _here(directory: Path) -> Finding:
    if not os.access(directory, os.W_OK) or free_bytes(directory) < LEAST_FREE_BYTES:
        change = "call the programs elsewhere, or set out=: a plan and a report are written here"
        return Finding("working dir", f"{directory} takes no file", Verdict.stops, change)
    return Finding("working dir", "takes files", Verdict.good)


def _drive(path: Path, root: Path) -> Finding:
    device = os.stat(path).st_dev
    here = root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    rotates = read_text(here / "queue/rotational") or read_text(here / "../queue/rotational")
    if rotates is None:
        return Finding("drive", "the kernel does not say", Verdict.unknown)
    if rotates.strip() == "1" and memory_facts(root).virtual:
        return Finding("drive", "spins, says the kernel of a virtual drive", Verdict.unknown)
    if rotates.strip() == "1":
        change = "use an SSD: a spinning drive reads some 0.2 GB/s; `planner probe` measures it"
        return Finding("drive", "spins, says the kernel", Verdict.fair, change)
    return Finding("drive", "does not spin", Verdict.good)
