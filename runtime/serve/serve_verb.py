"""`runtime serve`: what is asked is checked before anything is started."""

from __future__ import annotations

import ipaddress
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.planner.common.bars import bar_console
from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import show_rate
from penstock.planner.common.user_folder import user_path
from penstock.planner.contract.config.config_schema import SolveConfig, WorkloadConfig
from penstock.planner.contract.decided.speculating import Speculate
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import read_plan, write_plan
from penstock.runtime.asked.order import check_fit, check_values
from penstock.runtime.asked.run_schema import RunConfig
from penstock.runtime.company.company import seat_of_environment
from penstock.runtime.led.launched import joined
from penstock.runtime.serve.front.served_as import Served, tell
from penstock.runtime.serve.serve_process import serve
from penstock.runtime.serve.serve_schema import Auth, ServeConfig
from penstock.runtime.serve.wire.messages import Open
from penstock.runtime.tools.solving import NoPlan, solve

QUIET_S = 2.0
"""That an idle engine may say nothing."""
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#]+|null")
"""What a browser sends of itself."""
LAUNCHED = "its ranks were started by a launcher: start all of them again"
"""Why an engine that ended cannot be started anew."""
NEEDED = ("fastapi", "uvicorn", "h11", "prometheus_client", "llguidance")


def serve_verb(cfg: ServeConfig) -> None:
    """Until a signal ends it. UserError for whatever keeps it from serving."""
    absent = [name for name in NEEDED if find_spec(name) is None]
    if absent:
        are = "is" if len(absent) == 1 else "are"
        raise UserError(f"runtime serve needs {', '.join(absent)}, which {are} not installed; pip install {' '.join(absent)}")
    cfg.limits.check()
    check_address(cfg)
    check_template_options(cfg.template)
    if not 0 <= cfg.drain_s < 86400:
        raise UserError(f"drain_s={cfg.drain_s}: must be 0 or more, less than a day; set it so")
    if cfg.hang_s is not None and not QUIET_S < cfg.hang_s < 86400:
        raise UserError(f"hang_s={cfg.hang_s}: must be above {QUIET_S:g}, less than a day; set it so")
    check_values(_as_run(cfg))
    with _planned(cfg) as (path, plan):
        fitting, checkpoint = check_fit(_as_run(cfg), plan)
        seat = seat_of_environment()
        if seat is not None and seat.rank:
            joined(fitting, checkpoint, deaf=True)
            return
        opening = Open(
            plan=str(path),
            checkpoint=str(checkpoint),
            adapter=cfg.adapter,
            kv=asdict(cfg.kv),
            engine=asdict(cfg.engine),
            queue=cfg.limits.queue,
            speculate=_drafts_asked(cfg),
            draft=cfg.draft if cfg.plan is not None else None,
        )
        served = Served(
            name=cfg.name or plan.model.name,
            host=cfg.host,
            port=cfg.port,
            keys=None if cfg.keys is None else user_path(cfg.keys),
            local_only=cfg.auth is None and cfg.keys is None,
            origins=tuple(cfg.origins),
            drain_s=cfg.drain_s,
            hang_s=cfg.hang_s,
            limits=cfg.limits,
            template=cfg.template,
        )
        report = serve(served, plan, checkpoint, opening, LAUNCHED if seat is not None and plan.ranks.count > 1 else "")
        if report:
            tell(_closing(report))
        cfg.close(report)


def check_template_options(wanted: Any) -> None:
    """UserError where ``template=`` is not options."""
    if wanted is not None and not isinstance(wanted, Mapping):
        said = str(wanted).lower() if isinstance(wanted, bool) else wanted
        raise UserError(
            f"template={said}: must be options, as template.enable_thinking=false; leave it out: prompts of /v1/completions are raw text"
        )


def check_address(cfg: ServeConfig) -> None:
    """UserError for an address that would be open to all without anybody having said so."""
    if cfg.auth is Auth.keys and cfg.keys is None:
        raise UserError("auth=keys: no keys are given; set keys=FILE, with one API key a line")
    if cfg.auth is Auth.none and cfg.keys is not None:
        raise UserError(f"auth=none and keys={cfg.keys}: one of them says that keys are wanted; leave the other out")
    if not 0 <= cfg.port < 65536:
        raise UserError(f"port={cfg.port}: must be 0 (any) to 65535; choose another")
    for origin in cfg.origins:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise UserError(f"origins={origin}: must be scheme, host and port of a page, such as https://example.org, or *; correct it")
    if cfg.auth is None and cfg.keys is None and not is_local(cfg.host):
        raise UserError(f"host={cfg.host}: others reach this address; set keys=FILE, with one API key a line, or auth=none")


def is_local(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextmanager
def _planned(cfg: ServeConfig) -> Iterator[tuple[Path, Plan]]:
    """The plan as a file that stays while the server does: the motor reads it at each start."""
    if cfg.plan is not None:
        path = user_path(cfg.plan)
        plan = read_plan(path)
        yield path.absolute(), plan
        return
    assert cfg.hardware is not None and cfg.model is not None
    try:
        with bar_console().status("solving"):
            work, drafts = cfg.workload or WorkloadConfig(), cfg.speculate or Speculate.none
            plan = solve(
                SolveConfig(cfg.hardware, cfg.model, work, cfg.force, calibration=cfg.calibration, speculate=drafts, draft=cfg.draft)
            )
    except NoPlan as none:
        raise UserError(none.whole) from none
    with tempfile.TemporaryDirectory(prefix="penstock-serve-") as scratch:
        path = Path(scratch, "plan.yaml")
        write_plan(plan, path)
        yield path, plan


def _closing(report: Mapping[str, Any]) -> str:
    """What a server did, in one line: the engine's report, predicted beside measured."""
    totals, predicted, measured = (report.get(part) or {} for part in ("totals", "predicted", "measured"))
    rates = [said.get("tokens_per_s") for said in (measured, predicted)]
    rate = f", {show_rate(rates[0])} tokens/s ({show_rate(rates[1])} predicted)" if rates[0] and rates[1] else ""
    requests, tokens = (totals.get(what, 0) for what in ("requests", "tokens"))
    return f"served {requests} request{'s' * (requests != 1)}, {tokens} token{'s' * (tokens != 1)}{rate}"


def _as_run(cfg: ServeConfig) -> RunConfig:
    """What the check of a run looks at."""
    return RunConfig(
        plan=cfg.plan or "(solved)",
        checkpoint=cfg.checkpoint,
        adapter=cfg.adapter,
        kv=cfg.kv,
        engine=cfg.engine,
        speculate=_drafts_asked(cfg),
        draft=cfg.draft if cfg.plan is not None else None,
    )


def _drafts_asked(cfg: ServeConfig) -> Speculate | None:
    """Of a plan's server; what is solved here has been asked already."""
    return cfg.speculate if cfg.plan is not None else None
