"""Cards of a machine that are unlike the one that is probed: one of each kind is measured in its turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.planner.common.origins import unmeasured
from penstock.planner.contract.config.config_schema import CardConfig
from penstock.planner.probe.card_figures import NEEDED, card_config, measure_card, peak_gbps
from penstock.planner.probe.dram_rates import Arena
from penstock.planner.probe.findings import CannotMeasure, Figure, Findings
from penstock.planner.probe.gpu_rates import Gpu

OTHERS = "others"
"""Where the profile says how they were measured, or why some were not."""


@dataclass(frozen=True)
class OtherCard:
    """One of them: what the profile says, and GB/s of its link alone."""

    config: CardConfig
    peak_gbps: float


def measure_others(
    found: Findings,
    gpu: Gpu,
    arena: Arena | None,
    seconds: float,
    more: Callable[[Findings, Gpu], None],
    open_card: Callable[[int], Gpu],
) -> list[OtherCard]:
    """Of each kind but ``gpu``'s its first card, opened by ``open_card``, each figure within about ``seconds``; ``more`` measures what else
    a profile says of a card. All cards of a kind are taken to be like it. A card of which a plan cannot do without some figure is left out;
    its reason is in ``found``. Afterwards ``gpu`` is the card in use again. Takes a CUDA context on each of those cards.
    """
    measured, said, lacking = list[OtherCard](), list[str](), list[str]()
    for name, numbers in gpu.kinds().items():
        if name == gpu.name:
            continue
        what = f"GPU {', '.join(map(str, numbers))} {name}"
        own = Findings(found.date)
        try:
            other = open_card(numbers[0])
            own.attempt(("gpu.name", "gpu.context_bytes", "vram_bytes"), other.identity)
            measure_card(own, other, arena, seconds)
            more(own, other)
            other.leave()
        except (CannotMeasure, RuntimeError, OSError) as error:
            lacking.append(f"{what}: {(str(error).strip().splitlines() or [type(error).__name__])[0]}")
            continue
        finally:
            gpu.use()
        why = unmeasured(own.origin)
        if missing := [path for path in NEEDED if path in why]:
            lacking.append(f"{what}: {missing[0]}: {why[missing[0]]}")
            continue
        config = card_config(other, own)
        measured += [OtherCard(CardConfig(number, int(own.number("vram_bytes")), config), peak_gbps(own)) for number in numbers]
        said.append(f"{what}: {own.how('gpu.name')}; each figure as that of gpu" + _but(why))
    if measured:
        found.add(Figure(OTHERS, [other.config.device for other in measured], "; ".join([*said, *(f"without {why}" for why in lacking)])))
    elif lacking:
        found.lack((OTHERS,), "; ".join(lacking))
    return measured


def _but(why: Mapping[str, str]) -> str:
    return f", but for {', '.join(f'{path} ({reason})' for path, reason in why.items())}" if why else ""
