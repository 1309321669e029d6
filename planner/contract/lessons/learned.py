"""A profile corrected by what runs on the machine found, and the sentence that says so."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

from penstock.planner.common.drive import drive_of
from penstock.planner.common.origins import BY_HAND
from penstock.planner.contract.given.figures import Figure
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.lessons.calibration import Calibration, Machine, calibration_path, geometry_of, read_calibration
from penstock.planner.contract.lessons.corrections import paths, slowed
from penstock.planner.contract.lessons.draft_lesson import DraftLesson
from penstock.planner.contract.lessons.spread import is_measured, spread_of_runs


def with_calibration(hardware: HardwareProfile, model: ModelSpec) -> tuple[HardwareProfile, tuple[str, ...]]:
    """``hardware`` as this machine's runs found it, and notes; unchanged, without a note, where there are none. UserError for a damaged
    file, a note for one of another machine.

    Of several runs the median counts, since a neighbour's load makes single ones several times slower. A model without a checkpoint is
    taken to lie on the drive of the last run.
    """
    path = calibration_path(hardware)
    known = read_calibration(path)
    if known is None or not known.runs:
        return hardware, ()
    if known.machine != Machine.of(hardware):
        return hardware, (f"{path} is ignored: it is of another machine ({known.machine}), not of this profile ({Machine.of(hardware)})",)
    drive = known.runs[-1].drive if model.checkpoint is None else drive_of(Path(model.checkpoint))
    logs = dict(_logs(known, hardware, model, drive))
    corrected = slowed(hardware, {figure: math.exp(median(xs)) for figure, xs in logs.items()})
    of_model = [run for run in known.runs if run.geometry == geometry_of(model)]
    fixed = {name: [s for run in of_model if (s := getattr(run, name)) is not None] for name in ("pass_s", "start_s")}
    corrected = replace(
        corrected,
        origin=hardware.origin | dict(_origins(hardware, logs)),
        spread=hardware.spread | {str(figure): spread_of_runs(figure, xs, is_measured(hardware, figure)) for figure, xs in logs.items()},
        **{name: median(values) for name, values in fixed.items() if values},
    )
    return corrected, tuple(_told(path, known, logs, len(of_model), drive))


def seen_drafts(hardware: HardwareProfile, model: ModelSpec) -> tuple[DraftLesson, ...]:
    """What runs of ``model`` on this machine taught of drafts. UserError for a damaged file."""
    known = read_calibration(calibration_path(hardware))
    return tuple(run.drafts for run in (known.runs if known else ()) if run.drafts is not None and run.model == model.name)


def _logs(known: Calibration, hardware: HardwareProfile, model: ModelSpec, drive: str) -> Iterator[tuple[Figure, list[float]]]:
    """Figure -> logarithms of its factors, of those that runs taught and nobody set."""
    for figure in Figure:
        by_hand = any(hardware.origin.get(path) == BY_HAND for path in paths(figure, hardware.gpu is not None))
        factors = known.found(hardware, figure, geometry_of(model), drive)
        if factors and not by_hand:
            yield figure, [math.log(factor) for factor in factors]


def _origins(hardware: HardwareProfile, logs: dict[Figure, list[float]]) -> Iterator[tuple[str, str]]:
    for figure, xs in logs.items():
        for path in paths(figure, hardware.gpu is not None):
            was = hardware.origin.get(path, "the profile's")
            yield path, f"measured by {len(xs)} {_runs(len(xs))}: {math.exp(median(xs)):.3g} times the seconds of what was {was}"


def _told(path: Path, known: Calibration, logs: dict[Figure, list[float]], of_model: int, drive: str) -> Iterator[str]:
    last, n = known.runs[-1], len(known.runs)
    factors = ", ".join(f"{figure} {math.exp(-median(xs)):.2f}" for figure, xs in logs.items())
    if factors:
        mine = "" if of_model == n else f", {of_model} of them of this model's geometry"
        yield (
            f"calibrated by {n} {_runs(n)} on this machine, the last on {last.when}{mine}: rates are {factors} of the profile's;"
            " calibration=off ignores them"
        )
    if not any(run.drive == drive for run in known.runs):
        yield f"{path} knows the SSD of {last.drive}, not the checkpoint's ({drive}): its rate is the profile's"


def _runs(n: int) -> str:
    return "run" if n == 1 else "runs"
