"""A small sample of bench/serve_faults.py: clients of all kinds at a server in processes of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from bench.clients import model_name
from bench.fault_rig import descriptors, left_under_way
from bench.known import known_replies
from bench.serve_rig import Server
from bench.serve_storm import KINDS, Weather
from bench.smuggled import said_to, smuggling

CLEAR = 1e-4
"""Between two logprobs in float32."""
REQUESTS, CLIENTS = 84, 12


def _settled(pids: Sequence[int], most: Sequence[int] = (), within_s: float = 20.0) -> list[int]:
    """Descriptors of each process, once they were the same for half a second and no more than ``most``: a server closes a connection some
    time after its client did."""
    end, found, same = time.monotonic() + within_s, [descriptors(pid) for pid in pids], 0
    while same < 5 and time.monotonic() < end:
        time.sleep(0.1)
        before, found = found, [descriptors(pid) for pid in pids]
        small = all(now <= limit for now, limit in zip(found, most, strict=False))
        same = same + 1 if found == before and small else 0
    return found


def test_each_of_many_clients_gets_its_own_reply_and_nothing_is_left_of_them(desk: Path, tmp_path: Path) -> None:
    with Server(tmp_path / "serve.log", f"plan={desk / 'plan.yaml'}") as server:
        name = asyncio.run(model_name(server.address))
        known = asyncio.run(known_replies(server.address, name, 4, tokens=8, length=6, least_gap=CLEAR))
        (engine,) = server.children()
        before = _settled((server.pid, engine))
        storm = asyncio.run(Weather(server.address, name, known).blow(REQUESTS, CLIENTS, dict, 40))
        assert storm.wrong == [] and set(storm.asked) == set(KINDS) and storm.ended["answered"] > REQUESTS / 2
        assert asyncio.run(left_under_way(server)) == []
        statuses = {what: asyncio.run(said_to(server.address, sent)) for what, sent in smuggling(name).items()}
        assert all(said in ([], [400], [501]) for said in statuses.values()), statuses
        assert _settled((server.pid, engine), before) == before
        assert server.stop() == 0 and server.report is not None
