"""`runtime bench` measures every mode that can be on a machine, and says of the others why not."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.common.strictly import build
from penstock.planner.contract.config.config_schema import ForceConfig, HardwareConfig, ModelConfig, SolveConfig, WorkloadConfig
from penstock.planner.contract.config.resolve import workload_mapping
from penstock.planner.contract.config.resolve_hardware import hardware_mapping
from penstock.planner.contract.experts.expert_slots import fewest_slots
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.memory_law import dram_use
from penstock.planner.solver.planning import make_plan
from penstock.runtime.asked.run_schema import BenchConfig, EngineConfig, RunConfig
from penstock.runtime.tools import modes
from penstock.runtime.tools.bench import _command, bench
from penstock.runtime.tools.modes import MODES, NotHere, Setting, read_setting
from penstock.runtime.tools.solving import NoPlan, solve
from tests.cli import command, refusal
from tests.support import machine, save_tiny, workload

LAYERS = 8
SEEDS_KEYS = {
    "batch_size",
    "max_new_tokens",
    "prompt_lens",
    "prefill_tokens_total",
    "decode_tokens_total",
    "prefill_ms",
    "first_token_decode_ms",
    "ttft_ms",
    "decode_ms",
    "e2e_ms",
    "throughput_tok_s",
    "end_to_end_tok_s",
    "io_bw_MBps",
    "gpu_mem_GB",
    "mode",
    "device",
    "wsm",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "a model=tiny", layers=LAYERS)


@pytest.fixture
def asked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner is asked in this process, which takes a tenth of the time."""
    monkeypatch.setattr(modes, "solve", make_plan)


def configured(hardware: HardwareProfile, checkpoint: Path, **force: object) -> SolveConfig:
    return SolveConfig(
        hardware=build(HardwareConfig, hardware_mapping(hardware), "hardware"),
        model=ModelConfig(name="hf", checkpoint=str(checkpoint)),
        workload=build(WorkloadConfig, dict(workload_mapping(workload(new_tokens=4))), "workload"),
        force=ForceConfig(**force),
    )


def setting(checkpoint: Path, gpu: bool, **force: object) -> Setting:
    return read_setting(configured(machine(gpu), checkpoint, **force))


def where(plan: Plan) -> tuple[int, int, int]:
    """Layers in VRAM, kept in DRAM, read from the SSD."""
    p = plan.placement
    return plan.model.layers - len(p.dram_layers), len(p.resident_layers), len(p.ssd_layers)


def test_without_a_gpu_weights_are_in_dram_or_on_the_ssd(checkpoint: Path, asked_here: None) -> None:
    here = setting(checkpoint, gpu=False)
    assert where(MODES["full"](here)) == (0, LAYERS, 0)
    assert where(MODES["mixed"](here)) == (0, LAYERS // 2, LAYERS // 2)
    for mode in ("preload", "stream"):
        with pytest.raises(NotHere, match="the same as full"):
            MODES[mode](here)


def test_with_a_gpu_each_mode_uses_one_tier_more(checkpoint: Path, asked_here: None) -> None:
    here = setting(checkpoint, gpu=True)
    full, stream, mixed = (MODES[mode](here) for mode in ("full", "stream", "mixed"))
    assert where(full) == (LAYERS, 0, 0) and not full.placement.streamed_units
    assert where(stream) == (0, LAYERS, 0) and "vram" not in stream.placement.head
    assert where(mixed) == (LAYERS // 2, 0, LAYERS // 2) and mixed.placement.ssd_bytes_per_pass > 0
    with pytest.raises(NotHere, match="everything fits in VRAM"):
        MODES["preload"](here)


def test_experts_are_where_the_mode_says(tmp_path: Path, asked_here: None) -> None:
    experts = save_tiny(tmp_path / "moe", "mixtral", layers=LAYERS)
    here = setting(experts, gpu=True)
    slots = {mode: MODES[mode](here).decisions.experts for mode in ("full", "stream", "mixed")}
    units = here.model.experts.units
    assert slots["full"].vram_slots == units and slots["mixed"].dram_slots == units // 2
    assert (slots["stream"].vram_slots, slots["stream"].dram_slots) == (fewest_slots(here.model.experts), units)
    vram_bytes = MODES["full"](here).prediction.vram_bytes - here.model.experts.nbytes // 2
    small = machine(True, vram_bytes=vram_bytes, layer_launch_s=1e-6)  # copies of such small experts would hide behind launches
    kept = MODES["preload"](read_setting(configured(small, experts))).decisions.experts
    assert fewest_slots(here.model.experts) < kept.vram_slots < units and kept.dram_slots == units
    assert MODES["full"](setting(experts, gpu=False)).decisions.experts.dram_slots == units


def test_preload_keeps_in_vram_what_fits_and_the_rest_in_dram(checkpoint: Path, asked_here: None) -> None:
    roomy = read_setting(configured(machine(True), checkpoint))
    spare = MODES["full"](roomy).prediction.vram_bytes - roomy.model.weight_bytes // 2
    small = machine(True, vram_bytes=spare + workload().vram_guard_bytes)
    here = read_setting(configured(small, checkpoint))
    vram, dram, ssd = where(MODES["preload"](here))
    assert 0 < vram < LAYERS and dram == LAYERS - vram and ssd == 0
    with pytest.raises(UserError, match="VRAM is short by"):
        MODES["full"](here)


def test_a_mode_that_lacks_dram_says_by_how_much_and_mixed_is_the_solvers_own_plan(checkpoint: Path, asked_here: None) -> None:
    here = setting(checkpoint, gpu=False)
    least = MODES["mixed"](here)
    tight = replace(machine(), dram_bytes=sum(dram_use(machine(), here.model, workload(new_tokens=4), least.decisions).values()))
    here = read_setting(configured(tight, checkpoint))
    with pytest.raises(UserError, match="DRAM is short by"):
        MODES["full"](here)
    assert MODES["mixed"](here) == here.best and where(here.best)[2] > 0


def test_a_mode_that_contradicts_a_forced_decision_is_not_run(checkpoint: Path, asked_here: None) -> None:
    with pytest.raises(NotHere, match="force.cap_layers=2 contradicts it: it needs 8"):
        MODES["full"](setting(checkpoint, gpu=False, cap_layers=2))


def test_the_planner_is_asked_as_a_user_asks_it(checkpoint: Path) -> None:
    asked = configured(machine(True), checkpoint, cap_layers=2)
    assert solve(asked) == make_plan(asked)
    asked = configured(machine(True, vram_bytes=1 << 16), checkpoint)
    with pytest.raises(NoPlan, match=r"^no plan fits: VRAM is short by [\d.]+ GB \(allowed: hardware\.vram_bytes=[^;]*\)$"):
        solve(asked)


def test_the_modes_that_can_be_are_run_and_told(
    checkpoint: Path, tmp_path: Path, asked_here: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first in a process of its own, as all are; the next one in this process, which has torch."""
    own = iter([subprocess.run])

    def run(line: list[str], env: dict[str, str], **words: bool) -> subprocess.CompletedProcess[str]:
        for process in own:
            return process(line, env=env, **words)
        with mock.patch.dict(os.environ, env, clear=True):
            return command("runtime", *line[line.index("run") :], cwd=tmp_path)

    monkeypatch.setattr("penstock.runtime.tools.bench.subprocess", SimpleNamespace(run=run))
    monkeypatch.setenv("WSM_CPU_CACHE_CAP_LAYERS", "1")
    out, solve = tmp_path / "bench.json", configured(machine(), checkpoint)
    bench(BenchConfig(solve.hardware, solve.model, solve.workload, solve.force, modes=["full", "stream", "mixed"], rounds=2, out=str(out)))
    document = json.loads(out.read_text(encoding="utf-8"))
    modes = document["modes"]
    assert list(modes) == ["full", "stream", "mixed"] and modes["stream"]["why_not"]
    for mode in ("full", "mixed"):
        assert set(modes[mode]) >= SEEDS_KEYS and modes[mode]["mode"] == mode
        assert modes[mode]["decode_tokens_total"] == 4 and modes[mode]["batches"] == 2
    assert modes["full"]["stages"]["decode"]["ssd"]["bytes"] == 0 < modes["mixed"]["stages"]["decode"]["ssd"]["bytes"]
    assert modes["mixed"]["io_bw_MBps"]["weight_ssd_MBps"] > 0
    assert (document["rounds"], document["warmup_rounds"], document["machine"]["gpu"]) == (2, 1, None)
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[1:5]] == ["mode", "full", "stream", "mixed"]
    assert "the same as full" in said[3]
    line = json.loads(said[-1])
    assert line["bench"] == str(out) and set(line["modes"]) == set(modes)
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


def test_nothing_is_written_when_no_mode_can_run(checkpoint: Path, tmp_path: Path) -> None:
    solve = configured(machine(), checkpoint)
    with pytest.raises(UserError, match="no mode could run here"):
        bench(BenchConfig(solve.hardware, solve.model, solve.workload, solve.force, modes=["stream"], out=str(tmp_path / "bench.json")))
    assert list(tmp_path.iterdir()) == []


def test_mistakes_are_told_before_anything_is_run(checkpoint: Path, tmp_path: Path, asked_here: None) -> None:
    given = ["bench", "hardware=cpu", "model=hf", f"model.checkpoint={checkpoint}"]
    assert "modes=steam" in refusal("runtime", *given, "modes=[steam]", cwd=tmp_path)
    assert "checkpoint=DIR" in refusal("runtime", "bench", "hardware=cpu", "model=llama8b", cwd=tmp_path)
    assert "rounds=0" in refusal("runtime", *given, "modes=[full]", "rounds=0", cwd=tmp_path)
    assert "out=" in refusal("runtime", *given, f"out={tmp_path}", cwd=tmp_path)
    assert "prompt" in refusal("runtime", *given, "modes=[full]", "prompt=a", "prompts=b", cwd=tmp_path)


def test_a_mode_is_run_with_the_engine_s_keys_that_differ_from_their_defaults() -> None:
    command = _command(RunConfig(plan="p.yaml", engine=EngineConfig(balance_units=None, warmup_layers=0)))
    assert command[-3:] == ["plan=p.yaml", "engine.warmup_layers=0", "engine.balance_units=null"]
