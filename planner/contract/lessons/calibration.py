"""What runs measured on this machine, as a file beside its profile: a list of runs, from which everything else is computed.

Links are the machine's; compute, and what each pass and start takes beyond its stages, are of one geometry of model. A run's figures are
absolute rates, so a profile that is measured again is corrected by as much as it still lacks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from penstock.planner.common.errors import UserError
from penstock.planner.common.output import write_at_once
from penstock.planner.common.outside.plain_files import read_plain
from penstock.planner.common.outside.strict_yaml import YamlFlaw, load_strictly
from penstock.planner.common.strictly import build
from penstock.planner.common.user_folder import profile_dir
from penstock.planner.contract.decided.speculating import MOST_STEP_S
from penstock.planner.contract.given.figures import Figure
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.lessons.corrections import slowed
from penstock.planner.contract.lessons.draft_lesson import DraftLesson
from penstock.planner.contract.lessons.fit import Fitted

FORMAT = 1
KEPT_RUNS = 20
"""The newest are kept."""
LONG = 0.5
"""Share of what the longest run read, below which a run does not teach the SSD's rate: drives give more for half a minute than for
several."""
_KEY = "penstock_calibration"
_HEAD = """\
# What `runtime run calibrate=true` measured on this machine; `planner solve` goes by it. Rates are those at the profile's best size of
# block or copy, in GB/s with GB = 1e9. Delete a run, or the file, and it is forgotten.
"""


@dataclass(frozen=True)
class Machine:
    """Which machine a calibration is of, by what its profile says."""

    hardware: str
    gpu: str | None
    cpu_cores: int

    @classmethod
    def of(cls, hardware: HardwareProfile) -> Machine:
        return cls(hardware.name, hardware.gpu.name if hardware.gpu else None, hardware.cpu_cores)

    def __str__(self) -> str:
        return f"{self.hardware}, {self.gpu or 'no GPU'}, {self.cpu_cores} cores"


@dataclass(frozen=True)
class CalibratingRun:
    """What one run found; None where it could not tell."""

    when: str
    model: str
    geometry: str
    """See ``geometry_of``."""
    drive: str
    """See ``penstock.planner.common.drive``."""
    ssd_gbps: float | None = None
    ssd_read_gb: float | None = None
    """From the drive in the whole run."""
    h2d_gbps: float | None = None
    d2h_gbps: float | None = None
    dram_copy_gbps: float | None = None
    pin_s_per_gb: float | None = None
    weights_gbps: float | None = None
    """At which a decode step reads weights; the seconds to issue a layer go with it."""
    products_tflops: float | None = None
    """Matrix products of a prefill; attention's rate goes with it."""
    pass_s: float | None = None
    start_s: float | None = None
    drafts: DraftLesson | None = None


OF_MODEL = (Figure.weights, Figure.products)
_FIELDS = {
    Figure.ssd: "ssd_gbps",
    Figure.h2d: "h2d_gbps",
    Figure.d2h: "d2h_gbps",
    Figure.dram_copy: "dram_copy_gbps",
    Figure.page_lock: "pin_s_per_gb",
    Figure.weights: "weights_gbps",
    Figure.products: "products_tflops",
}


def profile_figure(hardware: HardwareProfile, figure: Figure) -> float:
    """What ``hardware`` says of ``figure``, in the unit of a ``CalibratingRun``; 0 where it says nothing."""
    gpu = hardware.gpu
    said = {
        Figure.ssd: max(point.gbps for point in hardware.ssd_read),
        Figure.h2d: gpu.h2d.peak if gpu else 0.0,
        Figure.d2h: gpu.d2h.peak if gpu else 0.0,
        Figure.dram_copy: hardware.dram_copy_gbps,
        Figure.page_lock: hardware.pin_s_per_gb,
        Figure.weights: hardware.weight_gbps,
        Figure.products: hardware.dense_tflops,
    }
    return said[figure]


@dataclass(frozen=True)
class Calibration:
    """A file's content; the oldest run first."""

    machine: Machine
    runs: tuple[CalibratingRun, ...] = ()

    def found(self, hardware: HardwareProfile, figure: Figure, geometry: str, drive: str) -> list[float]:
        """Factors of the seconds of ``figure`` over those of ``hardware``, one for each run that teaches it. A figure of models is taught
        by runs of this geometry. The SSD is taught by runs on this drive that read ``LONG`` enough."""
        said = profile_figure(hardware, figure)
        runs = [run for run in self.runs if figure not in OF_MODEL or run.geometry == geometry]
        if figure is Figure.ssd:
            runs = _long(run for run in self.runs if run.drive == drive and run.ssd_gbps is not None)
        values = (getattr(run, _FIELDS[figure]) for run in runs)
        told = [value for value in values if value is not None and said]
        return [value / said if figure is Figure.page_lock else said / value for value in told]

    def with_run(self, run: CalibratingRun) -> Calibration:
        return replace(self, runs=(*self.runs, run)[-KEPT_RUNS:])


def _long(runs: Iterable[CalibratingRun]) -> list[CalibratingRun]:
    read = [(run, run.ssd_read_gb or 0.0) for run in runs]
    most = max((gb for _, gb in read), default=0.0)
    return [run for run, gb in read if gb >= LONG * most]


def geometry_of(model: ModelSpec) -> str:
    """Digest of what decides a model's compute: its sizes, not its weights or name."""
    values = (
        model.attn_bytes, model.ffn_bytes, model.lm_head_bytes, model.hidden, model.attn_width, model.kv_width, model.ffn_width,
        model.compute_dtype.nbytes, model.routed,
    )  # fmt: skip
    return hashlib.sha256(repr(values).encode()).hexdigest()[:12]


def run_of(hardware: HardwareProfile, model: ModelSpec, fitted: Fitted, when: str, drive: str, read_gb: float) -> CalibratingRun:
    """``fitted``, which was found against ``hardware``, as absolute figures."""
    machine = slowed(hardware, fitted.slow)
    figures: dict[str, Any] = {_FIELDS[figure]: profile_figure(machine, figure) for figure in fitted.slow}
    rest: dict[str, Any] = {"ssd_read_gb": read_gb or None, "pass_s": fitted.pass_s, "start_s": fitted.start_s}
    return CalibratingRun(when, model.name, geometry_of(model), drive, **figures, **rest)


def calibration_path(hardware: HardwareProfile) -> Path:
    """``calibrations/NAME.yaml`` beside the directory of the profiles, NAME being the profile's. Not ``calibration``: a directory with a
    key's name would be taken for its choices."""
    name = "".join(c if c.isalnum() or c in "._-" else "_" for c in hardware.name)
    return profile_dir() / "calibrations" / f"{name}.yaml"


def read_calibration(path: Path) -> Calibration | None:
    """None where there is no such file. UserError for one that is damaged or of another format."""
    try:
        data = load_strictly(read_plain(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: the calibration cannot be read ({error.strerror}); {_REMEDY}") from error
    except YamlFlaw as error:
        raise UserError(f"{path}: the calibration is {error}; {_REMEDY}") from error
    if not isinstance(data, Mapping) or data.get(_KEY) != FORMAT:
        raise UserError(f"{path}: not a calibration of format {FORMAT}; {_REMEDY}")
    try:
        return _calibration_from({key: value for key, value in data.items() if key != _KEY})
    except UserError as error:
        raise UserError(f"{path}: {error}; {_REMEDY}") from error


_REMEDY = "correct or delete it, or set calibration=off"


def _calibration_from(data: Mapping[str, Any]) -> Calibration:
    known = build(Calibration, {**data, "runs": data.get("runs") or []}, "calibration")
    for i, run in enumerate(known.runs):
        for f in dataclasses.fields(run):
            value = getattr(run, f.name)
            least = 0 if f.name in ("pass_s", "start_s") else None
            if isinstance(value, float) and not (0 < value < float("inf") or value == least):
                raise UserError(f"runs[{i}].{f.name}={value}: must be above 0")
        step_s = None if run.drafts is None else run.drafts.step_s
        if step_s is not None and not 0 < step_s <= MOST_STEP_S:
            raise UserError(f"runs[{i}].drafts.step_s={step_s}: must be above 0, at most {MOST_STEP_S:g}")
    return known


def write_calibration(path: Path, calibration: Calibration) -> None:
    """At once or not at all. UserError where it cannot be written."""
    document = {_KEY: FORMAT, "machine": dataclasses.asdict(calibration.machine), "runs": [_row(run) for run in calibration.runs]}
    text = _HEAD + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=2**31 - 1)
    try:
        write_at_once(path, "calibration", lambda temporary: temporary.write_text(text, encoding="utf-8"))
    except UserError as error:
        raise UserError(f"cannot write the calibration {path}; set PENSTOCK_CONFIG_DIR to a directory of yours with room") from error


def _row(run: CalibratingRun) -> dict[str, Any]:
    values = dataclasses.asdict(run)
    values["drafts"] = run.drafts and {key: list(value) if isinstance(value, tuple) else value for key, value in vars(run.drafts).items()}
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in values.items() if value is not None}


def check_writable(path: Path) -> None:
    """UserError where a calibration could not be written to ``path``."""
    place = next(parent for parent in path.absolute().parents if parent.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"cannot write the calibration {path}; set PENSTOCK_CONFIG_DIR to a directory of yours with room")
