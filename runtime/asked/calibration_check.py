"""Whether what a run measures of its machine could be kept, without torch."""

from __future__ import annotations

from penstock.planner.common.errors import UserError
from penstock.planner.contract.lessons.calibration import Machine, calibration_path, check_writable, read_calibration
from penstock.planner.contract.plan.plan import Plan


def check_calibration(plan: Plan) -> None:
    """UserError, before anything is loaded, where the calibration could not be written or is of another machine."""
    path = calibration_path(plan.hardware)
    check_writable(path)
    known, mine = read_calibration(path), Machine.of(plan.hardware)
    if known is not None and known.machine != mine:
        raise UserError(f"calibrate=true: {path} is of another machine ({known.machine}), the plan's is {mine}; move that file away")
