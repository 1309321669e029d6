"""How compute threads wait for each other."""

from __future__ import annotations

import os


def wait_asleep() -> None:
    """Let OpenMP's threads sleep while they wait instead of spinning. Call before torch is imported; a user's own setting stays.

    A spinning thread takes the core that the reader of weights needs. A decode step of the demo's geometry on two cores takes 276 ms
    spinning and 146 ms asleep beside one busy neighbour. Alone it takes 82 ms spinning and 125 to 139 asleep, since a wake-up costs some 80
    µs. So a model that lies in DRAM as a whole spins.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
