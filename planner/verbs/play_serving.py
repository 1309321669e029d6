"""`planner simulate` of a server's plan: requests played through the scheduler."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from penstock.planner.asked.verb_schema import PlayedConfig, SimulateConfig
from penstock.planner.common.console import make_console
from penstock.planner.common.errors import UserError
from penstock.planner.common.output import write_json
from penstock.planner.common.outside.bounds import check_bounds
from penstock.planner.common.user_folder import user_path
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.serving.arrivals import Arrivals, Lengths
from penstock.planner.contract.serving.pass_prices import PassPrices
from penstock.planner.contract.serving.serve_limits import ServeLimits
from penstock.planner.contract.serving.serving_forecast import ServingForecast, planned_load, simulate_serving
from penstock.planner.render.serving_table import print_serving

SHARES = (0.3, 0.6, 0.9)
"""Of the planned load: calm, busy, nearly full."""


def is_played(asked: PlayedConfig, plan: Plan) -> bool:
    """Whether requests are to come to a server."""
    return plan.workload.is_served or not all(one is None for one in (asked.clients, asked.arrivals_per_s, asked.load))


def play_serving(cfg: SimulateConfig, plan: Plan) -> None:
    """Play and tell; the last line is one JSON document."""
    for key in ("trace", "routings"):
        if getattr(cfg, key) is not None:
            raise UserError(f"{key}={getattr(cfg, key)}: requests to a server are played pass by pass, without {key}; leave it out")
    check_bounds(cfg.serve, "serve")
    arrivals, limits, prices = arrivals_of(cfg.serve, plan), ServeLimits.of(plan), PassPrices(plan)
    lengths = arrivals.lengths
    if lengths.prompt_tokens + lengths.new_tokens > limits.capacity_tokens:
        raise UserError(
            f"serve.prompt_tokens={lengths.prompt_tokens}, serve.new_tokens={lengths.new_tokens}: the plan holds KV for "
            f"{limits.capacity_tokens} tokens; ask for shorter requests, or solve again with workload.context_tokens"
        )
    load = planned_load(plan, arrivals, limits, prices)
    if cfg.serve.load is not None:
        arrivals = arrivals.at_rate(cfg.serve.load * load)
    asked = simulate_serving(plan, arrivals, limits, prices)
    at_load = {share: simulate_serving(plan, arrivals.at_rate(share * load), limits, prices) for share in SHARES}
    told = {_named(arrivals): asked} | {f"{share:.0%} of load": found for share, found in at_load.items()}
    print_serving(plan, arrivals, load, told, make_console())
    document = {
        "plan": cfg.plan,
        "hardware": plan.hardware.name,
        "model": plan.model.name,
        "workload": plan.workload.name,
        "limits": asdict(limits),
        "arrivals": asdict(arrivals),
        "planned_load_per_s": float(f"{load:.6g}"),
        "asked": _plain(asked),
        "at_load": {f"{share}": _plain(found) for share, found in at_load.items()},
    }
    if cfg.out is not None:
        write_json(user_path(cfg.out), "out", document)
    cfg.close(document)


def arrivals_of(asked: PlayedConfig, plan: Plan) -> Arrivals:
    """As the plan's workload has them, but for what was asked. UserError where that contradicts itself."""
    given = [name for name in ("clients", "arrivals_per_s", "load") if getattr(asked, name) is not None]
    if len(given) > 1:
        raise UserError(f"{', '.join(f'serve.{name}={getattr(asked, name)}' for name in given)}: say one of them; leave the others out")
    own = Arrivals.of(plan.workload, asked.requests, asked.seed)
    told = {name: getattr(asked, name) for name in ("prompt_tokens", "new_tokens") if getattr(asked, name) is not None}
    spread = {} if asked.length_spread is None else {"spread": asked.length_spread}
    shared = {} if asked.shared_prefix_tokens is None else {"shared_tokens": asked.shared_prefix_tokens}
    own = replace(own, lengths=Lengths(**(asdict(own.lengths) | told | spread | shared)))
    if own.lengths.shared_tokens > own.lengths.prompt_tokens:
        raise UserError(
            f"serve.shared_prefix_tokens={own.lengths.shared_tokens}: at most the prompt's {own.lengths.prompt_tokens} tokens; lower it"
        )
    if asked.clients is not None:
        return replace(own, clients=asked.clients, per_s=0.0)
    return own if asked.arrivals_per_s is None else own.at_rate(asked.arrivals_per_s)


def _named(arrivals: Arrivals) -> str:
    return f"{arrivals.per_s:.3g}/s" if arrivals.per_s else f"{arrivals.clients} client" + "s" * (arrivals.clients > 1)


def _plain(found: ServingForecast) -> dict[str, Any]:
    document = found.document()
    del document["limits"]
    return document
