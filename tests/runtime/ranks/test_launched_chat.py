"""A conversation with a model on two hosts, whose ranks a launcher started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.cli import HANGS_S, command
from tests.runtime.serve.conftest import desk, exact_checkpoint  # noqa: F401
from tests.runtime.serve.test_launched_servers import CODE, MACHINE, ports, seat

WORK = "workload.prompt_tokens=32", "workload.new_tokens=16", "workload.context_tokens=256"


def test_two_hosts_chat_until_standard_input_ends(desk: Path) -> None:  # noqa: F811
    done = command("planner", "solve", *MACHINE, "model=hf", "model.checkpoint=model", *WORK, "out=talk.yaml", cwd=desk)
    assert done.returncode == 0, done.stderr
    port, _ = ports()
    program = [sys.executable, "-c", CODE, "chat", "plan=talk.yaml", "temperature=0", "max_new_tokens=6"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(program, cwd=desk, env=seat(rank, port), **pipes) for rank in range(2)]  # type: ignore[call-overload]
    try:
        said, complaint = ranks[0].communicate("hello\nagain\n", timeout=HANGS_S)
        assert ranks[0].returncode == 0, complaint
        assert json.loads(said.splitlines()[-1])["turns"] == 2
        assert ranks[1].communicate(timeout=HANGS_S)[0] == "" and ranks[1].returncode == 0
    finally:
        for process in ranks:
            process.kill()
            process.wait()
