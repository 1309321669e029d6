"""Prints the table of docs/formats.md: bytes a weight, and tokens/s of 8B and 70B on three preset machines, as planned.

    python docs/formats_table.py

A plan for each format, model and machine: a chat of 512 and 128 tokens, batch 1, the layers' weights in the format, the tables in BF16.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from penstock.planner.common.strictly import build  # noqa: E402
from penstock.planner.contract.config.config_schema import HardwareConfig, ModelConfig, WorkloadConfig  # noqa: E402
from penstock.planner.contract.config.resolve import hardware_from, model_from, workload_from  # noqa: E402
from penstock.planner.contract.given.formats import KNOWN_FORMATS  # noqa: E402
from penstock.planner.contract.given.hardware import HardwareProfile  # noqa: E402
from penstock.planner.contract.given.model import ModelSpec  # noqa: E402
from penstock.planner.contract.prices.cost import predict  # noqa: E402
from penstock.planner.solver.infeasible import Infeasible  # noqa: E402
from penstock.planner.solver.program import solve  # noqa: E402

MACHINES = {"rtx5080": "RTX 5080", "rtx3060": "RTX 3060", "cpu": "CPU"}
MODELS = ("llama8b", "llama70b")
FORMATS = ("BF16", "lossless", "FP8", "Q8_0", "INT8-row", "Q6_K", "Q5_K", "Q4_K", "NVFP4", "MXFP4", "INT4-128")
"""Those of them that are known are shown."""
WIDE = 4096
WORK = workload_from(WorkloadConfig(name="chat", prompt_tokens=512, new_tokens=128))


def preset(kind: str, name: str) -> dict[str, object]:
    text = (ROOT / "conf" / kind / f"{name}.yaml").read_text(encoding="utf-8")
    return {key: value for key, value in yaml.safe_load(text).items() if key != "defaults"}


def tokens_per_s(hardware: HardwareProfile, model: ModelSpec) -> str:
    try:
        made = solve(hardware, model, WORK)
    except Infeasible:
        return "–"
    return f"{predict(hardware, model, WORK, made).decode_tokens_per_s:.3g}"


def rows() -> Iterator[str]:
    machines = {name: hardware_from(build(HardwareConfig, preset("hardware", name), "hardware")) for name in MACHINES}
    models = [model_from(build(ModelConfig, preset("model", name), "model")) for name in MODELS]
    titles = [f"{size}, {shown}" for shown in MACHINES.values() for size in ("8B", "70B")]
    yield "| format | bytes a weight | " + " | ".join(titles) + " |"
    yield "|---" * (len(titles) + 2) + "|"
    for name in FORMATS:
        form = KNOWN_FORMATS.get(name)
        if form is None:
            continue
        found = [tokens_per_s(machine, model.stored_as(form)) for machine in machines.values() for model in models]
        yield f"| {name} | {form.stored_bytes(WIDE, WIDE) / WIDE**2:.3g} | " + " | ".join(found) + " |"


if __name__ == "__main__":
    for row in rows():
        print(row, flush=True)
