"""How all ranks of a plan open their sessions together: rank 0 says what is opened, the others hold it against what they have."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import plan_of_text, plan_text
from penstock.runtime.asked.run_schema import CpuProduct, ReuseConfig
from penstock.runtime.company.company import Company
from penstock.runtime.company.host_claims import installed
from penstock.runtime.ranks.rank import Rank

PASSED_ON = ("wrap_around", "warmup_layers", "balance_units", "keep_finished_units", "row_tokens", "keep_pool", "one_card")
"""Fields of ``engine.host_side.EngineOptions`` that every rank takes from rank 0."""


class Grounded(Protocol):
    """``memory.ground.Ground``, of which this needs one thing."""

    @property
    def company(self) -> Company | None: ...


class Options(Protocol):
    """``engine.host_side.EngineOptions``, as far as ranks share it."""

    @property
    def cpu_product(self) -> CpuProduct | None: ...
    @property
    def kv_scratch_dir(self) -> Path | None: ...
    @property
    def one_card(self) -> bool: ...


@dataclass(frozen=True)
class Opening:
    """What rank 0 says is opened."""

    plan: Plan
    checkpoint: Path
    options: dict[str, Any]
    """Keyword arguments of ``EngineOptions``."""
    reuse: ReuseConfig | None
    """How pages are kept; None where none are."""


def open_with(ground: Grounded, plan: Plan, checkpoint: Path, options: Options, reuse: ReuseConfig | None) -> Rank:
    """This process's part of ``plan``, once all ranks have agreed. UserError where one of them has other files."""
    company = ground.company
    if company is None:
        raise UserError(f"the plan is for {plan.ranks.count} ranks and this is one process; solve again with ranks=1")
    company.join()
    if company.rank == 0:
        _agree(company, plan, checkpoint, options, reuse)
    return Rank.of(plan, company, options.one_card)


def _agree(company: Company, plan: Plan, checkpoint: Path, options: Options, reuse: ReuseConfig | None) -> None:
    product = options.cpu_product
    words = {
        "what": "open",
        "version": installed("penstock"),
        "identity": company.identity,
        "plan": plan_text(plan),
        "checkpoint": str(checkpoint.resolve()),
        "digest": spec_from_checkpoint(checkpoint).digest,
        "options": {name: getattr(options, name) for name in PASSED_ON},
        "cpu_product": None if product is None else str(product),
        "reuse": None if reuse is None else asdict(reuse),
        "kv_scratch_dir": None if options.kv_scratch_dir is None else str(options.kv_scratch_dir),
    }
    company.tell(words, plan.ranks.count)
    refused = [company.hear(rank)["refused"] for rank in range(1, plan.ranks.count)]
    for rank, why in enumerate(refused, 1):
        if why is not None:
            raise UserError(f"rank {rank}: {why}")


def accept(company: Company, words: dict[str, Any], checkpoint: Path | None) -> Opening | None:
    """What rank 0 opens, where this rank has the same; else it is told why not. ``checkpoint`` is this rank's own, if it was given one."""
    where = Path(words["checkpoint"]) if checkpoint is None else checkpoint
    refused = _differs(company, words, where)
    company.answer({"refused": refused})
    if refused is not None:
        return None
    product, scratch = words["cpu_product"], words["kv_scratch_dir"]
    shared = {"cpu_product": product and CpuProduct(product), "kv_scratch_dir": scratch and Path(scratch)}
    return Opening(plan_of_text(words["plan"]), where, words["options"] | shared, words["reuse"] and ReuseConfig(**words["reuse"]))


def _differs(company: Company, words: dict[str, Any], checkpoint: Path) -> str | None:
    """Why this rank cannot open what rank 0 does; None where it can."""
    if words["version"] != (here := installed("penstock")):
        return f"penstock {here} is installed here, rank 0 has {words['version']}; install the same"
    if None not in (company.identity, words["identity"]) and company.identity != words["identity"]:
        return "the plan here is not rank 0's (their digests differ); give all ranks the same plan="
    try:
        digest = spec_from_checkpoint(checkpoint).digest
    except UserError as error:
        return str(error)
    if digest != words["digest"]:
        return f"{checkpoint} holds other weights than rank 0's checkpoint (their digests differ); copy the same files"
    return None
