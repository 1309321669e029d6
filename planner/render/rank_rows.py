"""Which rank has what, as rows: its layers in the ring, its rows of the LM head, its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from penstock.planner.common.console import print_head, print_line
from penstock.planner.common.measures import show_bytes
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.ranks.dealing import Dealing

_LAYERS_DRAWN = 32
_STAYS, _STREAMS, _OTHERS = "█", "▒", "·"


@dataclass(frozen=True)
class Share:
    """What one rank has."""

    layers: tuple[int, ...]
    """By their numbers in the whole model."""
    streams: frozenset[int]
    """Those of which something comes over the link, or from the drive, in each pass."""
    rows: range
    """Of the LM head."""
    host: int | None
    """The number of its host; None where there is only one."""
    device: int | None
    """The number of its card; None without cards."""
    vram_bytes: int
    dram_bytes: int
    h2d_bytes_per_token: int


def shares(plan: Plan) -> tuple[Share, ...]:
    """Of each rank; none where there is only one."""
    if plan.ranks.count == 1:
        return ()
    dealing = plan.dealing
    on_host = plan.ranks.count // plan.hardware.hosts
    hosts = [None if plan.hardware.hosts == 1 else rank // on_host for rank in range(plan.ranks.count)]
    return tuple(_share(one, dealing, rank, plan.model.vocab, hosts[rank]) for rank, one in enumerate(plan.each_rank))


def _share(one: Plan, dealing: Dealing, rank: int, vocab: int, host: int | None) -> Share:
    mine, placement, p = dealing.of(rank), one.placement, one.prediction
    stays = Tier.vram if one.hardware.gpu else Tier.dram
    streams = frozenset(mine[i] for i, pair in enumerate(zip(placement.attn, placement.ffn, strict=True)) if pair != (stays, stays))
    device = None if one.hardware.gpu is None else (one.hardware.devices or (rank,))[0]
    return Share(mine, streams, dealing.vocab_rows(rank, vocab), host, device, p.vram_bytes, p.dram_bytes, p.h2d_bytes_per_token)


def print_ranks(plan: Plan, console: Console) -> None:
    """A row for each rank: the ring that a token goes round, and what lies where. Nothing of one rank alone."""
    found = shares(plan)
    if not found:
        return
    layers = plan.model.layers
    print_head(console, "Ranks", f", {_dealt(plan)}: {_STAYS} stays, {_STREAMS} streams")
    for rank, share in enumerate(found):
        print_line(console, Text(f"  rank {rank:<6} ").append(_ring(share, layers), "cyan").append("  " + ", ".join(_holds(share)), "dim"))


def _dealt(plan: Plan) -> str:
    if plan.dealing.is_even:
        return f"layer i on rank i mod {plan.ranks.count}"
    return "so that all end together" if plan.drafter is None else "so that all end together beside the drafter on rank 0"


def _ring(share: Share, layers: int) -> str:
    """The first layers, in the order of a pass."""
    mine = frozenset(share.layers)
    drawn = "".join(_OTHERS if i not in mine else _STREAMS if i in share.streams else _STAYS for i in range(min(layers, _LAYERS_DRAWN)))
    return drawn + " …" * (layers > _LAYERS_DRAWN)


def _holds(share: Share) -> Iterator[str]:
    yield f"{len(share.layers)} layers"
    if share.host is not None:
        yield f"host {share.host}"
    if share.device is None:
        yield show_bytes(share.dram_bytes)
        return
    yield f"{show_bytes(share.h2d_bytes_per_token)} a token"
    yield f"GPU {share.device}"
