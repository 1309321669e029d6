"""What other programs took while a run was measured."""

from __future__ import annotations

from penstock.planner.common.outside.machine_load import Ticks
from penstock.runtime.told.others_load import OthersLoad


def test_a_run_tells_what_others_took_of_the_machine_meanwhile() -> None:
    begun = Ticks(100.0, 1000.0, 50.0, 7.0)
    others = OthersLoad.between(begun, Ticks(110.0, 1065.0, 95.0, 12.0), 8)
    assert others == OthersLoad(8, 2.0, 0.5, 10.0)
    assert others.note == (
        "others used 2.0 of 8 cores while the run was measured, 0.5 of them lent to other virtual machines: alone it may be faster"
    )
    alone = OthersLoad.between(begun, Ticks(110.0, 1048.0, 95.0, 7.0), 8)
    assert alone is not None and alone.note is None, "0.3 of 8 are little"
    moment = OthersLoad.between(begun, Ticks(101.0, 1008.0, 50.0, 7.0), 8)
    assert moment is not None and moment.used == 8 and moment.note is None
    assert OthersLoad.between(None, begun, 8) is OthersLoad.between(begun, begun, 8) is None
