"""The modes of the benchmark, each as a plan in which the solver was forced to put weights where the mode says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from penstock.planner.common.errors import UserError, nearest
from penstock.planner.contract.config.config_schema import SolveConfig
from penstock.planner.contract.config.resolve import model_from, workload_from
from penstock.planner.contract.config.resolve_hardware import hardware_from
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.decided.placement import head_blocks
from penstock.planner.contract.experts.expert_slots import fewest_slots
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.rules.limits import LIMITS
from penstock.runtime.tools.solving import NoPlan, solve


class NotHere(UserError):
    """A mode that cannot be on this machine, and why."""


@dataclass(frozen=True)
class Setting:
    """What every mode starts from."""

    cfg: SolveConfig
    hardware: HardwareProfile
    model: ModelSpec
    best: Plan | NoPlan
    """The best plan with nothing forced but what the user did, or why there is none."""

    @property
    def gpu(self) -> bool:
        return self.hardware.gpu is not None

    def expert_slots(self, **shares: float) -> dict[str, int]:
        """Slots of each tier that is named for a share of all experts, but as many as there must be; none for a dense model."""
        experts = self.model.experts
        if experts is None:
            return {}
        return {f"expert_{tier}_slots": max(fewest_slots(experts), round(share * experts.units)) for tier, share in shares.items()}

    def plan(self, **forced: Any) -> Plan:
        """The best plan with ``forced`` decisions. NotHere when they contradict the user's, NoPlan when nothing fits."""
        for key, value in forced.items():
            wanted = getattr(self.cfg.force, key)
            if wanted is not None and wanted != value:
                raise NotHere(f"force.{key}={wanted} contradicts it: it needs {value}")
        return solve(replace(self.cfg, force=replace(self.cfg.force, **forced)))

    def plan_with_more_dram(self) -> Plan:
        """The best plan of a machine with room for all weights in DRAM, twice over for the cache's headroom."""
        hardware = replace(self.cfg.hardware, dram_bytes=self.hardware.dram_bytes + 2 * self.model.weight_bytes)
        return solve(replace(self.cfg, hardware=hardware))


def _full(setting: Setting) -> Plan:
    """Everything where it computes: in VRAM, or in DRAM without a GPU."""
    layers = setting.model.layers
    if not setting.gpu:
        return setting.plan(cap_layers=layers, **setting.expert_slots(dram=1.0))
    heads = head_blocks(setting.model)
    residents = {"resident_attn": layers, "resident_ffn": layers, "resident_head": heads}
    return setting.plan(**residents, embedding=Tier.vram, **setting.expert_slots(vram=1.0))


def _preload(setting: Setting) -> Plan:
    """The residents that the solver would choose if DRAM were no object, and all the rest in DRAM."""
    _needs_gpu(setting)
    roomy = setting.plan_with_more_dram()
    through = len(roomy.placement.dram_layers)
    if not roomy.placement.streamed_units and not roomy.prediction.experts_missed_vram:
        raise NotHere("everything fits in VRAM, so it is the same as full")
    kept = roomy.decisions.weights.vram.resident_units
    experts = setting.expert_slots(dram=1.0)
    if roomy.decisions.experts is not None:
        experts["expert_vram_slots"] = roomy.decisions.experts.vram_slots
    return setting.plan(cap_layers=through, resident_attn=kept.attn, resident_ffn=kept.ffn, resident_head=kept.head, **experts)


def _stream(setting: Setting) -> Plan:
    """Everything in DRAM, and every unit through the VRAM ring in every pass."""
    _needs_gpu(setting)
    experts = setting.expert_slots(vram=0.0, dram=1.0)
    return setting.plan(cap_layers=setting.model.layers, resident_attn=0, resident_ffn=0, resident_head=0, **experts)


def _mixed(setting: Setting) -> Plan:
    """The best plan for the budgets, if it reads the SSD; else one that keeps half as much in each tier as it could."""
    best = setting.best
    if isinstance(best, NoPlan):
        raise best
    if best.placement.ssd_layers or best.prediction.experts_missed_dram:
        return best
    if setting.model.experts is not None:
        return setting.plan(**setting.expert_slots(dram=0.5))
    layers, kept = setting.model.layers, best.decisions.weights.vram.resident_units
    residents = {"resident_attn": min(kept.attn, layers // 2), "resident_ffn": min(kept.ffn, layers // 2)} if setting.gpu else {}
    through = layers - min(residents.values(), default=0)
    cap = min(through // 2, through - LIMITS.headroom_min - 1)
    if cap < 0:
        raise NotHere(f"{layers} layers are too few: a DRAM cache has room for {LIMITS.headroom_min} beside those that it keeps")
    roomiest = cap + LIMITS.headroom_max
    return setting.plan(cap_layers=cap, **residents, **({"hwm_layers": cap + LIMITS.headroom_min} if roomiest >= through else {}))


def _needs_gpu(setting: Setting) -> None:
    if not setting.gpu:
        raise NotHere("the CPU computes from DRAM, so it is the same as full")


MODES: dict[str, Callable[[Setting], Plan]] = {"full": _full, "preload": _preload, "stream": _stream, "mixed": _mixed}


def check_modes(names: list[str]) -> None:
    """UserError for a mode that is none, or for none at all."""
    for name in names:
        if name not in MODES:
            raise UserError(f"modes={name}: must be of {', '.join(MODES)}{nearest(name, MODES)}")
    if not names:
        raise UserError(f"modes=[]: nothing to measure; name some of {', '.join(MODES)}")


def read_setting(cfg: SolveConfig) -> Setting:
    """UserError for a value of ``cfg`` that cannot be."""
    hardware, model = hardware_from(cfg.hardware), model_from(cfg.model)
    workload_from(cfg.workload)
    Force.from_config(cfg.force, cfg.moe)
    best: Plan | NoPlan
    try:
        best = solve(cfg)
    except NoPlan as reason:
        best = reason
    return Setting(cfg, hardware, model, best)
