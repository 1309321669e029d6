"""What a launcher says of a process: whatever cannot be is one line, before torch is imported."""

from __future__ import annotations

import pytest

from penstock.planner.common.errors import UserError
from penstock.runtime.company.company import Seat, seat_of_environment

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch):
    """The seat of a process in which torchrun's variables are changed so; None leaves one out."""

    def seat(**changed: str | None) -> Seat | None:
        for name, value in (TORCHRUN | changed).items():
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
        return seat_of_environment()

    return seat


def test_a_launched_process_has_a_seat_and_another_has_none(launched) -> None:
    assert launched() == Seat(1, 4, 1, 2)
    assert launched(RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR=None) == Seat(0, 1, 1, 1)
    assert launched(RANK=None) is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"RANK": "²"}, "RANK=²: must be a number, as torchrun sets it; unset RANK and WORLD_SIZE"),
        ({"RANK": "4"}, "RANK=4: must be less than WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3: each host must have as many of WORLD_SIZE=4 ranks; give torchrun the same"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5: each host must have as many"),
        ({"MASTER_ADDR": None}, "RANK and WORLD_SIZE are set, and MASTER_ADDR is not: torchrun sets all of them; unset RANK"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is not"),
    ],
)
def test_what_cannot_be_is_one_line(changed, said, launched) -> None:
    with pytest.raises(UserError, match=said):
        launched(**changed)
