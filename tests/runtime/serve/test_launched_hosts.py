"""A server and a conversation on two hosts, whose ranks a launcher started: processes as torchrun starts them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.cli import HANGS_S, ROOT, command
from tests.runtime.serve.test_serve_verb import CODE, serving, wait_ready

MACHINE = "hardware=cpu", "hardware.cpu.cores=1", "hardware.hosts=2", "hardware.network.gbps=1.25", "ranks=2"
WORK = "workload=serve", "workload.clients=2", "workload.prompt_tokens=32", "workload.new_tokens=16", "workload.context_tokens=0"

TALK = "workload.prompt_tokens=32", "workload.new_tokens=16", "workload.context_tokens=256"


def ports() -> tuple[int, int]:
    """One that is free, and the one behind it, by which hosts meet."""
    while True:
        with ExitStack() as stack:
            first, behind = (stack.enter_context(socket.socket()) for _ in range(2))
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                behind.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port, port + 1


def seat(rank: int, port: int) -> dict[str, str]:
    """What torchrun has in the environment of one rank on each of two hosts, and what a user sets for hosts."""
    whose = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "PENSTOCK_SECRET": "a secret of sixteen"}
    return os.environ | whose | where | {"PYTHONPATH": str(ROOT)}


@contextmanager
def served(desk: Path, *typed: str) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str], str]]:
    """Rank 0's process, rank 1's, and the address, once it is ready."""
    port, _ = ports()
    program = [sys.executable, "-c", CODE, "serve", "port=0", *typed]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(program, cwd=desk, env=seat(rank, port), **pipes) for rank in range(2)]  # type: ignore[call-overload]
    try:
        line = ranks[0].stderr.readline()
        assert "listening on " in line, line
        url = line.partition("listening on ")[2].partition(";")[0]
        wait_ready(url)
        yield ranks[0], ranks[1], url
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def plan(desk: Path) -> str:
    done = command("planner", "solve", *MACHINE, "model=hf", "model.checkpoint=model", *WORK, "out=hosts.yaml", cwd=desk)
    assert done.returncode == 0, done.stderr
    return "plan=hosts.yaml"


def reply(url: str) -> list[float]:
    """The logarithms of the probabilities of what is said."""
    asked = {"model": "hf", "prompt": "hello", "max_tokens": 6, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    model = json.load(urllib.request.urlopen(f"{url}/v1/models"))["data"][0]["id"]
    body = json.dumps(asked | {"model": model}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    found: list[float] = json.load(urllib.request.urlopen(request, timeout=HANGS_S))["choices"][0]["logprobs"]["token_logprobs"]
    return found


def test_two_hosts_serve_what_one_does_and_drain_by_the_launchers_signal(desk: Path, plan: str) -> None:
    with served(desk, plan) as (front, other, url):
        both = reply(url)
        children = psutil.Process(front.pid).children(recursive=True)
        for process in (front, other):  # a launcher sends it to all
            process.send_signal(signal.SIGTERM)
        said = front.communicate(timeout=HANGS_S)
        assert other.wait(HANGS_S) == 0 and "Traceback" not in said[1]
        assert "served 1 request" in said[1] and json.loads(said[0].splitlines()[-1])["totals"]["requests"] == 1
        assert not psutil.wait_procs(children, HANGS_S)[1]
    alone = command("planner", "solve", "hardware=cpu", "ranks=1", "model=hf", "model.checkpoint=model", *WORK, "out=one.yaml", cwd=desk)
    assert alone.returncode == 0, alone.stderr
    with serving(desk, plan="one.yaml") as (_, url):
        assert reply(url) == pytest.approx(both, abs=1e-4)


def test_a_host_that_is_lost_ends_the_server_which_says_so_and_starts_no_engine_anew(desk: Path, plan: str) -> None:
    with served(desk, plan) as (front, other, _):
        children = psutil.Process(front.pid).children(recursive=True)
        other.kill()
        _, complaint = front.communicate(timeout=HANGS_S)
        assert front.returncode == 2 and "(rank 1) was lost" in complaint and "started anew" not in complaint
        assert complaint.splitlines()[-1].endswith("its ranks were started by a launcher: start all of them again")
        assert not psutil.wait_procs(children, HANGS_S)[1]


def test_two_hosts_chat_until_standard_input_ends(desk: Path) -> None:
    done = command("planner", "solve", *MACHINE, "model=hf", "model.checkpoint=model", *TALK, "out=talk.yaml", cwd=desk)
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
