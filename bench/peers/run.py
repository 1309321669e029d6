"""The same work by Penstock and by what else there is, each in a process of its own under the same VRAM budget: one table.

    python bench/peers/run.py checkpoint=DIR vram_bytes=6GiB prompt_tokens=2048 new_tokens=8 out=peers.json
    python bench/peers/run.py draw=peers.json

The figures go to `out` (JSON) after every system, and into a picture beside it (PNG; `draw=` makes it from a JSON elsewhere).
A system that is not installed, fails or takes longer than `limit_s` stands in the table with its message.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.keys import given_keys, read_names, read_values  # noqa: E402
from bench.link import Bench, machine  # noqa: E402
from bench.peers.peer import SYSTEMS, Job, Measured  # noqa: E402
from bench.peers.picture import draw  # noqa: E402
from bench.peers.table import Ended, Row, describe, make_rows, show  # noqa: E402
from penstock.planner.common.errors import UserError  # noqa: E402
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint  # noqa: E402
from penstock.runtime.asked.prompts import random_ids  # noqa: E402

GRACE_S = 10
"""Seconds between asking a process to end and ending it."""


@dataclass(frozen=True)
class Request:
    """The command's keys."""

    checkpoint: Path
    out: Path = Path("peers.json")
    work: Path = Path("bench-work/peers")
    """Where plans, offload folders and AirLLM's copy of the checkpoint go; the copies are removed."""
    systems: tuple[str, ...] = tuple(SYSTEMS)
    vram_bytes: int = 6 << 30
    dram_bytes: int | None = None
    prompt_tokens: int = 2048
    new_tokens: int = 8
    batch: int = 1
    seed: int = 0
    limit_s: int = 240
    """Longest life of a system's process, loading and AirLLM's splitting included."""

    @classmethod
    def read(cls, arguments: Iterable[str]) -> Request:
        """From ``key=value`` arguments. UserError for an unknown key or a value that cannot be."""
        given = given_keys(arguments, [f.name for f in fields(cls)])
        whole = {"prompt_tokens": 1, "new_tokens": 1, "batch": 1, "seed": 0, "limit_s": 1}
        values = read_values(given, ("checkpoint", "out", "work"), ("vram_bytes", "dram_bytes"), whole)
        return cls(**values, **read_names(given, "systems", SYSTEMS))


def run_one(job: Job, limit_s: float) -> Ended:
    """One system in a process of its own; its messages go to ``folder.log``. Never raises for what the system does."""
    job.scratch.mkdir(parents=True, exist_ok=True)
    beside = {kind: job.scratch.with_suffix(f".{kind}") for kind in ("job", "result", "log")}
    beside["result"].unlink(missing_ok=True)
    beside["job"].write_text(json.dumps(asdict(job)))
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "bench.peers.worker", str(beside["job"]), str(beside["result"])]
    try:
        with beside["log"].open("w") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end(process)
        if beside["result"].exists():
            return Ended(Measured(**json.loads(beside["result"].read_text())))
        said = last_line(beside["log"].read_text(errors="replace")) or "nothing"
        if status is None:
            return Ended(None, f"cut after {limit_s:g} s (limit_s); it had said: {said}")
        return Ended(None, said if status > 0 else f"killed by signal {-status}; it had said: {said}")
    finally:
        shutil.rmtree(job.scratch, ignore_errors=True)


def last_line(text: str) -> str:
    """The last line with something in it, as a terminal would show it: the end of a traceback, the latest state of a progress bar."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _end(process: subprocess.Popen) -> None:
    """End the process and what it started; harmless when it is over."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(GRACE_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def versions_of(systems: Iterable[str], where: dict[str, Any]) -> dict[str, str]:
    """Versions of what took part; takes those that ``where`` already names out of it."""
    versions = {name: where.pop(name) for name in ("python", "torch", "transformers") if name in where}
    versions["penstock"] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for package in dict.fromkeys(p for name in systems for p in SYSTEMS[name].packages):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def compare(request: Request) -> dict[str, Any]:
    """Run every system; the document that was written."""
    spec = spec_from_checkpoint(request.checkpoint)
    bench = Bench(request.work)
    profile = bench.probe()
    drawn = random_ids(request.batch, request.prompt_tokens, spec.vocab, request.seed)
    where = machine(profile)
    document: dict[str, Any] = {
        "machine": where,
        "versions": versions_of(request.systems, where),
        "work": _work(request, bool(profile["gpu"])),
    }
    ended: dict[str, Ended] = {}
    for name in request.systems:
        job = Job(
            system=name,
            checkpoint=str(request.checkpoint),
            prompts=drawn,
            new_tokens=request.new_tokens,
            vram_bytes=document["work"]["vram_bytes"],
            context_bytes=profile["gpu"]["context_bytes"] if profile["gpu"] else 0,
            dram_bytes=request.dram_bytes,
            folder=str(request.work / name),
            config_dir=bench.env["PENSTOCK_CONFIG_DIR"],
        )
        ended[name] = run_one(job, request.limit_s)
        row = make_rows(ended)[-1]
        print(f"{row.title}: {row.message or 'done'}", flush=True)
        ours = ended.get("penstock")
        document["limit_s_per_token"] = ours.measured.limit if ours and ours.measured else None
        document["rows"] = [asdict(row) for row in make_rows(ended)]
        request.out.parent.mkdir(parents=True, exist_ok=True)
        request.out.write_text(json.dumps(document, indent=1) + "\n")
    return document


def _work(request: Request, gpu: bool) -> dict[str, Any]:
    size = sum(f.stat().st_size for f in request.checkpoint.glob("*.safetensors"))
    keys = ("prompt_tokens", "new_tokens", "batch", "seed", "dram_bytes", "limit_s")
    work = {key: getattr(request, key) for key in keys}
    return {"checkpoint": request.checkpoint.name, "checkpoint_bytes": size, "vram_bytes": request.vram_bytes if gpu else 0, **work}


def present(document: Mapping[str, Any], json_path: Path) -> None:
    """The table, the picture where matplotlib is installed, and one JSON line."""
    rows = [Row(**row) for row in document["rows"]]
    caption = describe(document["machine"], document["versions"], document["work"])
    show(rows, caption)
    picture: Path | None = json_path.with_suffix(".png")
    try:
        draw(rows, caption, picture)
    except ImportError as error:
        print(f"no picture ({error}): draw it where matplotlib is, python bench/peers/run.py draw={json_path.name}")
        picture = None
    line = {row.system: {"decode_s": row.decode_s, "times_penstock": row.times_penstock, "message": row.message} for row in rows}
    print(json.dumps({"report": str(json_path), "picture": picture and str(picture), "systems": line}, separators=(",", ":")))


def main() -> None:
    arguments = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no worker outlives the command
    try:
        if arguments and arguments[0].startswith("draw="):
            path = Path(arguments[0].removeprefix("draw="))
            present(json.loads(path.read_text()), path)
        else:
            request = Request.read(arguments)
            present(compare(request), request.out)
    except UserError as error:
        print(f"peers: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
