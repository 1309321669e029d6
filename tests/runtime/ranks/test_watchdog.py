"""What the watchdog says of a rank whose process and socket are seen to end one after the other."""

import json
import os
import select
import signal
import socket
import sys

import pytest

from penstock.runtime.company import watchdog

RANK = "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.sendall(b'rank 1\\n'); time.sleep(60)"


def test_a_process_that_is_seen_to_end_before_its_socket_is_named_with_how(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(watchdog, "say", said.append)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "dog"))
        listening.listen()
        command = {"argv": [sys.executable, "-c", RANK, str(tmp_path / "dog")], "env": {"RANK": "1"}}
        dog = watchdog.Watchdog(listening, [json.dumps(command)])
        (child,) = dog._children.values()
        try:
            assert select.select([listening], [], [], 30)[0]
            dog._accept()
            (one,) = dog._ranks.values()
            dog._hear(one)
            os.kill(child.pid, signal.SIGKILL)
            assert select.select([one.sock], [], [], 30)[0]
            child.wait(30)
            dog._reap()
            dog._hear(one)
        finally:
            child.kill()
            child.wait()
    assert said == [f"runtime: rank 1 (process {child.pid}) was killed by SIGKILL; all ranks have ended"]
