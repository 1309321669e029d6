"""From a Hugging Face checkpoint to a packed store, unit by unit."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import ALIGN, show_bytes
from penstock.planner.contract.checkpoint.checkpoint_files import CONFIG, gguf_config, read_checkpoint
from penstock.planner.contract.checkpoint.gguf_checkpoint import VOCABULARY, files_beside, vocabulary_file
from penstock.planner.contract.gguf.gguf_header import without_tensors
from penstock.runtime.asked.run_schema import PackFormat
from penstock.runtime.model.binding import views
from penstock.runtime.moving.arriving_scales import ArrivingScales
from penstock.runtime.reading.layout import UnitLayout, lay_packed
from penstock.runtime.reading.reader import ReadPool
from penstock.runtime.store.adapter import Adapter
from penstock.runtime.store.blockdev import open_device
from penstock.runtime.store.inplace import Inventory
from penstock.runtime.store.manifest import MANIFEST, WEIGHTS, Manifest, superblock
from penstock.runtime.store.parameters import model_slots
from penstock.runtime.store.scales import check_scales
from penstock.runtime.store.sections import Section
from penstock.runtime.tools.pack_asked import check_pack
from penstock.runtime.tools.recoding.recoded import Recoded
from penstock.runtime.tools.recoding.recoders import recoded

READ_THREADS = 4
"""Reads in flight while packing: enough to keep the SSDs that we know busy while one thread writes."""
READ_BLOCK_BYTES = 8 << 20
"""Bytes of one read while packing; staging is ``READ_THREADS`` of them."""
COPIED = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
"""Small files of a checkpoint that a run needs beside the weights: config, generation config, tokenizer."""
NOT_COPIED = (MANIFEST, "model.safetensors.index.json")

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class _Job:
    """Everything that will be written, known before the first byte is."""

    inventory: Inventory
    layouts: Mapping[str, UnitLayout]
    units: int
    """How many of ``layouts``, from the first, are units."""
    tensors: Mapping[str, Mapping[str, Any]]
    names: Mapping[tuple[str, str], str]
    """(section, tensor in it) -> the parameter's full name."""
    adapter: Adapter | None = None
    recoded: Recoded | None = None
    """Makes the bytes; None: they are read from the checkpoint."""

    @property
    def digest(self) -> str:
        """Of the checkpoint, and of the adapter that is merged into it."""
        own = self.inventory.digest
        return own if self.adapter is None else xxhash.xxh3_128_hexdigest(f"{own}+{self.adapter.digest}".encode())

    @property
    def nbytes(self) -> int:
        return ALIGN + sum(layout.nbytes for layout in self.layouts.values())


@dataclass(frozen=True)
class _Written:
    """What a pack has begun to write, to be removed when it fails. On a device the superblock is zero already."""

    out: Path
    new: bool
    """``out`` was not there before."""
    files: list[Path]

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            for path in self.files:
                path.unlink(missing_ok=True)
            if self.new and self.files:
                self.out.rmdir()


def pack_checkpoint(
    checkpoint: Path,
    out: Path,
    device: Path | None,
    force: bool,
    progress: Progress,
    adapter: Path | None = None,
    form: PackFormat | None = None,
) -> dict[str, Any]:
    """Write the checkpoint in the directory ``checkpoint`` as a packed store in ``out``. Its weights go to ``device``, if it is given. The
    LoRA adapter in the directory ``adapter`` is merged into them. Matrices are coded in the format ``form``.

    Peak memory: the largest unit, or the embedding table, + 32 MiB of staging. An adapter takes 4 bytes an element of a matrix more. A
    format takes a matrix as it was and as it is coded. ``progress(done, total)`` counts bytes.

    An old store in ``out`` is replaced only with ``force``, and is invalid from the first moment. The manifest is written last, so an
    interrupted pack leaves nothing that opens. A failed pack removes what it wrote. UserError: the checkpoint is damaged, the adapter is
    another model's, ``out`` holds something else, the disk or device is too small or in use.
    """
    check_pack(checkpoint, out, device, force, adapter, form)
    if form is None:
        job = _plan(checkpoint, adapter)
        check_scales(scale for scale in job.inventory.scales if not scale.block_bytes)
        return _pack(job, checkpoint, out, device, force, progress)
    with tempfile.TemporaryDirectory() as directory:
        made = recoded(checkpoint, form, Path(directory), _small_files(checkpoint), progress)
        result = _pack(replace(_plan(made.directory, None), recoded=made), made.directory, out, device, force, progress)
        return result | {"format": str(form), "plain_units": made.plain_units}


def _pack(job: _Job, beside: Path, out: Path, device: Path | None, force: bool, progress: Progress) -> dict[str, Any]:
    """Write ``job``, and the small files that lie ``beside``."""
    target = out / WEIGHTS if device is None else device
    written = _Written(out, not out.exists(), [])
    fd = -1
    try:
        if device is not None:
            fd = open_device(device, force)
            size = os.lseek(fd, 0, os.SEEK_END)
            if size < job.nbytes:
                raise UserError(f"device={device}: {show_bytes(size)} and the weights need {show_bytes(job.nbytes)}; name a larger one")
        else:
            _check_space(out, job.nbytes)
        written.files.extend([out / MANIFEST, out / f"{MANIFEST}.partial"])
        out.mkdir(parents=True, exist_ok=True)
        (out / MANIFEST).unlink(missing_ok=True)
        _sync_directory(out)
        if device is None:
            written.files.append(target)
            fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        _write(fd, bytes(ALIGN), 0)
        os.fsync(fd)
        if device is None:
            os.ftruncate(fd, 0)
        manifest = _write_sections(job, fd, Path(WEIGHTS) if device is None else device.absolute(), progress)
        os.fsync(fd)
        _write(fd, superblock(manifest.uuid), 0)
        os.fsync(fd)
        for path in _small_files(beside):
            written.files.append(out / path.name)
            shutil.copyfile(path, out / path.name)
        for name, content in _of_gguf(beside).items():
            written.files.append(out / name)
            (out / name).write_bytes(content)
        _write_manifest(out, manifest)
    except BaseException as error:
        written.remove()
        if isinstance(error, OSError):
            raise _explain(error, target, job.nbytes) from error
        raise
    finally:
        if fd >= 0:
            os.close(fd)
    return {
        "out": str(out),
        "weights": str(manifest.weights_path(out)),
        "uuid": manifest.uuid,
        "digest": manifest.digest,
        "adapter": manifest.adapter,
        "nbytes": job.nbytes,
        "units": len(manifest.units),
        "others": len(manifest.others),
    }


def _plan(checkpoint: Path, adapter: Path | None) -> _Job:
    from penstock.runtime.model.skeleton import build_skeleton

    tensors = read_checkpoint(checkpoint).tensors
    model = build_skeleton(checkpoint)
    inventory = Inventory.of(checkpoint, model)
    layouts = {str(unit): lay_packed(group, inventory.sources) for unit, group in inventory.units.items()}
    layouts |= {p.name: lay_packed([p], inventory.sources) for p in inventory.others}
    described = {name: {"dtype": t.dtype, "shape": list(t.shape), "nbytes": t.nbytes} for name, t in tensors.items()}
    slots = model_slots(model)
    names = {(str(unit), slot.name): slot.full_name for unit, group in slots.units.items() for slot in group}
    names |= {(p.name, p.name): p.name for p in inventory.others}
    job = _Job(inventory, layouts, len(inventory.units), described, names)
    if adapter is None:
        return job
    coded = next((slot.coded.format for slot in slots.all if slot.coded is not None), None)
    if coded is not None:
        raise UserError(
            f"adapter={adapter}: {checkpoint} is stored in {coded}, and an adapter is merged into plain weights; merge it into the model's "
            f"BF16 checkpoint, then pack that, or quantise it"
        )
    opened = Adapter.open(adapter, model)
    for (section, name), parameter in names.items():
        stored = next((t.dtype for t in layouts[section].tensors if t.name == name), None)
        wanted = model.get_parameter(parameter).dtype if parameter in opened.changes else stored
        if stored not in (None, wanted):
            raise UserError(f"adapter={adapter}: {parameter} is stored in {stored} and computed with in {wanted}; merge it by PEFT")
    return replace(job, adapter=opened)


def _check_space(out: Path, nbytes: int) -> None:
    place = next(p for p in (out, *out.absolute().parents) if p.exists())
    old = out / WEIGHTS
    free = shutil.disk_usage(place).free + (old.stat().st_blocks * 512 if old.exists() else 0)
    if free < nbytes:
        raise UserError(f"out={out}: {show_bytes(free)} free, the packed store needs {show_bytes(nbytes)}; free space or name another disk")


def _write_sections(job: _Job, fd: int, weights: Path, progress: Progress) -> Manifest:
    buffer = mmap.mmap(-1, max(layout.nbytes for layout in job.layouts.values()))
    view = memoryview(buffer)
    sections: list[Section] = []
    position = ALIGN
    progress(0, job.nbytes)
    blocks = ArrivingScales(scale for scale in job.inventory.scales if scale.block_bytes)
    with ReadPool(READ_THREADS, READ_BLOCK_BYTES) as pool:
        read = pool.read_now if job.recoded is None else job.recoded.read
        for name, layout in job.layouts.items():
            piece = view[: layout.nbytes]
            for start, stop in _gaps(layout):
                piece[start:stop] = bytes(stop - start)
            read(layout.extents, piece)
            blocks.refuse(layout.extents, piece)
            if job.adapter is not None:
                for tensor, weight in views(layout.tensors, torch.frombuffer(piece, dtype=torch.uint8)).items():
                    job.adapter.merge(job.names[name, tensor], weight)
            _write(fd, piece, position)
            sections.append(Section(name, position, layout.nbytes, xxhash.xxh3_128_hexdigest(piece), layout.tensors))
            position += layout.nbytes
            progress(position, job.nbytes)
    return Manifest(
        uuid=str(uuid.uuid4()),
        digest=job.digest,
        weights=weights,
        units=tuple(sections[: job.units]),
        others=tuple(sections[job.units :]),
        tensors=job.tensors,
        adapter=None if job.adapter is None else job.adapter.facts(),
    )


def _gaps(layout: UnitLayout) -> Iterator[tuple[int, int]]:
    """Padding between and after the parameters."""
    end = 0
    for tensor in sorted(layout.tensors, key=lambda t: t.offset):
        if tensor.offset > end:
            yield end, tensor.offset
        end = tensor.offset + tensor.nbytes
    if end < layout.nbytes:
        yield end, layout.nbytes


def _write(fd: int, data: bytes | memoryview, position: int) -> None:
    """Write all of ``data`` and start writing it to the disk, so that dirty pages do not pile up."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done : done + READ_BLOCK_BYTES], position + done)
    os.fdatasync(fd)
    os.posix_fadvise(fd, position, len(view), os.POSIX_FADV_DONTNEED)


def _of_gguf(checkpoint: Path) -> dict[str, bytes]:
    """What a GGUF file says in place of small files; nothing of another checkpoint."""
    config, file = gguf_config(checkpoint), vocabulary_file(checkpoint)
    if config is None or file is None:
        return {}
    return {CONFIG: json.dumps(config, indent=2).encode(), VOCABULARY: without_tensors(file)}


def _small_files(checkpoint: Path) -> list[Path]:
    directory = files_beside(checkpoint)
    if directory != checkpoint and not (directory / CONFIG).exists():
        return []  # a file among others, whatever these are
    return sorted({p for pattern in COPIED for p in directory.glob(pattern) if p.is_file() and p.name not in NOT_COPIED})


def _write_manifest(out: Path, manifest: Manifest) -> None:
    partial = out / f"{MANIFEST}.partial"
    with open(partial, "w") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, out / MANIFEST)
    _sync_directory(out)


def _explain(error: OSError, target: Path, nbytes: int) -> UserError:
    where = error.filename or target
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return UserError(f"{where}: the disk is full ({error.strerror}), {show_bytes(nbytes)} are needed; free space or name another disk")
    return UserError(f"{where}: writing failed ({error.strerror}); check permissions and the disk")


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
