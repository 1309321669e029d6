"""The verbs as their programs call them; torch is imported only once it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from penstock.planner.common.bars import bar_console, make_bar
from penstock.planner.common.closing import Closing
from penstock.planner.common.errors import UserError
from penstock.planner.common.interrupt import import_torch, uncollected
from penstock.planner.common.output import check_new
from penstock.planner.common.outside.bounds import check_bounds
from penstock.planner.common.threads import wait_asleep
from penstock.planner.common.user_folder import user_path
from penstock.planner.contract.config.config_schema import SolveConfig, WorkloadConfig
from penstock.planner.contract.config.geometry import hf_config_dict
from penstock.planner.contract.decided.speculating import Speculate
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import read_plan
from penstock.runtime.asked.foreseen import for_requests, foreseen
from penstock.runtime.asked.order import check_fit, check_values, read_order
from penstock.runtime.asked.page_room import fitted, unplanned_dram_bytes
from penstock.runtime.asked.requests import read_stdin
from penstock.runtime.asked.run_schema import BenchConfig, ChatConfig, PackConfig, RunConfig, SynthConfig, VerifyConfig
from penstock.runtime.asked.sampling_keys import check_sampling
from penstock.runtime.led.launched import joined
from penstock.runtime.memory.groundwork import Groundwork
from penstock.runtime.told.startup import Startup
from penstock.runtime.tools.pack_asked import check_pack, check_packed
from penstock.runtime.tools.solving import NoPlan, solve


def run_verb(cfg: RunConfig) -> None:
    """`runtime run`: mistakes are reported before torch is imported, which takes seconds; memory is taken beside that."""
    startup = Startup()
    cfg = replace(cfg, prompt=read_stdin("prompt=-")) if cfg.prompt == "-" else cfg
    order = read_order(cfg, _replanned(cfg))
    company, over = joined(order.plan, order.checkpoint)
    if over:
        return
    cfg = replace(cfg, kv=fitted(cfg.kv, order.plan))
    plan = foreseen(cfg, order)
    if plan.hardware.gpu or plan.prediction.ssd_bytes_per_token:
        wait_asleep()
    with Groundwork.of(plan, unplanned_dram_bytes(cfg.kv, plan), company) as ground:
        device = ground.open_card()
        with uncollected():
            from penstock.runtime.tools.run import run
        run(cfg, order, device, ground, startup)


def _replanned(cfg: RunConfig) -> Plan | None:
    """The plan that ``replan=true`` makes; None leaves it to the file."""
    if not cfg.replan:
        return None
    from penstock.runtime.tools.replan import replanned

    return replanned(cfg)


def chat_verb(cfg: ChatConfig) -> None:
    """`runtime chat`: the plan is read, or solved by the planner's program, before torch is imported."""
    check_sampling(cfg)
    check_values(_as_run(cfg))
    if cfg.max_new_tokens is not None and cfg.max_new_tokens < 1:
        raise UserError(f"max_new_tokens={cfg.max_new_tokens}: must be 1 or more; null is as many as the context has room for")
    plan, checkpoint = planned(cfg)
    company, over = joined(plan, checkpoint)
    if over:
        return
    cfg = replace(cfg, kv=fitted(cfg.kv, plan))
    if plan.hardware.gpu or plan.prediction.ssd_bytes_per_token:
        wait_asleep()
    with Groundwork.of(plan, unplanned_dram_bytes(cfg.kv, plan), company) as ground:
        with uncollected():
            from penstock.runtime.tools.chat import chat
        chat(cfg, plan, checkpoint, ground)


def planned(cfg: ChatConfig) -> tuple[Plan, Path]:
    """The plan of one conversation, as ``cfg`` names or describes it, and its checkpoint."""
    if cfg.plan is not None:
        plan = read_plan(user_path(cfg.plan))
    else:
        assert cfg.hardware is not None and cfg.model is not None
        with bar_console().status("solving"), _told_whole():
            work, drafts = cfg.workload or WorkloadConfig(), cfg.speculate or Speculate.none
            asked = SolveConfig(cfg.hardware, cfg.model, work, cfg.force, calibration=cfg.calibration, speculate=drafts, draft=cfg.draft)
            plan = solve(asked)
    plan, checkpoint = check_fit(_as_run(cfg), plan)
    return for_requests(plan, 1, plan.workload.prompt_tokens, plan.workload.new_tokens, 1), checkpoint


def _as_run(cfg: ChatConfig) -> RunConfig:
    """What the check of a run looks at; what is solved here has been asked for its drafts already."""
    drafts_asked, draft = (cfg.speculate, cfg.draft) if cfg.plan is not None else (None, None)
    return RunConfig(
        plan=cfg.plan or "(solved)",
        checkpoint=cfg.checkpoint,
        adapter=cfg.adapter,
        kv=cfg.kv,
        engine=cfg.engine,
        speculate=drafts_asked,
        draft=draft,
    )


@contextmanager
def _told_whole() -> Iterator[None]:
    """Inside, where no plan is found, the remedy is told, too."""
    try:
        yield
    except NoPlan as none:
        raise UserError(none.whole) from none


def bench_verb(cfg: BenchConfig) -> None:
    """`runtime bench`: plans here, runs each mode in a process of its own, so torch is not imported at all."""
    from penstock.runtime.tools.bench import bench

    bench(cfg)


def pack_verb(cfg: PackConfig) -> None:
    """`runtime pack`"""
    checkpoint, out = user_path(cfg.checkpoint), user_path(cfg.out)
    device = user_path(cfg.device) if cfg.device else None
    adapter = user_path(cfg.adapter) if cfg.adapter else None
    check_pack(checkpoint, out, device, cfg.force, adapter, cfg.format)
    import_torch()
    with uncollected():
        from penstock.runtime.tools.pack import pack_checkpoint
    with bar("packing") as progress:
        result = pack_checkpoint(checkpoint, out, device, cfg.force, progress, adapter, cfg.format)
    plain = result.get("plain_units", ())
    left = f", but for {', '.join(plain[:4])}{' ...' * (len(plain) > 4)}, which do not fit and stay as they were" if plain else ""
    how = f" as {cfg.format}{left}" if cfg.format else ""
    say(f"packed {cfg.checkpoint} into {cfg.out}{how}; check it with: runtime verify {cfg.out}", result, cfg)


def verify_verb(cfg: VerifyConfig) -> None:
    """`runtime verify`"""
    check_packed(user_path(cfg.store))
    import_torch()
    from penstock.runtime.store.verify import verify_store

    with bar("verifying") as progress:
        result = verify_store(user_path(cfg.store), progress)
    say(f"{cfg.store}: every unit matches its checksum", result, cfg)


def synth_verb(cfg: SynthConfig) -> None:
    """`runtime synth`"""
    check_bounds(cfg.model, "model")
    check_new(user_path(cfg.out))
    hf_config_dict(cfg.model)
    import_torch()
    with uncollected():
        from penstock.runtime.tools.synth import synthesize
    with bar("writing") as progress:
        result = synthesize(cfg.model, user_path(cfg.out), cfg.seed, cfg.shard_bytes, progress)
    say(f"made {cfg.out} with random weights of {cfg.model.name}'s geometry", result, cfg)


@contextmanager
def bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """A callback of (bytes done, bytes in all) that moves a bar on stderr; the bar goes when it is full."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with make_bar(*columns) as drawn:
        task = drawn.add_task(name)
        yield lambda done, total: drawn.update(task, completed=done, total=total)


def say(line: str, result: dict[str, Any], cfg: Closing) -> None:
    """One line for people, and the JSON document that ends a verb's stdout."""
    print(line)
    cfg.close(result)
