"""What the links to all cards give, each alone and all at once, and what a hop takes beside them: measured by the ranks of a run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import torch

from penstock.runtime.engine.link_limits import link_gbps
from penstock.runtime.engine.session import Session

ROUNDS = 200
"""Round trips of a hidden state."""


def measure_links(session: Session) -> dict[str, Any]:
    """On rank 0, with all others: GB/s of each rank's link while only it copies, and while all do; seconds of a hop of one token's hidden
    state, the median, while all do. Overwrites what lies in VRAM: after the end."""
    rank = session.rank
    assert rank is not None and rank.leading is not None, "rank 0 measures with the others"
    session.engine.stop()
    alone = []
    for number in range(rank.count):
        if number == 0:
            rank.leading.links(number)
            alone.append(link_gbps(session.engine))
        else:
            alone.append(rank.leading.links(number)[number - 1]["h2d_gbps"])
    with ThreadPoolExecutor(1) as thread:
        own = thread.submit(link_gbps, session.engine)
        together = [each["h2d_gbps"] for each in rank.leading.links(None)]
        together.insert(0, own.result())
    nbytes = hidden_bytes(session)
    rank.leading.round_trips(nbytes, ROUNDS)
    with ThreadPoolExecutor(1) as thread:
        busy = thread.submit(link_gbps, session.engine)
        trips = rank.hops.round_trips(nbytes, ROUNDS)
        busy.result()
    return {"alone_gbps": alone, "together_gbps": together, "hop_s": median(trips) / rank.count, "hop_bytes": nbytes}


def led_links(session: Session, alone: int | None) -> dict[str, Any]:
    """The part of a rank that is led."""
    session.engine.stop()
    mine = session.rank is not None and alone in (None, session.rank.number)
    return {"h2d_gbps": link_gbps(session.engine) if mine else None}


def led_round_trips(session: Session, nbytes: int, rounds: int) -> None:
    """The same of hops, while this rank's link is busy."""
    rank = session.rank
    assert rank is not None, "a rank is led"
    with ThreadPoolExecutor(1) as thread, torch.inference_mode():
        busy = thread.submit(link_gbps, session.engine)
        rank.hops.round_trips(nbytes, rounds)
        busy.result()


def hidden_bytes(session: Session) -> int:
    """Of one token's hidden state."""
    return session.plan.model.hidden * session.plan.model.compute_dtype.nbytes
