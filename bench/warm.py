"""Runs a tree's programs in forks of one process that has imported torch and transformers, so that no run has to: 16 to 19 s on some hosts.

As a program it reads a JSON line a run from its input: program, arguments, and the files for what it prints. It answers each with its exit
status. Nothing here is the tree's own: the tree comes by PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

IMPORTS = ("torch", "transformers.models.llama.modeling_llama")
"""What a run imports that takes long. CUDA is not initialised by it, or a fork could not use the card."""


class Warm:
    """Runs programs of the tree that ``env`` finds, each in a process of its own whose imports are done. ``packages``: program -> the
    module that has its ``main``."""

    def __init__(self, packages: Mapping[str, str], env: Mapping[str, str], cwd: Path):
        command = [sys.executable, "-P", str(Path(__file__).resolve()), json.dumps(dict(packages))]
        self._process = subprocess.Popen(command, env=dict(env), cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, program: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """As ``subprocess.run``. RuntimeError where the process that forks has died."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with TemporaryDirectory() as directory:
            out, err = Path(directory) / "out", Path(directory) / "err"
            asked = {"program": program, "arguments": list(arguments), "out": str(out), "err": str(err)}
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            if not (answer := self._process.stdout.readline()):
                raise RuntimeError(f"the process that forks ended with {self._process.wait()}")
            return subprocess.CompletedProcess(list(arguments), int(answer), out.read_text(), err.read_text())

    def close(self) -> None:
        self._process.communicate()


def serve(packages: Mapping[str, str]) -> None:
    """Answer until the input ends; a fork leaves by SystemExit."""
    for name in (*IMPORTS, *packages.values()):
        import_module(name)
    assert threading.active_count() == 1, "an import started a thread: a fork would lack it"  # OpenBLAS's own survive a fork
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        asked = json.loads(line)
        if not (child := os.fork()):
            _redirect(0, "/dev/null", os.O_RDONLY)
            for number, name in ((1, "out"), (2, "err")):
                _redirect(number, asked[name], os.O_WRONLY | os.O_CREAT)
            sys.argv = [asked["program"], *asked["arguments"]]
            sys.exit(import_module(packages[asked["program"]]).main())
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


def _redirect(number: int, path: str, flags: int) -> None:
    opened = os.open(path, flags, 0o600)
    os.dup2(opened, number)
    os.close(opened)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
