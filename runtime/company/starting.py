"""How the processes of a plan come to be: started by the first of them, or by a launcher such as torchrun."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import penstock
from penstock.planner.common.errors import UserError
from penstock.planner.common.interrupt import uninterrupted
from penstock.runtime.company.cards_here import VISIBLE, shown_as
from penstock.runtime.company.company import Company, Seat, seat_of_environment
from penstock.runtime.company.heart import Heart
from penstock.runtime.company.host_claims import HostClaims
from penstock.runtime.company.interface import NAMED, NAMED_FOR_CARDS, named_address
from penstock.runtime.company.meeting_hosts import meet_by_environment

HEART = "PENSTOCK_WATCHDOG"
"""In the environment of a rank that the watchdog started: the name of its socket."""
LED = "penstock.runtime.led.rank_process"
"""What such a rank runs."""
LOOPBACK = "127.0.0.1"
ON_ONE_HOST = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
NCCL = {
    "NCCL_MAX_NCHANNELS": "2",
    "NCCL_MAX_P2P_NCHANNELS": "2",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_BUFFSIZE": str(1 << 20),
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
}
"""A hop is small: few channels take little VRAM, and few multiprocessors while they wait. Between two H100s 16 KiB take 48 microseconds by
2 channels and by 4; 16 MiB 363 and 276. Two channels with buffers of 1 MiB take 252 MiB of VRAM less than four with 4 MiB. torch
warns of sends that wait for each other in one group; each way here has a group of its own."""
QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""Of a card's streams. Where two share one, a stream that waits for a hop holds up the other one, by which that hop's answer may go."""
CARDS = NCCL | QUEUES
"""What a process of a rank has in its environment before it opens its card."""
_BACKLOG = 1024


def enter(seat: Seat, claims: Callable[[], HostClaims] | None = None) -> Company:
    """The company that ``seat`` is in, met by the launcher's address. Where it is on several hosts, the first rank of each holds its
    ``claims`` against rank 0's before. UserError where they differ, where a host has no secret, or names no network interface."""
    hosts, line = seat.hosts > 1, None
    if hosts:
        named_address()
        os.environ.setdefault(NAMED_FOR_CARDS, os.environ[NAMED])
        if seat.local == 0:
            assert claims is not None, "hosts say what they have"
            line = meet_by_environment(claims())
    if HEART not in os.environ:
        os.environ[VISIBLE] = shown_as(seat.local)  # no thread makes a context on another card by mistake
    for name, value in (CARDS if hosts else CARDS | ON_ONE_HOST).items():
        os.environ.setdefault(name, value)
    if HEART in os.environ:
        return Company(seat, Heart(os.environ[HEART], seat.rank))
    company = Company(seat, None, line)
    company.join()
    company.heart = _meet_watchdog(seat)
    if line is not None:
        line.attach(company.heart)
    return company


def start(count: int, cards: Sequence[int] = ()) -> Company:
    """This process becomes rank 0 of ``count`` on this host; a watchdog starts the others, which import torch meanwhile. Each of those sees
    its own of ``cards`` alone, of which there may be more, by default the one of its number. UserError where a launcher started this
    process."""
    if seat_of_environment() is not None:
        raise UserError(
            "RANK and WORLD_SIZE are set, as torchrun sets them: `runtime run`, `chat` and `serve` join ranks that a launcher started;"
            " start this alone, and it starts its ranks"
        )
    cards = (cards or range(count))[:count]
    name = _socket_name()
    with socket.socket() as free, _listening(name) as listening, uninterrupted():
        free.bind((LOOPBACK, 0))
        address = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free.getsockname()[1])}
        here = str(Path(penstock.__file__).resolve().parent.parent)
        path = {"PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))}
        shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), **address, HEART: name}
        env = {k: v for k, v in (CARDS | ON_ONE_HOST).items() if k not in os.environ} | shared
        own = [{"RANK": str(rank), "LOCAL_RANK": str(rank), VISIBLE: shown_as(card)} for rank, card in enumerate(cards)]
        ranks = [env | path | each for each in own[1:]]
        commands = [json.dumps({"argv": [sys.executable, "-m", LED], "env": of_rank}) for of_rank in ranks]
        os.environ.update({key: value for key, value in env.items() if key not in (HEART, "WORLD_SIZE", "LOCAL_WORLD_SIZE")})
        heart = Heart(name, 0)
        _watch(listening, commands)
    return Company(Seat(0, count), heart)


def _meet_watchdog(seat: Seat) -> Heart:
    """The first rank of each host starts its watchdog, and tells the others where it listens."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    key = f"penstock watchdog {seat.rank // (seat.on_host or seat.count)}"
    if seat.local:
        return Heart(store.get(key).decode(), seat.rank)
    name = _socket_name()
    with _listening(name) as listening, uninterrupted():
        heart = Heart(name, seat.rank)
        _watch(listening, [])
    store.set(key, name)
    return heart


def _socket_name() -> str:
    """In the abstract namespace: nothing of it is left behind, however its processes end."""
    return f"penstock-{secrets.token_hex(16)}"


def _listening(name: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind("\0" + name)
    listening.listen(_BACKLOG)
    return listening


def _watch(listening: socket.socket, commands: list[str]) -> None:
    """Start the watchdog. Nobody waits for it: it ends when all ranks have."""
    command = [sys.executable, "-S", str(Path(__file__).with_name("watchdog.py")), str(listening.fileno()), *commands]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(listening.fileno(),))
