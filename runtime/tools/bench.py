"""`runtime bench`: the same work with the weights in each place, every mode by `runtime run` in a process of its own."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from penstock.planner.common.bars import bar_console
from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import GB, show_seconds
from penstock.planner.common.output import writable, write_json
from penstock.planner.common.user_folder import user_path
from penstock.planner.contract.config.config_schema import SolveConfig
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import write_plan
from penstock.runtime.asked.order import check_values, read_order
from penstock.runtime.asked.run_schema import BenchConfig, RunConfig
from penstock.runtime.asked.sampling_keys import WARPERS, SamplingKeys
from penstock.runtime.tools.modes import MODES, Setting, check_modes, read_setting
from penstock.runtime.tools.solving import environment, program

LEFT_OUT = ("texts", "tokens", "step_s", "step_bytes", "requests")
"""Keys of a run's report that grow with the work."""
WHY_NOT = "why_not"
"""Key that a mode has, instead of figures, when it was not measured."""
COLUMNS = ("load", "TTFT", "prefill", "decode", "tokens/s", "H2D GB/s", "SSD GB/s", "VRAM GB", "DRAM GB", "predicted")
SHOWN = ("ttft_ms", "prefill_ms", "decode_ms", "throughput_tok_s", WHY_NOT)
"""Keys of the JSON line."""


def bench(cfg: BenchConfig) -> None:
    """Plan and run each mode: a row as each is over, one document in ``cfg.out``. UserError when none could run."""
    modes = list(dict.fromkeys(cfg.modes))
    check_modes(modes)
    check_values(_run(cfg, Path("plan.yaml"), Path("run.json")))
    out = writable(user_path(cfg.out), "out")
    if cfg.checkpoint is None and cfg.model.checkpoint is None:
        raise UserError(f"model={cfg.model.name} is a geometry without weights; give model=hf model.checkpoint=DIR, or checkpoint=DIR")
    setting = read_setting(SolveConfig(cfg.hardware, cfg.model, cfg.workload, cfg.force, calibration=cfg.calibration))
    for note in (*cfg.notes, *(setting.best.notes if isinstance(setting.best, Plan) else ())):
        print(f"note: {note}")
    print(_heading(cfg, setting), flush=True)
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        for mode in modes:
            results[mode] = {"mode": mode, **_measure(cfg, setting, mode, Path(scratch))}
            print(f"{mode:8}{_row(results[mode])}", flush=True)
    if all(WHY_NOT in result for result in results.values()):
        raise UserError(f"no mode could run here; {modes[-1]}: {results[modes[-1]][WHY_NOT]}")
    write_json(out, "out", _document(cfg, setting, results))
    line = {mode: {key: result[key] for key in SHOWN if key in result} for mode, result in results.items()}
    cfg.close({"bench": str(out), "modes": line})


def _measure(cfg: BenchConfig, setting: Setting, mode: str, scratch: Path) -> dict[str, Any]:
    """The report of one mode's run, or ``why_not``. UserError for what is wrong with ``cfg`` in every mode."""
    try:
        plan = MODES[mode](setting)
    except UserError as error:
        return {WHY_NOT: str(error)}
    plan_file, report_file = scratch / f"{mode}.yaml", scratch / f"{mode}.json"
    write_plan(plan, plan_file)
    run = _run(cfg, plan_file, report_file)
    read_order(run)
    with bar_console().status(f"{mode}: running"):
        done = subprocess.run(_command(run), env=environment(), capture_output=True, text=True)
    if cfg.verbose:
        print(done.stdout, end="", flush=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
        return {WHY_NOT: said[-1].removeprefix("runtime: ")}
    report = json.loads(report_file.read_text(encoding="utf-8"))
    return {key: value for key, value in report.items() if key not in ("mode", *LEFT_OUT)}


def _run(cfg: BenchConfig, plan_file: Path, report_file: Path) -> RunConfig:
    """What each mode's run is asked."""
    return RunConfig(
        plan=str(plan_file),
        out=str(report_file),
        rounds=cfg.rounds,
        warmup_rounds=cfg.warmup_rounds,
        checkpoint=cfg.checkpoint,
        prompt=cfg.prompt,
        prompts=cfg.prompts,
        **_sampling(cfg),
        verbose=cfg.verbose,
        engine=cfg.engine,
    )


def _sampling(cfg: BenchConfig) -> dict[str, Any]:
    """The keys of sampling that are given; greedy where none of them draws, so that the work is the same for every checkpoint."""
    given = {field.name: getattr(cfg, field.name) for field in fields(SamplingKeys)}
    if all(given[name] is None for name in ("greedy", *WARPERS)):
        given["greedy"] = True
    return given


def _command(run: RunConfig) -> list[str]:
    """`runtime run` with every key of ``run`` that differs from its default."""
    usual = _flat(RunConfig())
    given = {key: "null" if value is None else value for key, value in _flat(run).items() if value != usual[key]}
    return program("runtime", "run", *(f"{key}={value}" for key, value in given.items()))


def _flat(run: RunConfig) -> dict[str, Any]:
    plain = {key: value for key, value in vars(run).items() if key not in ("engine", "force")}
    return plain | {f"engine.{key}": value for key, value in vars(run.engine).items()}


def _heading(cfg: BenchConfig, setting: Setting) -> str:
    gpu, work = setting.hardware.gpu, cfg.workload
    what = f"{setting.model.name} on {setting.hardware.name}{f' ({gpu.name})' if gpu else ''}"
    much = f"prompt {work.prompt_tokens}, {work.new_tokens} new, {cfg.rounds} rounds after {cfg.warmup_rounds} to warm up"
    return f"{what}: {much}\n{'mode':8}" + "".join(f"{name:>10}" for name in COLUMNS)


def _row(result: Mapping[str, Any]) -> str:
    if WHY_NOT in result:
        return f"  not here: {result[WHY_NOT]}"
    measured, io = result["measured"], result["io_bw_MBps"]
    step = measured["decode_s_per_token"]
    ratio = result["ratio"]["decode_s_per_token"]
    cells = (
        show_seconds(measured["load_s"]),
        show_seconds(measured["ttft_s"]),
        show_seconds(measured["prefill_s"]),
        show_seconds(step) if step else "-",
        f"{result['throughput_tok_s']:.4g}" if result["throughput_tok_s"] else "-",
        *(f"{io[key] / 1e3:.3g}" if io[key] else "-" for key in ("weight_h2d_MBps", "weight_ssd_MBps")),
        *(f"{measured[key] / GB:.3g}" if measured[key] else "-" for key in ("vram_bytes", "dram_bytes")),
        f"{ratio:.2f}" if ratio else "-",
    )
    return "".join(f"{cell:>10}" for cell in cells)


def _document(cfg: BenchConfig, setting: Setting, results: Mapping[str, Any]) -> dict[str, Any]:
    hardware = setting.hardware
    machine = {"hardware": hardware.name, "gpu": hardware.gpu.name if hardware.gpu else None, "cpu_cores": hardware.cpu_cores}
    budgets = {"vram_bytes": hardware.vram_bytes, "dram_bytes": hardware.dram_bytes}
    work = {"model": setting.model.name, "workload": {**vars(cfg.workload), "objective": str(cfg.workload.objective)}}
    return {"machine": machine | budgets, **work, "rounds": cfg.rounds, "warmup_rounds": cfg.warmup_rounds, "modes": results}
