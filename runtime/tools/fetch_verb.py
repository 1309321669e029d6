"""`runtime fetch`: a model from the hub into a directory, with the room it takes said beforehand."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import show_bytes
from penstock.planner.common.user_folder import user_path
from penstock.planner.contract.published.hub_names import TIMEOUT_S, hub_errors, hub_name, hub_refusal
from penstock.runtime.asked.run_schema import FetchConfig
from penstock.runtime.tools.hub_file import HubFile
from penstock.runtime.tools.runtime_verbs import bar, say

WEIGHTS = ".safetensors"
BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Ends of the names of what a tokenizer and a config are made of."""
FETCHED = ".fetched.json"
"""Name -> digest of the files that a download has checked."""


def fetch_verb(cfg: FetchConfig) -> None:
    """Download ``cfg.name``; checked files that are there are kept. UserError without the room on the disk, and for what the hub says."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    name = hub_name(cfg.name)
    if name is None:
        raise UserError(f"name={cfg.name}: must be a model on the hub, ORG/NAME, and no path here")
    files = _listed(name, cfg.revision)
    out = user_path(cfg.out or name.rpartition("/")[2])
    known = _Known(out)
    wanted = [file for file in files if not known.has(file)]
    here = sum(file.nbytes for file in files) - sum(file.nbytes - file.here(out) for file in wanted)
    _say_room(name, files, here, out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with bar(name.rpartition("/")[2]) as progress:
            done, total = here, sum(file.nbytes for file in files)

            def advance(count: int) -> None:
                nonlocal done
                done += count
                progress(done, total)

            progress(done, total)
            for file in wanted:
                if not (out / file.name).is_file() or not file.sound(out / file.name):
                    file.fetch(out, advance)
                known.add(file)
    except hub_errors() as error:
        raise _broken(name, out, error) from error
    total = sum(file.nbytes for file in files)
    result = {"name": name, "out": str(out), "files": len(files), "nbytes": total, "fetched_bytes": total - here}
    say(f"fetched {name} into {out}; plan it with: planner solve model.checkpoint={out}", result, cfg)


def _listed(name: str, revision: str) -> list[HubFile]:
    """The files of ``name`` that a run needs, weights last."""
    from huggingface_hub import HfApi, hf_hub_url

    try:
        about = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
    except hub_errors() as error:
        raise hub_refusal(name, error) from error
    names = [entry.rfilename for entry in about.siblings or ()]
    chosen = set(_chosen(name, names))
    found = []
    for entry in (entry for entry in about.siblings or () if entry.rfilename in chosen):
        size, digest = entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id
        if size is None or digest is None:
            raise UserError(f"{name}: the hub does not say the size and digest of {entry.rfilename}; try again")
        found.append(HubFile(entry.rfilename, size, digest, hf_hub_url(name, entry.rfilename, revision=about.sha)))
    return sorted(found, key=lambda file: (file.name.endswith(WEIGHTS), file.name))


def _chosen(name: str, names: Iterable[str]) -> list[str]:
    """Files at the top: the weights in safetensors, once, and what is small beside them."""
    top = [path for path in names if "/" not in path and "\0" not in path and not path.startswith(".")]
    shards = [path for path in top if path.endswith(WEIGHTS)]
    if not shards:
        others = sorted({Path(path).suffix for path in names} & {".gguf", ".bin", ".pt", ".pth", ".onnx"})
        found = f"; it has {', '.join(others)} files" if others else ""
        raise UserError(f"{name}: no safetensors weights at the top of the repository{found}; choose one that has them")
    own = [path for path in shards if not path.startswith("consolidated")]
    return [path for path in top if path.endswith(BESIDE) or path in (own or shards)]


def _say_room(name: str, files: list[HubFile], here: int, out: Path) -> None:
    """What comes, and whether it fits. UserError when it does not."""
    total = sum(file.nbytes for file in files)
    place = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    need = max(0, total - here)
    part = f", {show_bytes(here)} of it here" if here else ""
    print(f"{name}: {len(files)} files, {show_bytes(total)}{part}; {show_bytes(free)} free in {place}", flush=True)
    if need > free:
        raise UserError(f"out={out}: {show_bytes(need)} are needed and {show_bytes(free)} free; free space, or set out= on another disk")


def _broken(name: str, out: Path, error: Exception) -> UserError:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"out={out}: the disk is full; free space and fetch again, what came is kept")
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return UserError(f"out={out}: {error.filename} cannot be written ({error.strerror}); choose another out=")
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return UserError(f"{name}: the download broke off ({reason[0][:160]}); what came is kept: fetch again to go on")


class _Known:
    """The files in a directory that a download has checked, by what it wrote down."""

    def __init__(self, directory: Path):
        self._directory = directory
        try:
            read = json.loads((directory / FETCHED).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            read = {}
        self._digests: dict[str, str] = read if isinstance(read, dict) else {}

    def has(self, file: HubFile) -> bool:
        path = self._directory / file.name
        return self._digests.get(file.name) == file.digest and path.is_file() and path.stat().st_size == file.nbytes

    def add(self, file: HubFile) -> None:
        self._digests[file.name] = file.digest
        aside = self._directory / f"{FETCHED}.part"
        aside.write_text(json.dumps(self._digests, indent=1) + "\n", encoding="utf-8")
        os.replace(aside, self._directory / FETCHED)
