"""A model of a family that no formula knows, as transformers builds it without weights, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xxhash

import penstock
from penstock.planner.common.errors import UserError
from penstock.planner.common.user_folder import cache_dir
from penstock.planner.contract.checkpoint.tally import TensorInfo
from penstock.planner.contract.given.formats import FORMATS

BUILDER = "penstock.runtime.model.described"
"""The module that builds it: run, never imported, so that a plan is solved without torch."""


@dataclass(frozen=True)
class Described:
    """What transformers says of a config."""

    tensors: Mapping[str, TensorInfo]
    """Parameters and persistent buffers by transformers' names, unquantised; a tied head is left out."""
    refused: str | None
    """Why the runtime does not run the model, in one line; None when it does."""


def described(config: Mapping[str, Any], where: str) -> Described:
    """What transformers makes of config.json's content ``config``, read from ``where``.

    The first time it takes the seconds that importing torch and transformers takes; the answer is kept in the user's cache, by the
    config's digest and the version of transformers. UserError where the child could not say anything.
    """
    text = json.dumps({key: _plain(value) for key, value in config.items() if key != "quantization_config"}, sort_keys=True)
    kept = cache_dir() / "described" / f"{xxhash.xxh3_128_hexdigest(text.encode())}-{version('transformers')}.json"
    answer = _read(kept)
    if answer is None:
        answer = _ask(text, where)
        _keep(kept, answer)
    tensors = {str(name): TensorInfo.of(tuple(shape), FORMATS[stored]) for name, shape, stored in answer["tensors"]}
    refused = answer["refused"]
    return Described(tensors, None if refused is None else f"{where}: {refused}")


def _plain(value: Any) -> Any:
    """A nested config without its quantisation: sizes are asked of the model as it was trained."""
    return {key: inner for key, inner in value.items() if key != "quantization_config"} if isinstance(value, Mapping) else value


def _ask(text: str, where: str) -> dict[str, Any]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    here = str(Path(penstock.__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory(prefix="penstock-config-") as scratch:
        Path(scratch, "config.json").write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", BUILDER, scratch]
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    answer = _parsed(done.stdout)
    if done.returncode or answer is None:
        said = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
        raise UserError(f"{where}: transformers could not build the model: {said[-1][:200]}; give a directory with its weights")
    return answer


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        answer = json.loads(text)
    except ValueError:
        return None
    sound = isinstance(answer, dict) and isinstance(answer.get("tensors"), list) and "refused" in answer
    return answer if sound and all(len(row) == 3 and row[2] in FORMATS for row in answer["tensors"]) else None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return _parsed(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None


def _keep(path: Path, answer: Mapping[str, Any]) -> None:
    """Whole or not at all. A cache that cannot be written is asked for again the next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(answer, file)
        os.replace(file.name, path)
    except OSError:
        return
