"""Several links at once, by how much page-locked memory the copies of each rank come from: `planner probe` reads little, a run its arena.

    python bench/links_read.py devices=0,1 gib=1,4,16,1 out=ranks-read.json    # a minute
    python bench/links_read.py devices=cpu,cpu gib=1                           # without cards it runs

One process a card each time, as `planner probe` has them (`runtime/timed/rank_times.py`). A row for each number of links: what they carry
together, over the sum of each alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cases import Row, run_cases  # noqa: E402
from bench.host_products import bare_machine  # noqa: E402
from bench.keys import given_of, told_keys  # noqa: E402

KEYS = ("devices", "gib", "out")


def rows(devices: str, gib: str) -> Iterator[Row]:
    """Of one start of the processes, whose copies come from ``gib`` GiB each."""
    command = [sys.executable, "-m", "penstock.runtime.timed.rank_times", f"devices={devices}", f"read_gib={gib}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"links of {devices}: {done.stderr[-1000:]}")
    told = json.loads(done.stdout)
    for count, gbps in told["together"]:
        alone = sum(told["alone"][:count])
        what = f"out of {gib} GiB a rank"
        yield Row(f"{count} links at once", what, gbps, alone, "GB/s", gbps / alone, "", None, 0, int(gib) * count * 2**30 / 1e9)


def main() -> None:
    given = given_of(sys.argv[1:], KEYS)
    devices = given.get("devices", "0,1")
    cases = {f"{number}": partial(rows, devices, gib) for number, gib in enumerate(given.get("gib", "1,4,16,1").split(","))}
    run_cases(cases, bare_machine() | {"keys": told_keys(given)}, Path(given["out"]) if "out" in given else None)


if __name__ == "__main__":
    main()
