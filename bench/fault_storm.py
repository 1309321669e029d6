"""Thousands of requests of clients of all kinds (bench/serve_storm.py): each is judged, and what the server holds is looked at."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from statistics import median

from bench.cases import Row
from bench.fault_rig import FaultRig, descriptors, left_under_way, resident_mb
from bench.serve_storm import Storm, Weather

SETTLED_S = 3.0
FLAT = 0.02
FROM = 2000
"""The request from which on memory is flat, of 10,000."""


class Storms:
    """Case `storm`."""

    def __init__(self, rig: FaultRig):
        self.rig = rig

    def storm(self) -> Iterator[Row]:
        requests, clients = int(self.rig.given.get("requests", "10000")), int(self.rig.given.get("clients", "64"))
        with self.rig.server("storm", "limits.connections_per_address=4096") as server:
            name, known = self.rig.known(server)
            pids = [server.pid, *server.children()]
            asyncio.run(Weather(server.address, name, known, 1).blow(2 * clients, clients, lambda: {}, 1 << 30))
            time.sleep(SETTLED_S)
            files = {pid: descriptors(pid) for pid in pids}
            begun = time.perf_counter()
            weather = Weather(server.address, name, known)
            found = asyncio.run(
                weather.blow(requests, clients, lambda: {str(pid): resident_mb(pid) for pid in pids}, max(1, requests // 200))
            )
            seconds = time.perf_counter() - begun
            wrong = self.rig.judged(server, name, known) + asyncio.run(left_under_way(server))
            time.sleep(SETTLED_S)
            left = [f"{what}: {descriptors(pid)} descriptors for {files[pid]}" for what, pid in zip(("front", "engine"), pids, strict=True)
                    if descriptors(pid) > files[pid]]  # fmt: skip
        said = ", ".join(f"{count} {what}" for what, count in found.ended.most_common())
        yield self.rig.row("storm: replies", f"{clients} clients, {seconds:.0f} s; {said}", found.wrong + wrong, requests)
        yield self.rig.row("storm: descriptors left", "of front and engine", left, requests)
        for what, pid in zip(("front", "engine"), pids, strict=True):
            yield memory_row(what, found, str(pid), requests)


def memory_row(what: str, storm: Storm, pid: str, requests: int) -> Row:
    """What a process held at the end over what it held behind the first fifth, medians of a tenth of the samples: a long text that is being
    read is no growth."""
    from_, samples = FROM * requests // 10_000, [(number, look[pid]) for number, look in storm.samples]
    behind = [mb for number, mb in sorted(samples) if number >= from_]
    tenth = max(1, len(behind) // 10)
    first, last = median(behind[:tenth]), median(behind[-tenth:])
    halfway = median(behind[len(behind) // 2 :][:tenth])
    said = f"MB at the end, over those at request {from_}; {halfway:.1f} halfway, {max(behind):.0f} at most"
    return Row(f"storm: memory of the {what}", said, last, first, "MB", last / first, f"<= {1 + FLAT}", None, 0, 0)
