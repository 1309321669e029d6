"""How many ranks a plan is for, and what the others decide beside the first one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.given.dealt import ExpertShare
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.workload import Workload
from penstock.planner.contract.ranks.dealing import Dealing
from penstock.planner.contract.ranks.rank_model import never_dealt, never_sliced, never_spilled


@dataclass(frozen=True)
class Ranks:
    """``count`` processes that a model's layers are dealt over, as :class:`penstock.planner.contract.ranks.dealing.Dealing` has it."""

    count: int = 1
    others: tuple[Decisions, ...] = ()
    """Of the ranks behind the first one, whose decisions are the plan's own. Batch and passes are the same for all."""
    layers: tuple[int, ...] = ()
    """Of each rank, so many; empty where they are dealt evenly."""
    share: ExpertShare = ExpertShare.whole
    """Of routed experts."""

    @classmethod
    def of(cls, decided: Sequence[Decisions], dealing: Dealing) -> Ranks:
        """That decide ``decided``, each with its layers by ``dealing``."""
        return cls(dealing.count, tuple(decided[1:]), () if dealing.is_even else dealing.counts, dealing.share)

    def dealing(self, layers: int) -> Dealing:
        """Of the ``layers`` of a whole model."""
        return Dealing(self.layers, self.share) if self.layers else Dealing.even(self.count, layers, self.share)

    def decided(self, first: Decisions) -> Sequence[Decisions]:
        """Of all ranks, where the first one's are ``first``."""
        return first, *self.others


def check_alone(ranks: Ranks, plan: str, what: str) -> None:
    """UserError where the file ``plan`` is for several ranks, and ``what`` works on one alone."""
    if ranks.count > 1:
        raise UserError(f"plan={plan}: is for {ranks.count} ranks, and {what} works on one alone yet; solve again with ranks=1")


def check_ranks(
    hardware: HardwareProfile, model: ModelSpec, workload: Workload, count: int, share: ExpertShare = ExpertShare.whole
) -> None:
    """UserError where ``count`` ranks of ``hardware`` cannot share ``model`` for ``workload``, with the remedy."""
    if count < 1:
        raise UserError(f"ranks={count}: must be 1 or more; set ranks=1, or leave it out")
    _check_hosts(hardware, count)
    if count == 1:
        return
    asked, each = f"ranks={count}", f" on each of {hardware.hosts} hosts" * (hardware.hosts > 1)
    cards, cores = hardware.cards * hardware.hosts, hardware.cpu_cores * hardware.hosts
    if hardware.gpu is not None and count > cards:
        raise UserError(
            f"{asked}: {hardware.name} has {hardware.cards} GPU{'s' * (hardware.cards > 1)} for plans{each}; set {_at_most(cards)} "
            "and solve again, or name more GPUs by hardware.devices="
        )
    if hardware.gpu is None and count > cores:
        raise UserError(f"{asked}: hardware.cpu.cores={hardware.cpu_cores}{each}, and each rank needs one; set {_at_most(cores)}")
    if count > min(model.layers, model.vocab):
        raise UserError(f"{asked}: {model.name} has {model.layers} layers, and each rank needs one; set {_at_most(model.layers)}")
    if why := never_dealt(model):
        raise UserError(f"{asked}: {model.name} runs on one rank, since {why}; set ranks=1")
    if share is ExpertShare.sliced and (why := never_sliced(model, count)):
        raise UserError(f"moe.share=sliced: {why}; set moe.share=whole")
    if workload.kv_spill and (why := never_spilled(model)):
        raise UserError(f"{asked}: with workload.kv_spill=true {why}; set ranks=1, or leave workload.kv_spill out")


def _check_hosts(hardware: HardwareProfile, count: int) -> None:
    hosts = hardware.hosts
    if hosts == 1:
        return
    if hardware.network is None:
        raise UserError(
            f"hardware.hosts={hosts}: how fast their network is, is not known; measure it (`planner probe probe.peers=HOST:PORT`,"
            " docs/ranks.md), or set hardware.network.gbps="
        )
    if count % hosts:
        raise UserError(f"ranks={count}: hardware.hosts={hosts}, with as many ranks on each; set ranks={hosts}, or another multiple of it")


def _at_most(ranks: int) -> str:
    """There is nothing below one rank."""
    return f"ranks={ranks} or fewer" if ranks > 1 else "ranks=1"
