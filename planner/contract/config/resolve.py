"""Model and workload of a configuration, as the frozen types that everything else uses. Values are checked here, each by the name that a
user sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.common.outside.bounds import check_bounds
from penstock.planner.contract.config.config_schema import ModelConfig, WorkloadConfig
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.workload import Workload


def workload_from(cfg: WorkloadConfig) -> Workload:
    """The workload that ``cfg`` describes. Raises UserError naming the key."""
    check_bounds(cfg, "workload")
    _check_served(cfg)
    if cfg.batch == 0 and cfg.objective != "throughput" and not cfg.clients:
        raise UserError(
            f"workload.batch=0: the batch is solved for only when workload.objective=throughput, not {cfg.objective}; set one of them"
        )
    if cfg.shared_prefix_tokens > cfg.prompt_tokens:
        raise UserError(
            f"workload.shared_prefix_tokens={cfg.shared_prefix_tokens}: at most workload.prompt_tokens={cfg.prompt_tokens}; lower it"
        )
    kept = cfg.shared_prefix_tokens if cfg.kept_tokens is None else cfg.kept_tokens
    return Workload(**{name: getattr(cfg, name) for name in Workload.__dataclass_fields__} | {"kept_tokens": kept})


def _check_served(cfg: WorkloadConfig) -> None:
    """UserError for keys of a server where there is none, and for KV that a server's pool cannot have."""
    for key in ("arrivals_per_s", "length_spread"):
        if getattr(cfg, key) and not cfg.clients:
            raise UserError(f"workload.{key}={getattr(cfg, key)}: is of a server, and workload.clients=0 is none; set workload.clients=64")
    if cfg.clients and cfg.objective == "ttft":
        raise UserError(
            "workload.objective=ttft: one row alone has the first token soonest, and all other clients wait; a server's is latency or "
            "throughput, so set one of them, or workload.clients=0"
        )
    if cfg.clients and cfg.kv_spill:
        raise UserError("workload.kv_spill=true: a server's KV lies where the model computes; leave it out, or set workload.clients=0")


def workload_mapping(workload: Workload) -> Mapping[str, Any]:
    """``workload`` in the shape of ``WorkloadConfig``."""
    values = {name: getattr(workload, name) for name in Workload.__dataclass_fields__}
    return values | {"objective": workload.objective.value}


def model_from(cfg: ModelConfig) -> ModelSpec:
    """The model that ``cfg`` describes: what ``cfg.checkpoint`` names, else computed from its published config or its geometry."""
    check_bounds(cfg, "model")
    if cfg.checkpoint is None:
        if cfg.config:
            from penstock.planner.contract.published.model_source import spec_of_published

            shortened = {} if cfg.layers is None else {"num_hidden_layers": cfg.layers}
            return spec_of_published({**cfg.config, **shortened}, cfg.name, f"model={cfg.name}")
        from penstock.planner.contract.config.geometry import spec_from_geometry

        return spec_from_geometry(cfg)
    from penstock.planner.contract.published.model_source import spec_from_source

    spec = spec_from_source(cfg.checkpoint)
    if cfg.layers is not None and cfg.layers != spec.layers:
        raise UserError(
            f"model.layers={cfg.layers}: the checkpoint {cfg.checkpoint} has {spec.layers} layers; "
            "leave out model.layers=, or model= of a preset, or make a shortened checkpoint with `runtime synth`"
        )
    return spec
