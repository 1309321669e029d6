"""A traced run's timeline is a valid Chrome trace that adds up to the report, and a picture."""

from __future__ import annotations

import importlib.util
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock.runtime.engine.sides.host_side
from penstock.planner.common.timeline.spans import (
    COMPUTE,
    EXPERTS,
    H2D,
    HOP,
    KV,
    PASS,
    SSD,
    Sample,
    Span,
    Timeline,
    chrome_trace,
    lanes,
    whole_reads,
)
from penstock.planner.common.timeline.spans import CPU as CPU_TRACK
from penstock.planner.common.timeline.timeline_picture import draw
from penstock.runtime.engine.engine import Engine
from penstock.runtime.engine.passes.generate import Batch
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.moving.ledger import SPANS_KEPT, Ledger
from penstock.runtime.reading.reader import ReadPool
from penstock.runtime.told.stage_clock import StageClock
from tests.runtime.running import Desk, desk
from tests.runtime.sessions import opened
from tests.support import HostCopier, decisions, plan_for, save_tiny

CPU = torch.device("cpu")
BATCH = Batch(prompts=[[5, 9, 200, 31, 7]], max_new_tokens=4, chunk_tokens=1 << 20)
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("llama"), layers=8)


@pytest.fixture
def small(checkpoint: Path, tmp_path: Path) -> Desk:
    return desk(tmp_path, plan_for(checkpoint, decisions(pages=16)))


def traced(trace: Path) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """Complete events by the name of their track, and the whole document."""
    document = json.loads(trace.read_text(encoding="utf-8"))
    events = document["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    tracks = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            tracks[names[e["tid"]]].append(e)
    return tracks, document


@contextmanager
def executed(checkpoint: Path, gpu: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine that has run ``BATCH`` and stopped, with its spans kept. Its SSD comes to be slow, so that there is something to wait
    for."""
    loaded = threading.Event()

    def slow(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if loaded.is_set():
            time.sleep(0.02)
        return os.preadv(fd, views, offset)

    monkeypatch.setattr(penstock.runtime.engine.sides.host_side, "ReadPool", partial(ReadPool, preadv=slow))
    plan = plan_for(checkpoint, decisions(gpu=gpu, resident=(2, 1, 0)), gpu)
    with opened(plan, checkpoint, HostCopier() if gpu else None, keep_spans=True) as session:
        session.load(BATCH)
        engine = session.engine
        loaded.set()
        session.generate(BATCH, Sampler(Sampling(), CPU))
        engine.stop()
        engine.pool.close()
        yield engine


def union_s(spans: list[Span]) -> float:
    total, until = 0.0, 0.0
    for s in sorted(spans, key=lambda s: s.start):
        total += max(0.0, s.end - max(s.start, until))
        until = max(until, s.end)
    return total


@pytest.mark.parametrize("gpu", [False, True])
def test_spans_add_up_to_the_stage_totals(checkpoint: Path, gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with executed(checkpoint, gpu, monkeypatch) as engine:
        totals, work = engine.stage_totals(), [s for s in engine.ledger.spans if not s.waits_for]
        kept = {stage: [s for s in work if s.track == stage] for stage in (COMPUTE, H2D)} | {SSD: [s for s in work if s.part_of]}
        assert set(totals) == {SSD, COMPUTE} | ({H2D} if gpu else set())
        for stage, (nbytes, busy_s) in totals.items():
            assert busy_s > 0 and (nbytes > 0) == (stage != COMPUTE)
            assert sum(s.nbytes for s in kept[stage]) == nbytes
            assert union_s(kept[stage]) == pytest.approx(busy_s, abs=1e-6)
        reads = whole_reads(engine.ledger.spans)
        assert sum(s.nbytes for s in reads) == totals[SSD][0]
        read = [i for i in range(8) if sum(s.name == f"layer {i}" for s in reads) > 2]
        assert read == sorted(set(engine.dram.layers) - engine._placement.resident_layers)


@pytest.mark.parametrize("gpu", [False, True])
def test_waits_lie_between_the_work_of_their_track_and_add_up(checkpoint: Path, gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with executed(checkpoint, gpu, monkeypatch) as engine:
        waits = [s for s in engine.ledger.spans if s.waits_for]
        assert {(s.track, s.waits_for) for s in waits} <= ({(COMPUTE, H2D), (H2D, SSD), (H2D, COMPUTE)} if gpu else {(COMPUTE, SSD)})
        assert (H2D if gpu else COMPUTE, SSD) in {(s.track, s.waits_for) for s in waits}
        assert not gpu or (COMPUTE, H2D) in {(s.track, s.waits_for) for s in waits}
        for stage, seconds in engine.ledger.waits().items():
            assert sum(s.end - s.start for s in waits if s.waits_for == stage) == pytest.approx(seconds)
        for wait in waits:
            work = [s for s in engine.ledger.spans if s.track == wait.track and not s.waits_for]
            assert all(s.end <= wait.start + 1e-9 or s.start >= wait.end - 1e-9 for s in work)


def test_without_tracing_nothing_is_kept(checkpoint: Path) -> None:
    with opened(plan_for(checkpoint, decisions()), checkpoint) as session:
        session.load(BATCH)
        session.generate(BATCH, Sampler(Sampling(), CPU))
        engine = session.engine
        assert engine.ledger.spans == [] and engine.ledger.dropped == 0
        assert engine.stage_totals()[COMPUTE][1] > 0


def test_a_run_writes_a_trace_whose_units_lie_in_passes(small: Desk, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    report = small.run(trace=str(trace), max_new_tokens=4, warmup_rounds=1)
    tracks, document = traced(trace)
    assert [e["name"] for e in tracks["passes"]] == ["prefill", "decode 1", "decode 2", "decode 3"]
    passes = [(e["ts"], e["ts"] + e["dur"]) for e in tracks["passes"]]
    units = [e for e in tracks["compute"] if e["cat"] == "compute"]
    assert units[0]["name"] == "attn.0" and len(units) >= 4 * (2 * 8 + 1), "more where units were waited for"
    for start, end in passes:
        inside = [e["name"] for e in units if start - 0.01 <= e["ts"] and e["ts"] + e["dur"] <= end + 0.01]
        assert [*dict.fromkeys(inside)] == [*(f"{kind}.{layer}" for layer in range(8) for kind in ("attn", "ffn")), "head.0"]
    busy_s = sum(report["stages"][phase]["compute"]["busy_s"] for phase in ("prefill", "decode"))
    assert sum(e["dur"] for e in units) / 1e6 == pytest.approx(busy_s, abs=1e-6 * len(units))
    assert min(e["ts"] for events in tracks.values() for e in events) == 0
    reads = [e for name, events in tracks.items() if name.startswith("SSD reads") for e in events]
    assert reads and all(e["name"].startswith("layer ") and e["args"]["bytes"] > 0 for e in reads)
    assert any(name.startswith("SSD reader") for name in tracks)
    assert document["otherData"]["spans_not_kept"] == 0


def test_no_two_events_of_a_track_overlap(small: Desk, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    small.run(trace=str(trace), max_new_tokens=4)
    tracks, _ = traced(trace)
    for events in tracks.values():
        ordered = sorted(events, key=lambda e: e["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] + 0.01 for a, b in zip(ordered, ordered[1:], strict=False))


def test_a_run_draws_a_picture(small: Desk, tmp_path: Path) -> None:
    small.run(trace=str(tmp_path / "trace.png"), max_new_tokens=3)
    assert (tmp_path / "trace.png").read_bytes().startswith(PNG)


def test_a_picture_of_three_tiers_and_one_of_nothing_are_drawn(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with executed(checkpoint, True, monkeypatch) as engine:
        three = engine.ledger.spans
    for name, spans in (("three", three), ("nothing", [])):
        draw(Timeline(spans, title=name), tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)


def test_a_trace_that_cannot_be_written_is_refused_before_the_model_is_read(small: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ".json" in small.refusal(trace="trace.svg") and ".png" in small.refusal(trace="trace.svg")
    assert "trace" in small.refusal(trace=str(small.out)), "the report goes there"
    assert "directory" in small.refusal(trace=str(small.plan / "below-a-file.json"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    line = small.refusal(trace=str(small.plan.with_name("trace.png")))
    assert "matplotlib" in line and "pip install matplotlib" in line


def test_the_report_says_what_was_waited_for(small: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    report = small.run(max_new_tokens=4)
    for phase in ("prefill", "decode"):
        assert set(report["waited"][phase]) == {"ssd", "compute"}
        assert all(0 <= share <= 1 for share in report["waited"][phase].values())
        assert report["waited"][phase]["compute"] == 0, "without a GPU nothing is booked as waiting for compute"
    assert "why_absent" in report["gpu"]
    assert "decode: bound by " in capsys.readouterr().out


def test_shares_are_waits_over_the_length_of_the_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    class Played:
        ledger = Ledger()

        def stage_totals(self) -> dict[str, tuple[int, float]]:
            return {"ssd": (0, 0.0), "compute": (0, 0.0)}

        track_totals = stage_totals

    now = iter([0.0, 10.0, 14.0, 15.0])
    monkeypatch.setattr("penstock.runtime.told.stage_clock.time.perf_counter", lambda: next(now))
    clock = StageClock(Played())
    Played.ledger.waited("compute", "ssd", "x", 1.0, 4.0)
    clock.book("prefill")
    Played.ledger.waited("compute", "ssd", "x", 11.0, 13.0)
    Played.ledger.waited("compute", "ssd", "x", 13.0, 13.0)
    clock.book("decode")
    clock.book("prefill")
    assert clock.waited("prefill") == {"ssd": pytest.approx(3 / 11), "compute": 0.0}
    assert clock.waited("decode") == {"ssd": pytest.approx(2 / 4), "compute": 0.0}
    assert clock.waited("load") == {}


def test_a_ledger_keeps_so_many_spans_and_counts_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.moving.ledger.SPANS_KEPT", 3)
    ledger = Ledger(keep_spans=True)
    for k in range(5):
        ledger.add("h2d", "u", k, k + 1, 10)
    assert (len(ledger.spans), ledger.dropped, ledger.totals()["h2d"].bytes) == (3, 2, 50) and SPANS_KEPT > 3


def test_the_cpu_beside_the_card_has_a_row_below_compute(tmp_path: Path) -> None:
    ledger = Ledger(keep_spans=True)
    for k in range(4):
        ledger.add("compute", f"attn.{k}", k, k + 0.4)
        ledger.add("cpu", f"ffn.{k}", k + 0.4, k + 1, 100)
        ledger.add("h2d", f"ffn.{k + 4}", k, k + 1, 50)
    ledger.waited("compute", "cpu", "ffn.0", 0.4, 1.0)
    timeline = Timeline(ledger.spans)
    events = chrome_trace(timeline)["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["compute", "CPU beside the card", "H2D copies"]
    assert ledger.totals()["cpu"].busy_s == pytest.approx(2.4)
    draw(timeline, tmp_path / "beside.png")
    assert (tmp_path / "beside.png").stat().st_size > 10_000


@pytest.mark.parametrize("waits_for", [EXPERTS, KV, H2D, SSD, CPU_TRACK, HOP])
def test_a_picture_shows_whatever_is_waited_for(waits_for: str, tmp_path: Path) -> None:
    """Simulated experts and spilled KV are waited for by names of their own."""
    spans = [Span(PASS, "prefill", 0, 2), Span(COMPUTE, "attn.0", 1, 2), Span(COMPUTE, "attn.0", 0, 1, 0, waits_for)]
    spans += [Span(EXPERTS, "expert.0.1", 0, 1, 10), Span(KV, "kv.0", 0.5, 1, 10), Span(KV, "kv.0", 0, 0.5, 0, COMPUTE)]
    draw(Timeline(spans), tmp_path / "waits.png")
    assert (tmp_path / "waits.png").read_bytes().startswith(PNG)


def test_overlapping_spans_are_dealt_out_to_as_few_lanes_as_it_takes() -> None:
    a, b, c, d = Span("x", "a", 0, 2), Span("x", "b", 1, 3), Span("x", "c", 2, 4), Span("x", "d", 3, 5)
    assert [[s.name for s in lane] for lane in lanes([d, c, b, a])] == [["a", "c"], ["b", "d"]]


def test_the_card_s_figures_are_counters() -> None:
    spans = [Span(PASS, "prefill", 10.0, 11.0)]
    events = chrome_trace(Timeline(spans, [Sample("power_w", 10.5, 300.0)]))["traceEvents"]
    assert [(e["name"], e["ts"], e["args"]) for e in events if e["ph"] == "C"] == [("power_w", 500000.0, {"value": 300.0})]


def test_all_spans_are_gone_through_a_few_times_however_many_they_are() -> None:
    class Counted(list[Span]):
        passes = 0

        def __iter__(self) -> Iterator[Span]:
            self.passes += 1
            return super().__iter__()

    def passes(spans: int) -> int:
        counted = Counted(Span(COMPUTE, f"attn.{k}", k, k + 1) for k in range(spans))
        events = chrome_trace(Timeline(counted, [Sample("power_w", 0.5, 300.0)]))["traceEvents"]
        assert sum(e["ph"] == "X" for e in events) == spans
        return counted.passes

    assert passes(500) == passes(5)
