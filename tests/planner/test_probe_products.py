"""What the CPU multiplies beside a card, as the probe asks the runtime for it."""

import json
import subprocess

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.contract.config.resolve_hardware import hardware_from, hardware_mapping
from penstock.planner.contract.given.formats import KNOWN_FORMATS, Dtype
from penstock.planner.probe import runtime_rates
from penstock.planner.probe.findings import CannotMeasure, Figure, Findings
from penstock.planner.probe.measure import _host
from penstock.planner.probe.profile_table import _figures
from tests.planner.test_presets import hardware

TOLD = {"threads": 12, "products": {"BF16": [[1, 70.0], [16, 60.0]], "INT4-128": [[1, 50.0]]}, "beside_h2d": 0.8, "h2d_beside": 0.9}
TOLD |= {
    "turned_bytes": 5_030_000_000,
    "attention_gbps": 66.0,
    "attention_beside_h2d": 0.6,
    "h2d_beside_attention": 0.7,
    "bus_gbps": 120.0,
    "format_threads": {"INT4-128": 14},
    "ahead_bytes": 1 << 20,
}
TOLD |= {"f16_products": {"INT4-128": [[1, 25.0], [8, 10.0]]}}


def answering(monkeypatch, told, code=0, stderr=""):
    asked = []

    def run(command, **_):
        asked.append(command)
        return subprocess.CompletedProcess(command, code, f"noise\n{json.dumps(told)}\n", stderr)

    monkeypatch.setattr(runtime_rates.subprocess, "run", run)
    return asked


def test_rates_by_format_threads_and_what_link_and_cpu_leave_each_other_become_the_profiles(monkeypatch):
    asked = answering(monkeypatch, TOLD)
    found = Findings("2026-11-22")
    for figure in runtime_rates.measure_products(4.0, 16, 0, 0.0):
        found.add(figure)
    assert "take turns over 5.03 GB" in found.origin["host.products"]
    assert asked[0][2:] == ["penstock.runtime.timed.host_product_times", "cores=16", "seconds=4.0", "gpu=0"]
    cfg = hardware("h200")
    cfg.host = _host(found)
    made = hardware_from(cfg).host
    assert (made.threads, made.beside_h2d, made.h2d_beside, made.most_rows(KNOWN_FORMATS["BF16"]), made.attention_gbps) == (
        12,
        0.8,
        0.9,
        16,
        66.0,
    )
    assert (made.attending.beside_h2d, made.attending.h2d_beside) == (0.6, 0.7)
    mapped = hardware_mapping(hardware_from(cfg))["host"]
    assert mapped["products"] == TOLD["products"] and mapped["format_threads"] == TOLD["format_threads"]
    assert mapped["f16_products"] == TOLD["f16_products"] and mapped["ahead_bytes"] == made.ahead_bytes == 1 << 20
    halves = made.computing(Dtype.float16)
    assert [halves.most_rows(KNOWN_FORMATS[name]) for name in ("INT4-128-asym", "BF16")] == [8, 0] and made.computing(
        Dtype.bfloat16
    ) is made
    plain, int4, gptq = (KNOWN_FORMATS[name] for name in ("BF16", "INT4-64", "GPTQ4-128"))
    assert [made.threads_of(one) for one in ([plain], [int4], [plain, int4], [gptq], [])] == [12, 14, 14, 12, 12]
    cfg.host.format_threads = {"INT4-128": 0}
    with pytest.raises(UserError, match="hardware.host.format_threads.INT4-128=0: must be 1 or more; `planner probe` finds"):
        hardware_from(cfg)
    cfg.host.format_threads = {"INT5": 4}
    with pytest.raises(UserError, match="hardware.host.format_threads.INT5"):
        hardware_from(cfg)
    cfg.host = _host(found)
    shown = dict(_figures(cfg))
    assert shown["host.products"].splitlines()[0] == "BF16 70.0 GB/s of 1 row, 60.0 GB/s of 16 rows" and shown["host.beside_h2d"] == "80%"
    assert shown["host.threads"] == "12; 14 for INT4-128"
    assert (shown["host.attention_beside_h2d"], shown["host.h2d_beside_attention"]) == ("60%", "70%")
    cfg.host.attention_beside_h2d = cfg.host.h2d_beside_attention = 0.0
    unknown = hardware_from(cfg).host
    assert (unknown.attending.beside_h2d, unknown.attending.h2d_beside) == (0.8, 0.9)


@pytest.mark.parametrize(("read", "bus"), [(100.0, 120.0), (0.0, 120.0), (130.0, 130.0)])
def test_the_bus_has_what_products_and_copies_moved_where_plain_reads_got_less(read, bus, monkeypatch):
    answering(monkeypatch, TOLD)
    found = Findings("2026-11-26")
    found.add(Figure("dram.bus_gbps", read, "reads"))
    assert found.attempt(runtime_rates.PRODUCTS, lambda: runtime_rates.measure_products(4.0, 16, 0, read))
    assert found.number("dram.bus_gbps") == bus and ("plain reads got" in found.how("dram.bus_gbps")) == (bus > read)


def test_without_compiled_products_the_profile_says_why_and_the_card_computes_everything(monkeypatch):
    answering(monkeypatch, {"unbuilt": "products are not compiled here"})
    found = Findings("2026-11-22")
    assert not found.attempt(runtime_rates.PRODUCTS, lambda: runtime_rates.measure_products(4.0, 16, 0, 0.0))
    assert "products are not compiled here" in found.origin["host.products"] and _host(found) is None
    answering(monkeypatch, {}, 1, "Traceback\nValueError: no")
    with pytest.raises(CannotMeasure, match="timing the CPU's products failed: ValueError: no"):
        list(runtime_rates.measure_products(4.0, 16, 0, 0.0))
