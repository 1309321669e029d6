"""What one integer program is about, and the question that several of them answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.planner.contract.decided.decisions import CachePolicy, ResidentForms
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.experts.expert_misses import Misses
from penstock.planner.contract.given.dealt import ExpertShare
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.workload import Workload
from penstock.planner.contract.ranks.dealing import Dealing
from penstock.planner.contract.ranks.host_shares import host_shares
from penstock.planner.contract.ranks.rank_model import model_of_rank
from penstock.planner.contract.ranks.rank_share import share_of_rank


@dataclass(frozen=True)
class Problem:
    """What one program is about. ``policy``, ``batch`` and ``forms`` are fixed in it."""

    hardware: HardwareProfile
    model: ModelSpec
    workload: Workload
    force: Force
    policy: CachePolicy
    batch: int
    forms: ResidentForms = ResidentForms()
    expected: Misses = Misses()
    """Experts that a decode step of its answer is expected to miss: by these numbers visits read or do not. That is not convex in slots."""


@dataclass(frozen=True)
class Question:
    """What is asked of the planner: which decisions are best here."""

    hardware: HardwareProfile
    model: ModelSpec
    workload: Workload
    force: Force = Force()
    ranks: int = 1
    """That the model is dealt over; machine and model are whole."""
    layers: tuple[int, ...] = ()
    """Of each rank, so many; empty where they are dealt evenly."""
    share: ExpertShare = ExpertShare.whole
    """Of routed experts, where there are several ranks."""
    taken: tuple[int, int] = (0, 0)
    """Bytes of VRAM and of DRAM that something beside the model has with the first of several ranks."""

    @property
    def dealing(self) -> Dealing:
        """Which rank has which layers. ValueError where there are more ranks than layers."""
        return Dealing(self.layers, self.share) if self.layers else Dealing.even(self.ranks, self.model.layers, self.share)

    @property
    def is_unlike(self) -> bool:
        """Whether it is of several ranks whose cards, or what these are left, or numbers of layers are unlike."""
        return self.ranks > 1 and (bool(self.hardware.others) or bool(self.layers) or any(self.taken))

    def of_rank(self, rank: int) -> Question:
        """What is asked of one rank; the same where there is one."""
        if self.ranks == 1:
            return self
        share = host_shares(self.hardware, self.model, self.dealing)[rank]
        hardware = share_of_rank(self.hardware, self.ranks, rank, share)
        if rank == 0:
            hardware = hardware.less(*self.taken)
        return replace(self, hardware=hardware, model=model_of_rank(self.model, self.dealing, rank), ranks=1, layers=(), taken=(0, 0))

    def kind_of(self, asked: Question) -> object:
        """Of ``asked``, the question of one of its ranks: ranks of a kind have one answer."""
        own = asked.hardware
        return asked.model.units, own.dram_bytes, own.vram_bytes, own.devices if self.hardware.others else None

    def on(self, hardware: HardwareProfile) -> Question:
        """The same on another machine."""
        return replace(self, hardware=hardware)
