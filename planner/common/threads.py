"""How compute threads wait for each other."""

from __future__ import annotations

import os


def wait_asleep() -> None:
    """Let OpenMP's threads sleep while they wait instead of spinning. Call before torch is imported; a user's own setting stays.

    A spinning thread takes the core from the one that it waits for as soon as anything else runs, such as the reader of weights: with one
    busy neighbour on two cores, a decode step of the demo's geometry took 276 ms spinning and 146 ms asleep. With none it takes 82 ms
    spinning and 125 to 139 asleep, since waking costs some 80 µs: not for a model that lies in DRAM as a whole.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
