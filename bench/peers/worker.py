"""One system in a process of its own: `python -m bench.peers.worker JOB.json RESULT.json`. What goes wrong ends stderr, on one line."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

from bench.peers.peer import SYSTEMS, Job


def main() -> None:
    job_file, result_file = map(Path, sys.argv[1:])
    job = Job(**json.loads(job_file.read_text()))
    try:
        measured = importlib.import_module(f"bench.peers.{SYSTEMS[job.system].module}").measure(job)
    except Exception as error:  # whatever a peer raises becomes its message in the table
        traceback.print_exc()
        print(f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    partial = result_file.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(measured)))
    os.replace(partial, result_file)


if __name__ == "__main__":
    main()
