"""What a run was asked, checked as far as it can be before a byte of weights is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from planner.checkpoint import spec_from_checkpoint
from planner.cost import predict
from planner.errors import UserError
from planner.force import Force
from planner.model import ModelSpec
from planner.plan import Plan
from planner.planfile import check_plan, read_plan
from runtime.generate import Batch
from runtime.memory import refuse_if_short
from runtime.prompts import Request, Vocabulary, read_requests, read_vocabulary
from runtime.schema import RunConfig

_IDENTITY = ("model_type", "layers", "hidden", "vocab", "dtype_bytes", "tied", "attn_bytes", "ffn_bytes", "embed_bytes", "head_bytes")


@dataclass(frozen=True)
class Job:
    """A plan that was found fit to run, re-predicted for exactly the work that it was given."""

    plan: Plan
    checkpoint: Path
    device: torch.device
    vocabulary: Vocabulary
    requests: list[Request]
    max_new_tokens: int

    def batches(self) -> Iterator[Batch]:
        """The requests in the plan's batches."""
        size = self.plan.decisions.batch
        for k in range(0, len(self.requests), size):
            yield Batch(
                prompts=[r.ids for r in self.requests[k : k + size]],
                max_new_tokens=self.max_new_tokens,
                capacity=_capacity(self.plan),
                chunk_tokens=self.plan.decisions.prefill_chunk_tokens,
                stop_ids=self.vocabulary.stop_ids,
                pad=self.vocabulary.pad,
            )


def prepare(cfg: RunConfig) -> Job:
    """Read the plan, the checkpoint's headers and the prompts; UserError for whatever does not fit together."""
    plan = _read_forced(cfg)
    checkpoint = _checkpoint(cfg, plan.model)
    device = _device(plan)
    _refuse_kv_outside(plan)
    if cfg.batch is not None and not 1 <= cfg.batch <= plan.decisions.batch:
        raise UserError(f"batch={cfg.batch}: the plan holds KV for 1 to {plan.decisions.batch}; solve again with workload.batch={cfg.batch}")
    new_tokens = plan.workload.new_tokens if cfg.max_new_tokens is None else cfg.max_new_tokens
    capacity = _capacity(plan)
    if not 1 <= new_tokens < capacity:
        raise UserError(
            f"max_new_tokens={new_tokens}: the plan holds KV for {capacity} tokens a sequence, so 1 to {capacity - 1} are allowed; "
            f"solve again with workload.new_tokens={new_tokens}"
        )
    vocabulary = read_vocabulary(checkpoint, plan.model.vocab)
    requests = read_requests(
        vocabulary,
        prompt=cfg.prompt,
        prompts=Path(cfg.prompts) if cfg.prompts else None,
        random_count=cfg.batch or max(plan.decisions.batch, plan.workload.requests),
        random_tokens=cfg.prompt_tokens or plan.workload.prompt_tokens,
        seed=cfg.seed,
        limit=capacity - new_tokens,
    )
    plan = _for_requests(plan, requests, new_tokens, cfg.batch or plan.decisions.batch)
    refuse_if_short(plan, device)
    return Job(plan, checkpoint, device, vocabulary, requests, new_tokens)


def _read_forced(cfg: RunConfig) -> Plan:
    plan = read_plan(Path(cfg.plan))
    forced = Force.from_config(cfg.force)
    if forced.given:
        plan = replace(plan, decisions=forced.apply(plan.decisions))
    check_plan(plan)
    return plan


def _checkpoint(cfg: RunConfig, planned: ModelSpec) -> Path:
    where = cfg.checkpoint or planned.checkpoint
    if where is None:
        raise UserError(f"plan={cfg.plan} was made for the preset {planned.name}, without weights; give checkpoint=DIR")
    found = spec_from_checkpoint(Path(where))
    if planned.digest is not None and planned.digest == found.digest:
        return Path(where)
    for key in _IDENTITY:
        want, got = getattr(planned, key), getattr(found, key)
        if want != got and (want or key != "model_type"):
            raise UserError(
                f"checkpoint={where} is not the plan's model {planned.name}: {key} is {_brief(got)}, the plan says {_brief(want)}; "
                "solve again with model.checkpoint= this one"
            )
    if planned.digest is not None:
        raise UserError(
            f"checkpoint={where} holds other weights than the plan's {planned.checkpoint} (their digests differ); "
            "solve again with model.checkpoint= this one"
        )
    return Path(where)


def _device(plan: Plan) -> torch.device:
    if plan.hardware.gpu is None:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(f"the plan computes on a GPU ({plan.hardware.gpu.name}) and torch sees none here; solve again with hardware=cpu")
    return torch.device("cuda", 0)


def _refuse_kv_outside(plan: Plan) -> None:
    kv = plan.decisions.kv
    outside = kv.ssd_pages + (kv.dram_pages if plan.hardware.gpu else 0)
    if outside:
        raise UserError(f"kv: {outside} pages outside the compute device cannot be executed yet; solve again with workload.kv_spill=false")


def _capacity(plan: Plan) -> int:
    return plan.decisions.kv.pages // plan.decisions.batch * plan.decisions.kv.page_tokens


def _for_requests(plan: Plan, requests: list[Request], new_tokens: int, batch: int) -> Plan:
    """The same decisions for the work at hand. The batch shrinks to the requests that there are; KV pages stay in proportion."""
    batch = min(batch, len(requests))
    kv, old = plan.decisions.kv, plan.decisions.batch
    pages = {name: getattr(kv, name) // old * batch for name in ("vram_pages", "dram_pages", "ssd_pages")}
    decisions = replace(plan.decisions, batch=batch, kv=replace(kv, **pages))
    longest = max(len(r.ids) for r in requests)
    work = replace(plan.workload, batch=batch, prompt_tokens=longest, new_tokens=new_tokens, requests=len(requests))
    return replace(plan, workload=work, decisions=decisions, predicted=predict(plan.hardware, plan.model, work, decisions))


def _brief(value: object) -> str:
    return f"{sum(value)} bytes in all" if isinstance(value, tuple) else str(value)
