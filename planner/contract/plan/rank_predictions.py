"""What a plan of several ranks promises: of each rank, and of all together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from penstock.planner.contract.bills.cost import Prediction, drafter_alone, objective_weights, predict, with_wait
from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.workload import Workload
from penstock.planner.contract.prices.price import Resource
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
    """Of each rank, as if all were like it. All wait while the first one's model drafts.

    Ranks wait for whole experts of their own layers in turn, so their waits add up. Of ranks that have l of the L layers that route, a
    phase lasts as long as the slowest link or drive, or as

        sum over ranks of l / L * seconds
    """
    found: dict[object, Prediction] = {}
    each, drafting = [], drafter_alone(*terms[0])
    for hardware, model, workload, decisions in terms:
        alike = (model.units, model.vocab, decisions, hardware.dram_bytes, hardware.devices if hardware.round_cards else None)
        if alike not in found:
            found[alike] = predict(hardware, model, workload, decisions, drafting)
        each.append(found[alike])
    dealt = terms[0][1].dealt
    return tuple(each) if dealt is None or not dealt.routed or dealt.slices > 1 else _in_turn(terms, each)


def _in_turn(terms: Sequence[Terms], each: Sequence[Prediction]) -> tuple[Prediction, ...]:
    """``each``, of ranks with whole experts of their own layers."""
    shares = [len(model.moe) for _, model, _, _ in terms]
    mean = {
        name: sum(share * getattr(one, name) for share, one in zip(shares, each, strict=True)) / sum(shares)
        for name in ("prefill_s", "decode_s_per_token", "ttft_s")
    }
    found = []
    for (_, _, workload, decided), one in zip(terms, each, strict=True):
        prefill_s = min(one.prefill_s, max(mean["prefill_s"], _outside_card(one.prefill_stages)))
        decode_s = min(one.decode_s_per_token, max(mean["decode_s_per_token"], _outside_card(one.decode_stages)))
        weights = objective_weights(workload, decided.batch, decided.prefill_chunk_tokens)
        total_s = with_wait(workload, decided.batch, weights[0] * prefill_s + weights[1] * decode_s)
        seconds = {"prefill_s": prefill_s, "decode_s_per_token": decode_s, "total_s": total_s}
        rate = one.decode_tokens_per_s * one.decode_s_per_token / decode_s
        found.append(replace(one, **seconds, ttft_s=min(one.ttft_s, mean["ttft_s"]), decode_tokens_per_s=rate))
    return tuple(found)


def _outside_card(stages: Mapping[str, float]) -> float:
    """The longest of what works while other ranks compute."""
    return max((seconds for name, seconds in stages.items() if name != Resource.card), default=0.0)


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
