"""Draws `speculation.png` of `speculation.md` beside itself, from plans: python docs/speculation_picture.py. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

import penstock
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.speculating import MOST_DRAFTS, Drafter, Speculation
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.stages import MixedPass
from penstock.planner.contract.serving.pass_prices import PassPrices
from penstock.planner.contract.speculation.drafting import expected_tokens

INK, GRID = "#1f2937", "#e2e8f0"
COLOURS = ("#862e9c", "#1864ab", "#2b8a3e", "#d9480f")
ACCEPTANCES = (0.9, 0.8, 0.6, 0.3)
ROWS, KEPT = (1, 4, 16, 32), 0.6
DRAFTS = range(MOST_DRAFTS + 1)


def by_acceptance(plan: Plan) -> Callable[[float, int], float]:
    """Tokens a second of ``plan`` with so many drafts, a share of which is kept."""

    def tokens_per_s(share: float, drafts: int) -> float:
        decisions = replace(plan.decisions, speculation=Speculation(Drafter.lookup, drafts, share) if drafts else Speculation())
        return predict(plan.hardware, plan.model, plan.workload, decisions).decode_tokens_per_s

    return tokens_per_s


def by_rows(plan: Plan) -> Callable[[float, int], float]:
    """Tokens a second of a server's ``plan`` over those without drafts, for so many rows."""
    prices, context = PassPrices(plan), plan.workload.prompt_tokens + plan.workload.new_tokens / 2

    def gain(rows: float, drafts: int) -> float:
        count = int(rows)
        pass_s = [prices.seconds(MixedPass(count, context, 0, 0.0, drafted=count * k)) for k in (0, drafts)]
        return expected_tokens(KEPT, drafts) * pass_s[0] / pass_s[1]

    return gain


def panel(ax: Axes, title: str, unit: str, names: Sequence[str], lines: Sequence[float], value: Callable[[float, int], float]) -> None:
    """A curve for each of ``lines``, over the drafts; a ring is where it is highest."""
    for name, line, colour in zip(names, lines, COLOURS, strict=True):
        points = [value(line, drafts) for drafts in DRAFTS]
        best = max(DRAFTS, key=points.__getitem__)
        ax.plot(DRAFTS, points, color=colour, linewidth=1.8, label=name)
        ax.plot(best, points[best], "o", color=colour, markerfacecolor="white", markersize=7)
    ax.set_title(title, fontsize=10, color=INK, loc="left")
    ax.set_xlabel("drafted tokens of a chain (k)", fontsize=9, color=INK)
    ax.set_ylabel(unit, fontsize=9, color=INK)
    ax.set_ylim(bottom=0)
    ax.set_xlim(0, MOST_DRAFTS + 0.4)
    ax.grid(color=GRID)
    ax.legend(fontsize=8, frameon=False)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def draw(path: Path) -> None:
    """The picture, as a PNG."""
    dense = penstock.solve(model="llama70b", hardware="rtx5080")
    routed = penstock.solve(model="mixtral8x7b", hardware="rtx4090")
    served = penstock.solve(model="llama8b", hardware="rtx4090", workload="serve")
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4))
    kept = [f"{share:.0%} kept" for share in ACCEPTANCES]
    panel(left, "70B, RTX 5080: the link binds", "tokens/s", kept, ACCEPTANCES, by_acceptance(dense))
    panel(middle, "Mixtral 8x7B, RTX 4090: each row visits experts", "tokens/s", kept, ACCEPTANCES, by_acceptance(routed))
    rows = ["1 row", *[f"{count} rows" for count in ROWS[1:]]]
    panel(right, f"8B served, RTX 4090: {KEPT:.0%} kept", "tokens/s over none drafted", rows, ROWS, by_rows(served))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(__file__).with_name("speculation.png"))
