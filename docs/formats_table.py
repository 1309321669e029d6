"""Writes the table of docs/formats.md, and its shorter form in README.md: bytes a weight, tokens/s as planned and as measured.

    python docs/formats_table.py

A plan for each format, model and machine: a chat of 512 and 128 tokens, batch 1, the layers' weights in the format, the tables in BF16.
What was measured comes from bench/results. Takes a minute or two.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from penstock.planner.common.strictly import build  # noqa: E402
from penstock.planner.contract.bills.cost import predict  # noqa: E402
from penstock.planner.contract.config.config_schema import HardwareConfig, ModelConfig, WorkloadConfig  # noqa: E402
from penstock.planner.contract.config.resolve import model_from, workload_from  # noqa: E402
from penstock.planner.contract.config.resolve_hardware import hardware_from  # noqa: E402
from penstock.planner.contract.given.formats import KNOWN_FORMATS, Format  # noqa: E402
from penstock.planner.contract.given.hardware import HardwareProfile  # noqa: E402
from penstock.planner.contract.given.model import ModelSpec  # noqa: E402
from penstock.planner.solver.infeasible import Infeasible  # noqa: E402
from penstock.planner.solver.program import solve  # noqa: E402

MACHINES = {"rtx5080": "RTX 5080", "rtx3060": "RTX 3060", "cpu": "CPU"}
MODELS = {"8B": "llama8b", "70B": "llama70b"}
FORMATS = ("BF16", "lossless", "FP8", "Q8_0", "INT8-row", "Q6_K", "Q5_K", "Q4_K", "NVFP4", "MXFP4", "INT4-128")
SHORT = ("BF16", "lossless", "FP8", "Q4_K", "MXFP4", "INT4-128")
"""Of README.md."""
RESIDENT = ROOT / "bench" / "results" / "h200" / "formats-resident.json"
"""Steps of 8B, all of it in VRAM, with BF16's of the same process beside them."""
WIDE = 4096
WORK = workload_from(WorkloadConfig(name="chat", prompt_tokens=512, new_tokens=128))
BEGIN, END = "<!-- made by docs/formats_table.py -->", "<!-- end -->"
NONE = "–"


class Column(NamedTuple):
    """Tokens/s of one model on one machine."""

    size: str
    machine: str

    @property
    def title(self) -> str:
        return f"{self.size}, {MACHINES[self.machine]}"


COLUMNS = tuple(Column(size, machine) for machine in MACHINES for size in MODELS)


def preset(kind: str, name: str) -> dict[str, object]:
    text = (ROOT / "conf" / kind / f"{name}.yaml").read_text(encoding="utf-8")
    return {key: value for key, value in yaml.safe_load(text).items() if key != "defaults"}


def machine(name: str) -> HardwareProfile:
    return hardware_from(build(HardwareConfig, preset("hardware", name), "hardware"))


def model(name: str) -> ModelSpec:
    return model_from(build(ModelConfig, preset("model", name), "model"))


def tokens_per_s(form: Format, column: Column) -> str:
    """As planned; a dash where no plan fits."""
    hardware, stored = machine(column.machine), model(MODELS[column.size]).stored_as(form)
    try:
        made = solve(hardware, stored, WORK)
    except Infeasible:
        return NONE
    return f"{predict(hardware, stored, WORK, made).decode_tokens_per_s:.3g}"


def measured(results: Path = RESIDENT) -> tuple[str, Mapping[str, str]]:
    """The column's title, and format -> tokens/s of 8B in VRAM. The limit of a row is BF16's seconds in the same process."""
    document = json.loads(results.read_text(encoding="utf-8"))
    rows = {row["case"]: row for row in document["rows"]}
    int4, fp8 = rows["int4 resident, wall"], rows["fp8 resident, wall"]
    seconds = {"BF16": int4["limit"], "FP8": fp8["result"], "INT4-128": int4["result"]}
    card, date = document["machine"]["gpu"].removeprefix("NVIDIA "), document["machine"]["date"]
    return f"8B in VRAM, {card}, measured {date}", {name: f"{1 / s:.3g}" for name, s in seconds.items()}


def as_stored(form: Format) -> str:
    """Who multiplies how many rows by it without decoding it first."""
    if not form.needs_scratch:
        return "card, CPU"
    said = [f"{who} to {rows}" for who, rows in (("card", form.product_rows), ("CPU", form.host_rows)) if rows]
    return ", ".join(said) or "decoded first"


def lines(names: Sequence[str], columns: Sequence[Column], planned: Mapping[tuple[str, Column], str]) -> Iterator[str]:
    """The table of the formats ``names``."""
    title, seen = measured()
    heads = ["format", "bytes a weight", "rows multiplied as stored", *(column.title for column in columns), title]
    yield "| " + " | ".join(heads) + " |"
    yield "|---" * len(heads) + "|"
    for name in names:
        form = KNOWN_FORMATS[name]
        size = f"{form.stored_bytes(WIDE, WIDE) / WIDE**2:.3g}"
        yield "| " + " | ".join([name, size, as_stored(form), *(planned[name, c] for c in columns), seen.get(name, NONE)]) + " |"


def placed(page: str, table: Iterator[str]) -> str:
    """``page`` with the table between its marks."""
    head, _, rest = page.partition(f"{BEGIN}\n")
    _, _, tail = rest.partition(END)
    return head + "\n".join([BEGIN, "", *table, "", END]) + tail


def main() -> None:
    planned = {(name, column): tokens_per_s(KNOWN_FORMATS[name], column) for name in FORMATS for column in COLUMNS}
    for path, names, columns in ((ROOT / "docs" / "formats.md", FORMATS, COLUMNS), (ROOT / "README.md", SHORT, COLUMNS[:2])):
        page = path.read_text(encoding="utf-8")
        path.write_text(placed(page, lines(names, columns, planned)), encoding="utf-8")


if __name__ == "__main__":
    main()
