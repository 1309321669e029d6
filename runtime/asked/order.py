"""What a run was asked, checked as far as it can be without torch: mistakes are reported in a second, not after its imports."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from penstock.planner.common.errors import UserError
from penstock.planner.common.output import check_apart, writable
from penstock.planner.common.outside.bounds import check_own_bounds
from penstock.planner.common.timeline.timeline_file import check_form
from penstock.planner.common.user_folder import user_path
from penstock.planner.contract.checkpoint.checkpoint_files import PACK_MANIFEST, merged_adapter, spec_from_checkpoint
from penstock.planner.contract.checkpoint.draft_checkpoint import drafter_spec
from penstock.planner.contract.checkpoint.foreign_files import adapter_digest
from penstock.planner.contract.checkpoint.further_heads import FURTHER_HEADS
from penstock.planner.contract.decided.decisions import KvReuse
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.decided.speculating import Drafter, Speculation, as_asked, modelled
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import read_plan
from penstock.planner.contract.published.hub_names import hub_name
from penstock.planner.contract.rules.broken import broken_rules
from penstock.planner.contract.rules.rule import BrokenRule
from penstock.runtime.asked.calibration_check import check_calibration
from penstock.runtime.asked.knobs import check_engine, check_least
from penstock.runtime.asked.kv_check import check_bounds, check_reuse, check_scratch
from penstock.runtime.asked.page_room import reuse_of_rank
from penstock.runtime.asked.requests import Asked, read_requests
from penstock.runtime.asked.run_schema import RunConfig
from penstock.runtime.asked.sampling_keys import check_sampling
from penstock.runtime.asked.schedule import batches_of

_SHAPES = ("model_type", "layers", "hidden", "vocab", "tied")
_IDENTITY = (*_SHAPES, "attn_bytes", "ffn_bytes", "routed", "embed_bytes", "head_bytes", "norm_bytes", "kv_bytes_per_token")
"""What room is taken by: a plan whose sizes were edited is another model's."""


@dataclass(frozen=True)
class Order:
    """A plan that keeps every rule, the checkpoint that it is for, and what to generate."""

    plan: Plan
    checkpoint: Path
    out: Path
    """Where the report goes; it could be written there."""
    trace: Path | None
    """Where the timeline goes, None when none was asked for."""
    record: Path | None
    """Where routings go, None when none were asked for."""
    requests: list[Asked] | None
    """None asks for random tokens."""
    new_tokens: int
    """The most that a request asks for."""
    batch: int
    """Sequences that run together, at most."""

    @property
    def capacity_tokens(self) -> int:
        """Tokens of KV that the plan holds for each sequence."""
        return capacity_tokens(self.plan, self.batch)

    @property
    def prompt_limit(self) -> int:
        """Tokens of a prompt, at most. The sequences of a batch advance together, so each has room for the most new tokens of all."""
        return self.capacity_tokens - self.new_tokens

    def no_room(self, named: str, where: str, tokens: int, longest: int) -> UserError:
        """For the prompt of ``tokens`` from ``where``, which is too long for the plan that was ``named``; ``longest``: of all."""
        need, fewer, limit = longest + self.new_tokens, self.capacity_tokens - tokens, self.plan.model.max_tokens
        remedies = [f"set max_new_tokens={fewer}"] if fewer > 0 else []
        if limit and need > limit:
            remedies += [f"shorten the prompt: {self.plan.model.name} is made for sequences of {limit} tokens"]
        elif self.plan.workload.is_served:  # solved again it has one such sequence in its pool
            remedies += [fewer_together(self.plan, need)]
        else:
            remedies += ["run it with replan=true", f"make a plan by `planner replan plan={named} context_tokens={need}`"]
        return UserError(
            f"{where}: {tokens} tokens and {self.new_tokens} new ones, the plan has room for {self.capacity_tokens} together;"
            f" {', '.join(remedies)}, or drop the prompt's head by clip=tail"
        )


def read_order(cfg: RunConfig, plan: Plan | None = None) -> Order:
    """Read the plan, unless it is given, the checkpoint's headers and the prompts. UserError for whatever is wrong or does not fit
    together."""
    check_values(cfg)
    plan, checkpoint = check_fit(cfg, plan or read_plan(user_path(cfg.plan)))
    if cfg.calibrate:
        check_calibration(plan)
    most = plan.decisions.batch
    if cfg.batch is not None and cfg.batch < 1:
        raise UserError(f"batch={cfg.batch}: must be 1 or more, at most {most} by this plan; set it so")
    if cfg.batch is not None and cfg.batch > most:
        raise UserError(f"batch={cfg.batch}: the plan holds KV for {most} at most; solve again with workload.batch={cfg.batch}")
    check_apart({"plan": cfg.plan, "prompts": cfg.prompts, "out": cfg.out, "trace": cfg.trace, "moe.record": cfg.moe.record})
    out, trace = writable(user_path(cfg.out), "out"), _trace(cfg)
    new_tokens = _new_tokens(cfg, plan)
    requests = read_prompts(cfg, plan, new_tokens, capacity_tokens(plan, 1))
    most = max((r.max_new_tokens for r in requests or ()), default=new_tokens)
    order = Order(plan, checkpoint, out, trace, _record(cfg, plan), requests, most, _together(cfg, plan, requests))
    if order.prompt_limit < 1:  # of a server's plan: of any other a sequence alone has no more
        raise UserError(
            f"max_new_tokens={most}: the plan holds KV for {order.capacity_tokens} tokens a sequence where {order.batch} share it;"
            f" {fewer_together(plan, most + 1)}"
        )
    if requests is None and cfg.clip is None and (tokens := random_tokens(cfg, plan)) > order.prompt_limit:
        raise order.no_room(cfg.plan, f"prompt_tokens={tokens}", tokens, tokens)
    return order


def random_tokens(cfg: RunConfig, plan: Plan) -> int:
    """Of each prompt that is made at random."""
    return cfg.prompt_tokens or plan.workload.prompt_tokens


def _together(cfg: RunConfig, plan: Plan, requests: list[Asked] | None) -> int:
    """Sequences of the largest batch. As many requests as fill one are made at random."""
    size = cfg.batch or plan.decisions.batch
    return size if requests is None else len(batches_of([r.conversation for r in requests], size)[0])


def fewer_together(plan: Plan, tokens: int) -> str:
    """How a server's ``plan`` gives ``tokens`` to a sequence: by fewer of them at once, or as another plan."""
    batch = next((n for n in range(plan.decisions.batch, 0, -1) if capacity_tokens(plan, n) >= tokens), None)
    if batch is not None:
        return f"set batch={batch}: they share the KV of a server's plan"
    return f"solve for workload=chat workload.context_tokens={tokens}: this plan is a server's, whose sequences end before"


def check_fit(cfg: RunConfig, plan: Plan) -> tuple[Plan, Path]:
    """``plan`` as ``cfg`` forces it, with notes on keys that have no effect, and the checkpoint that it is for. UserError where a rule is
    broken, or where plan, checkpoint and keys do not fit together."""
    plan = _forced(cfg, plan)
    _check_ranks(cfg, plan)
    for rank in range(plan.ranks.count):
        check_reuse(reuse_of_rank(cfg.kv, plan, rank), plan.of_rank(rank))
    plan = replace(plan, notes=(*plan.notes, *check_engine(cfg.engine, plan)))
    checkpoint = _checkpoint(cfg, plan.model)
    check_scratch(cfg.kv, plan, checkpoint)
    if (checkpoint / PACK_MANIFEST).exists():
        plan = replace(
            plan, notes=(*plan.notes, f"{checkpoint} is not compared with its checksums; `runtime verify {checkpoint}` does that")
        )
    return plan, checkpoint


def _check_ranks(cfg: RunConfig, plan: Plan) -> None:
    """What one rank alone does yet."""
    if plan.ranks.count == 1:
        return
    asked = {"moe.record": cfg.moe.record is not None, "calibrate": cfg.calibrate}
    for key, given in asked.items():
        if given:
            raise UserError(f"{key}: the plan is for {plan.ranks.count} ranks, and this works on one alone yet; leave it out")


def check_values(cfg: RunConfig) -> None:
    """UserError for a value that is wrong whatever the plan, so also before one is solved."""
    check_own_bounds(cfg)
    check_sampling(cfg)
    check_least(cfg.engine)
    check_bounds(cfg.kv)
    if "" in cfg.stop:
        raise UserError("stop: an empty text would end every sequence at once; leave it out")
    if cfg.prompt is not None and cfg.prompts is not None:
        raise UserError(f"prompt={cfg.prompt!r} and prompts={cfg.prompts} are both given; choose one")


def _forced(cfg: RunConfig, plan: Plan) -> Plan:
    forced, wanted = Force.from_config(cfg.force), _drafts(cfg, plan)
    if plan.ranks.count > 1:
        return _of_several_ranks(plan, forced, wanted)
    if forced.speculate_tokens and wanted.drafter is Drafter.none:
        raise UserError(f"force.speculate_tokens={forced.speculate_tokens}: nobody drafts; set speculate=lookup, or leave it out")
    plan = replace(plan, decisions=replace(plan.decisions, speculation=wanted))

    def first_broken(force: Force) -> BrokenRule | None:
        decisions = force.apply(plan.decisions, plan.model.layers) if force.given else plan.decisions
        return next(iter(broken_rules(plan.hardware, plan.model, plan.workload, decisions)), None)

    rule = first_broken(forced)
    if rule is None:
        return replace(plan, decisions=forced.apply(plan.decisions, plan.model.layers)) if forced.given else plan
    if rule == first_broken(Force()):
        raise UserError(f"the plan breaks a rule ({rule.name}): {rule.message}")
    raise UserError(rule.forced(forced.culprits(lambda fewer: first_broken(fewer) == rule)))


def _drafts(cfg: RunConfig, plan: Plan) -> Speculation:
    """Who drafts, with the checkpoint of a model that does."""
    planned = plan.decisions.speculation
    if cfg.draft is not None:
        target = plan.model if cfg.checkpoint is None else replace(plan.model, checkpoint=str(user_path(cfg.checkpoint)))
        return modelled(planned, cfg.speculate, drafter_spec(cfg.draft, target), plan.model)
    wanted = as_asked(planned, cfg.speculate)
    if wanted.drafter is Drafter.mtp and wanted.model is not None and cfg.checkpoint is not None:
        wanted = replace(wanted, model=replace(wanted.model, checkpoint=str(user_path(cfg.checkpoint) / FURTHER_HEADS)))
    if wanted.model is not None:
        if wanted.model.checkpoint is None:
            raise UserError(
                f"plan={cfg.plan} was made for {wanted.model.name} to draft, without its weights; give draft=DIR, for a copy in 4 bits as "
                "`runtime pack format=int4` makes it"
            )
        _check_identity("draft", wanted.model.checkpoint, wanted.model, spec_from_checkpoint(Path(wanted.model.checkpoint)))
    return wanted


def _of_several_ranks(plan: Plan, forced: Force, wanted: Speculation) -> Plan:
    """Its ranks decide together, so that nothing is forced of one of them."""
    if forced.given:
        raise UserError(f"force: the plan is for {plan.ranks.count} ranks, which decide together; force it in `planner solve`")
    if wanted.drafter is Drafter.mtp:
        raise UserError(
            f"speculate=mtp: the plan is for {plan.ranks.count} ranks, and further heads read the hidden states of one alone yet; set "
            "speculate=lookup"
        )
    others = tuple(replace(decisions, speculation=wanted.beside) for decisions in plan.ranks.others)
    plan = replace(plan, decisions=replace(plan.decisions, speculation=wanted), ranks=replace(plan.ranks, others=others))
    for rank in range(plan.ranks.count):
        own = plan.of_rank(rank)
        for rule in broken_rules(own.hardware, own.model, own.workload, own.decisions):
            raise UserError(f"the plan breaks a rule on rank {rank} ({rule.name}): {rule.message}")
    return plan


def _checkpoint(cfg: RunConfig, planned: ModelSpec) -> Path:
    where = cfg.checkpoint or planned.checkpoint
    if where is None:
        fetched = f"; fetch them with `runtime fetch {planned.name}`" if hub_name(planned.name) else ""
        raise UserError(f"plan={cfg.plan} was made for {planned.name} without its weights{fetched}; give checkpoint=DIR")
    path = user_path(where)
    found = spec_from_checkpoint(path)
    _check_adapter(cfg.adapter, path)
    _check_identity("checkpoint", where, planned, found)
    return path


def _check_identity(asked: str, where: str, planned: ModelSpec, found: ModelSpec) -> None:
    """UserError where ``found`` in the directory ``asked=where`` is not the model that was ``planned``."""
    remedy = f"solve again with {'model.checkpoint' if asked == 'checkpoint' else asked}= this one"
    for key in _IDENTITY:
        want, got = getattr(planned, key), getattr(found, key)
        if want != got and (want or key != "model_type"):
            raise UserError(
                f"{asked}={where} is not the plan's model {planned.name}: {key} is {_brief(got)}, the plan says {_brief(want)}; {remedy}"
            )
    if planned.digest not in (None, found.digest):
        raise UserError(f"{asked}={where} holds other weights than the plan's {planned.checkpoint} (their digests differ); {remedy}")


def _check_adapter(given: str | None, checkpoint: Path) -> None:
    if given is None:
        return
    adapter = user_path(given)
    if adapter_digest(adapter) != merged_adapter(checkpoint):
        raise UserError(
            f"adapter={given}: not merged into {checkpoint}, and a run does not merge what may stream anew in every pass; `runtime pack "
            f"checkpoint=BASE adapter={given} out=MERGED`, then solve for model.checkpoint=MERGED"
        )


def capacity_tokens(plan: Plan, batch: int | None = None) -> int:
    """Tokens of KV that ``plan`` holds for each of ``batch`` sequences; None: of as many as it is for."""
    return pages_each(plan.of_rank(0), batch or plan.decisions.batch) * plan.decisions.kv.page_tokens


def pages_each(own: Plan, batch: int) -> int:
    """Pages of a layer for each of ``batch`` sequences of a rank's plan: the same however few they are, or of a server's plan what the pool
    holds, as far as one sequence may have it."""
    kv = own.decisions.kv
    layer = kv.pages // own.model.layers
    each = layer // own.decisions.batch
    if own.workload.is_served:
        return max(each, min(layer // batch, -(-own.workload.max_tokens // kv.page_tokens)))
    return each


def _new_tokens(cfg: RunConfig, plan: Plan) -> int:
    """Of requests that do not say how many."""
    tokens, capacity = plan.workload.new_tokens if cfg.max_new_tokens is None else cfg.max_new_tokens, capacity_tokens(plan, 1)
    if tokens < 1:
        raise UserError(f"max_new_tokens={tokens}: must be 1 or more, at most {capacity - 1} by this plan; set it so")
    limit = plan.model.max_tokens
    if limit and tokens >= max(limit, capacity):  # no plan holds more
        raise UserError(
            f"max_new_tokens={tokens}: {plan.model.name} is made for sequences of {limit} tokens, prompt and reply together, "
            f"so 1 to {min(limit, capacity) - 1} are allowed; set it so"
        )
    if tokens >= capacity:
        raise UserError(
            f"max_new_tokens={tokens}: the plan holds KV for {capacity} tokens a sequence, so 1 to {capacity - 1} are allowed; "
            f"solve again with workload.new_tokens={tokens}"
        )
    return tokens


def read_prompts(cfg: RunConfig, plan: Plan, new_tokens: int, capacity: int) -> list[Asked] | None:
    """What ``cfg`` asks, where a sequence has room for ``capacity`` tokens; None for random tokens."""
    if cfg.prompts is not None:
        return read_requests(cfg.prompts, plan.model.vocab, capacity, new_tokens)
    return None if cfg.prompt is None else [Asked("prompt", cfg.prompt, new_tokens, said=True)]


def _trace(cfg: RunConfig) -> Path | None:
    if cfg.trace is None:
        return None
    trace = user_path(cfg.trace)
    check_form(trace)
    return writable(trace, "trace")


def _record(cfg: RunConfig, plan: Plan) -> Path | None:
    where = cfg.moe.record
    if where is None:
        return None
    if plan.model.experts is None:
        raise UserError(f"moe.record={where}: {plan.model.name} has no routed experts; leave it out")
    if cfg.kv.dir is not None or plan.decisions.kv.reuse != KvReuse():
        raise UserError(f"moe.record={where}: tokens whose KV is restored are not routed; run without kv.dir and kept pages")
    return writable(user_path(where), "moe.record")


def _brief(value: object) -> str:
    return f"{sum(value)} bytes in all" if isinstance(value, tuple) else str(value)
