"""Plans from Python: solved as `planner solve` does, or read from a file. Imports neither torch nor transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.resources import files

from penstock.planner.cli import PROGRAM
from penstock.planner.common.errors import UserError
from penstock.planner.common.user_folder import user_path
from penstock.planner.contract.checkpoint.checkpoint_files import CONFIG
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import read_plan
from penstock.planner.solver.planning import make_plan

Value = str | int | float | bool | None | Sequence[str | int | float]
"""What a key is set to: sizes as text with a unit ("6GiB") or as a number of bytes; None leaves the choice to the program."""


def solve(
    model: str | os.PathLike[str] | None = None,
    hardware: str | None = None,
    *,
    workload: str | None = None,
    vram: Value = None,
    dram: Value = None,
    overrides: Sequence[str] = (),
    **keys: Value,
) -> Plan:
    """The best plan for a model on a machine, by the same configuration and the same program as `planner solve`.

    ``model`` is a checkpoint's directory or a preset ("llama8b"); ``hardware`` a preset or "local", what `planner probe` measured of this
    machine, which is also the default where it exists. ``workload`` is a preset, "chat" by default. ``vram`` and ``dram`` take the place
    of the machine's capacities: bytes, or text such as "6GiB". Every other key of `planner solve --help` goes by its name,
    ``**{"workload.batch": 4}``, or as it is typed, ``overrides=["workload.batch=4"]``.

    ``plan.prediction`` has the figures: seconds of a prefill and of a step, tokens a second, bytes of each tier. Takes about a second and
    writes nothing. Raises UserError, one line, for a value that cannot be and where no plan fits: what is short by how many GB, and what
    mends it. Not for several threads at once.
    """
    sizes = {f"hardware.{tier}_bytes": size for tier, size in (("vram", vram), ("dram", dram)) if size is not None}
    groups = {"hardware": hardware, **_model(model), "workload": workload}
    given = {key: value for key, value in groups.items() if value is not None} | sizes
    return make_plan(PROGRAM.configuration("solve", typed(given | keys, overrides)))


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan of a file that `planner solve` wrote, edited by hand or not. Raises UserError where it cannot be read or breaks a rule."""
    return read_plan(user_path(path_text("plan", path)))


def typed(keys: Mapping[str, Value], overrides: Sequence[str] = ()) -> list[str]:
    """``keys`` as they are typed on a command line, and ``overrides`` after them."""
    if isinstance(overrides, str) or not all(isinstance(word, str) for word in overrides):
        raise UserError(f"overrides={overrides!r}: must be a list of texts, such as ['workload.batch=4']; give one")
    return [*(f"{key}={_text(key, value)}" for key, value in keys.items()), *overrides]


def path_text(key: str, path: str | os.PathLike[str]) -> str:
    """``path`` as text. UserError naming ``key`` where it is empty, or no path at all."""
    if not isinstance(path, str | os.PathLike) or not (text := os.fspath(path)):
        raise UserError(f"{key}={path!r}: must be a path, as text or of pathlib; give one")
    return text


def _model(model: str | os.PathLike[str] | None) -> dict[str, str | None]:
    if model is None or (isinstance(model, str) and _is_preset(model)):
        return {"model": model}
    return {"model": "hf", "model.checkpoint": path_text("model", model)}


def _is_preset(text: str) -> bool:
    """Whether it can name no directory and no GGUF file. Of a directory that is called as a preset and holds no config.json the preset is
    meant: `make demo` leaves one."""
    if os.sep in text or text.lower().endswith(".gguf"):
        return False
    directory = user_path(text)
    known = (files("penstock.conf") / "model" / f"{text}.yaml").is_file()
    return not directory.is_dir() or (known and not (directory / CONFIG).exists())


def _text(key: str, value: Value) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, Sequence):
        return f"[{','.join(_text(key, each) for each in value)}]"
    raise UserError(f"{key}={value!r}: must be text, a number, true, false, None or a list of them")
