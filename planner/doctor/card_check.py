"""The GPU, its driver, and whether the libraries that run on it fit."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.planner.common.cgroup import read_text
from penstock.planner.common.measures import show_bytes
from penstock.planner.common.outside.installed import installed_version
from penstock.planner.doctor.finding import Finding, Verdict
from penstock.planner.probe.driver import Driver, NvmlGpu, nvml_driver, nvml_gpus
from penstock.planner.probe.findings import CannotMeasure

NVIDIA, DISPLAY = "0x10de", "0x03"
"""PCI vendor, and the class of cards that draw or compute."""
NEEDED = ("torch", "transformers", "safetensors")
"""Without these nothing runs; `planner` itself needs none of them."""
USED_SHARE = 0.05
"""More of a card's memory in use by others than this is worth a word."""


@dataclass(frozen=True)
class Card:
    """What NVML says: its driver and its cards; ``refused`` is why it says nothing."""

    driver: Driver | None
    gpus: Mapping[str, NvmlGpu]
    refused: str = ""


def look() -> Card:
    """Ask NVML."""
    try:
        return Card(nvml_driver(), nvml_gpus())
    except CannotMeasure as error:
        return Card(None, {}, str(error))


def card_findings(card: Card, root: Path = Path("/")) -> Iterator[Finding]:
    """Libraries, driver, and each card."""
    versions = {name: installed_version(name) for name in NEEDED}
    absent = [name for name, found in versions.items() if found is None]
    found = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    if absent:
        yield Finding("libraries", found or "none", Verdict.stops, f"pip install {' '.join(absent)}: `runtime run` needs them")
    else:
        yield Finding("libraries", found, Verdict.good)
    yield _driver(card, torch_cuda(), len(cards_on_the_bus(root)))
    for gpu in card.gpus.values():
        yield _memory(gpu)


def cards_on_the_bus(root: Path) -> list[Path]:
    """Directories of the NVIDIA cards that the PCI bus lists, driver or not."""
    devices = (root / "sys/bus/pci/devices").glob("*")
    return [d for d in devices if (read_text(d / "vendor") or "").strip() == NVIDIA and (read_text(d / "class") or "").startswith(DISPLAY)]


def torch_cuda() -> tuple[int, int] | None:
    """The CUDA version that torch was built for; None for a build without. Reads its version file, since importing it takes seconds."""
    spec = importlib.util.find_spec("torch")
    text = read_text(Path(spec.origin).parent / "version.py") if spec and spec.origin else None
    match = re.search(r"^cuda\b.*=\s*'(\d+)\.(\d+)", text or "", re.MULTILINE)
    return (int(match.group(1)), int(match.group(2))) if match else None


def _driver(card: Card, built: tuple[int, int] | None, listed: int) -> Finding:
    if card.driver is None or not card.gpus:
        if not listed:
            return Finding("driver", "no NVIDIA card: the CPU computes, from DRAM", Verdict.good)
        change = "install NVIDIA's driver, or give the container the card (docker run --gpus all): without it the CPU computes"
        found = f"{listed} NVIDIA card{'s' * (listed > 1)}, no driver ({card.refused or 'no card given'})"
        return Finding("driver", found, Verdict.fair, change)
    cuda = card.driver.cuda
    found = f"{card.driver.version}, CUDA {cuda[0]}.{cuda[1]}"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Finding("driver", f"{found}, all cards hidden", Verdict.fair, "unset CUDA_VISIBLE_DEVICES: without a card the CPU computes")
    if built is None:
        return Finding("driver", f"{found}, torch without CUDA", Verdict.fair, "install torch for CUDA: this one uses no card")
    if cuda[0] < built[0]:
        change = f"update the driver, or install torch for CUDA {cuda[0]}: this one is for {built[0]}.{built[1]} and starts on no card"
        return Finding("driver", found, Verdict.stops, change)
    return Finding("driver", f"{found}; torch for CUDA {built[0]}.{built[1]}", Verdict.good)


def _memory(gpu: NvmlGpu) -> Finding:
    found = f"{show_bytes(gpu.used_bytes)} of {show_bytes(gpu.total_bytes)} in use, {gpu.pcie}"
    if gpu.used_bytes > USED_SHARE * gpu.total_bytes:
        return Finding(gpu.name, found, Verdict.fair, "end what uses it: each GB in VRAM is read over no link")
    return Finding(gpu.name, found, Verdict.good)
