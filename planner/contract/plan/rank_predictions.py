"""What a plan of several ranks promises: of each rank, and of all together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.workload import Workload
from penstock.planner.contract.prices.cost import Prediction, predict
from penstock.planner.contract.ranks.dealing import Dealing
from penstock.planner.contract.ranks.host_shares import host_shares
from penstock.planner.contract.ranks.rank_model import model_of_rank
from penstock.planner.contract.ranks.rank_share import share_of_rank

_SUMMED = ("ssd_bytes_per_token", "h2d_bytes_per_token", "dram_bytes", "ssd_bytes")
_LONGEST = ("load_s", "ttft_s", "prefill_s", "decode_s_per_token", "total_s")


def predict_ranks(
    hardware: HardwareProfile, model: ModelSpec, workload: Workload, decided: Sequence[Decisions], dealing: Dealing | None = None
) -> Prediction:
    """Of all ranks together, each by its ``decided``: a phase lasts as long as that of the slowest rank. Bytes that links carry, and those
    of DRAM and SSD, are sums. ``vram_bytes`` are those of the card that has most. None deals
    evenly. Costs a prediction for each kind of rank."""
    return together(predict_each(rank_terms(hardware, model, workload, decided, dealing)))


Terms = tuple[HardwareProfile, ModelSpec, Workload, Decisions]


def rank_terms(
    hardware: HardwareProfile, model: ModelSpec, workload: Workload, decided: Sequence[Decisions], dealing: Dealing | None = None
) -> tuple[Terms, ...]:
    """What each rank's plan is of: its share of the machine, its part of the model, the work, what it decides."""
    count = len(decided)
    if count == 1:
        return ((hardware, model, workload, decided[0]),)
    dealing = dealing or Dealing.even(count, model.layers)
    shares = host_shares(hardware, model, dealing)
    return tuple(
        (share_of_rank(hardware, count, rank, shares[rank]), model_of_rank(model, dealing, rank), workload, decisions)
        for rank, decisions in enumerate(decided)
    )


def predict_each(terms: Sequence[Terms]) -> tuple[Prediction, ...]:
    """Of each rank, as if all were like it."""
    found: dict[object, Prediction] = {}
    each = []
    for hardware, model, workload, decisions in terms:
        alike = (model.units, model.vocab, decisions, hardware.dram_bytes, hardware.devices if hardware.round_cards else None)
        if alike not in found:
            found[alike] = predict(hardware, model, workload, decisions)
        each.append(found[alike])
    return tuple(each)


def together(each: Sequence[Prediction]) -> Prediction:
    """Of a plan whose ranks promise ``each``."""
    if len(each) == 1:
        return each[0]
    slowest, prefilling = max(each, key=lambda p: p.decode_s_per_token), max(each, key=lambda p: p.prefill_s)
    return replace(
        paced(slowest, each),
        bottleneck_prefill=prefilling.bottleneck_prefill,
        prefill_stages=_longest(p.prefill_stages for p in each),
        decode_stages=_longest(p.decode_stages for p in each),
        vram_bytes=max(p.vram_bytes for p in each),
        **{name: sum(getattr(p, name) for p in each) for name in _SUMMED},
    )


def paced(one: Prediction, each: Sequence[Prediction]) -> Prediction:
    """``one`` rank's, in the seconds that all of ``each`` take together: nobody is ahead of the slowest."""
    seconds = {name: max(getattr(p, name) for p in each) for name in _LONGEST}
    return replace(one, decode_tokens_per_s=min(p.decode_tokens_per_s for p in each), **seconds)


def _longest(stages: Iterable[dict[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in stages:
        for name, seconds in one.items():
            found[name] = max(found.get(name, 0.0), seconds)
    return found
