"""What the measured points say of a plan: regret, noise and rank correlation, as a document, as text and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy

from bench.neighbourhood import OURS, Point


def correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's: Pearson's of the ranks; equal values share the mean of theirs. None where either has but one value."""
    if len(set(a)) < 2 or len(set(b)) < 2:
        return None
    ranks = [[sorted(x).index(v) + (list(x).count(v) - 1) / 2 for v in x] for x in (a, b)]
    return float(numpy.corrcoef(ranks)[0, 1])


def document(points: Sequence[Point], where: Mapping[str, Any]) -> dict[str, Any]:
    """Per regime what :func:`verdict` says, the rank correlation over all points, then every point, also those without a figure."""
    budgets = {regime: verdict([p for p in points if p.regime == regime]) for regime in dict.fromkeys(p.regime for p in points)}
    return {
        "machine": dict(where),
        "budgets": budgets,
        "rank_correlation": _ranked(_measured(points)),
        "points": [_row(point) for point in points],
    }


def verdict(points: Sequence[Point]) -> dict[str, Any]:
    """One regime's figures: ``regret`` by the medians of the shuffled repeats; ``regret_beyond_noise`` what is left of it when the plan's
    fastest repeat stands against the best point's slowest; ``regret_of_finals`` by the repeats that came after the best was known, which
    luck did not choose. Noise: the spread of the repeats over their median."""
    measured = _measured(points)
    plan = next((p for p in measured if p.name == OURS), None)
    facts: dict[str, Any] = {"points": len(measured), "without_figure": len(points) - len(measured)}
    if plan is None:
        return facts
    best = min(measured, key=lambda p: p.measured_s)
    finals = [median(p.finals_s) for p in measured if p.finals_s and p is not plan]
    ours = median(plan.finals_s) if plan.finals_s else None
    return facts | {
        "regret": plan.measured_s / best.measured_s,
        "best": best.name,
        "regret_beyond_noise": max(1.0, min(plan.steps_s + plan.finals_s) / max(best.steps_s + best.finals_s)),
        "regret_of_finals": ours / min(ours, *finals) if ours and finals else None,
        "noise": _spread(plan),
        "noise_of_best": _spread(best),
        "rank_correlation": _ranked(measured),
        "predicted_over_measured": plan.predicted_s / plan.measured_s,
    }


def _measured(points: Sequence[Point]) -> list[Point]:
    return [p for p in points if p.steps_s]


def _spread(point: Point) -> float:
    steps = point.steps_s + point.finals_s
    return (max(steps) - min(steps)) / median(steps)


def _ranked(points: Sequence[Point]) -> float | None:
    return correlation([p.predicted_s for p in points], [p.measured_s for p in points])


def _row(point: Point) -> dict[str, Any]:
    row = {
        "budget": point.regime,
        "name": point.name,
        "peer": point.peer,
        "predicted_s": point.predicted_s,
        "measured_s": point.measured_s,
        "predicted_over_measured": point.predicted_s / point.measured_s if point.steps_s else None,
        "steps_s": point.steps_s,
        "finals_s": point.finals_s,
        "predicted_prefill_s": point.predicted_prefill_s,
        "prefills_s": point.prefills_s,
    }
    return row if point.error is None else row | {"error": point.error}


def show(made: Mapping[str, Any]) -> None:
    """Print a line for each point and each regime."""
    for row in made["points"]:
        print(f"{row['budget']:16} {row['name']:40} {_figures(row)}")
    for budget, facts in made["budgets"].items():
        print(f"{budget}: {_told(facts)}")
    print(f"rank correlation of all {sum(f['points'] for f in made['budgets'].values())} points: {_number(made['rank_correlation'])}")


def _figures(row: Mapping[str, Any]) -> str:
    error = f"  {row['error']}" if "error" in row else ""
    if not row["steps_s"]:
        return f"        - {error}"
    spread = f"{min(row['steps_s']):.4f}-{max(row['steps_s']):.4f}"
    return f"{row['measured_s']:9.4f} s  {spread:16} predicted {row['predicted_s']:8.4f} {row['predicted_over_measured']:6.3f}{error}"


def _told(facts: Mapping[str, Any]) -> str:
    counted = f"{facts['points']} points" + (f", {facts['without_figure']} without a figure" if facts["without_figure"] else "")
    if "regret" not in facts:
        return f"the plan was not measured, {counted}"
    return (
        f"regret {facts['regret']:.3f} (best: {facts['best']}), beyond noise {facts['regret_beyond_noise']:.3f}, "
        f"of finals {_number(facts['regret_of_finals'])}, noise {facts['noise']:.3f} (the best's {facts['noise_of_best']:.3f}), {counted}, "
        f"rank correlation {_number(facts['rank_correlation'])}, predicted/measured {facts['predicted_over_measured']:.3f}"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def draw(points: Sequence[Point], made: Mapping[str, Any], path: Path) -> None:
    """Above: measured over predicted, a panel for each regime, both logarithmic. Below: how much longer than the best the plan and the
    peers' placements take, bars from the fastest to the slowest repeat."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    regimes = [r for r, facts in made["budgets"].items() if facts["points"]]
    figure, rows = pyplot.subplots(2, max(1, len(regimes)), figsize=(4.6 * max(1, len(regimes)), 8), squeeze=False)
    for k, regime in enumerate(regimes):
        here = [p for p in _measured(points) if p.regime == regime]
        _scatter(rows[0][k], here)
        correlated = _number(made["budgets"][regime]["rank_correlation"])
        rows[0][k].set_title(f"{regime}: {len(here)} points\nrank correlation {correlated}", fontsize=10)
        _bars(rows[1][k], here)
    rows[0][0].set_ylabel("measured, s a token of all requests")
    rows[1][0].set_ylabel("times the best point's")
    figure.suptitle(f"{made['machine'].get('gpu') or 'CPU'}: a plan among its neighbours")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _scatter(axes: Any, points: Sequence[Point]) -> None:
    kinds = (
        ("neighbours", "o", 22, "C0", [p for p in points if not p.peer and p.name != OURS]),
        ("peers' placements, run by this engine", "^", 50, "C1", [p for p in points if p.peer]),
        (OURS, "*", 190, "C2", [p for p in points if p.name == OURS]),
    )
    for label, marker, size, colour, some in kinds:
        x, y = [p.predicted_s for p in some], [p.measured_s for p in some]
        axes.scatter(x, y, s=size, marker=marker, color=colour, edgecolors="black", linewidths=0.4, label=label)
    both = [s for p in points for s in (p.predicted_s, p.measured_s)]
    ends = [min(both) / 1.1, max(both) * 1.1]
    axes.plot(ends, ends, color="grey", linewidth=1, zorder=0)
    axes.set(xscale="log", yscale="log", xlabel="predicted, s", xlim=ends, ylim=ends)
    _name_ticks(axes, ends)
    axes.legend(fontsize=8)


def _name_ticks(axes: Any, ends: Sequence[float]) -> None:
    """A few round figures within ``ends``: a logarithmic axis of less than a decade would have none, or too many."""
    figures = [m * 10.0**e for e in range(-5, 4) for m in (1, 1.5, 2, 3, 5, 7)]
    ticks = [f for f in figures if ends[0] <= f <= ends[1]]
    ticks = ticks[:: 1 + len(ticks) // 7]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, [f"{t:g}" for t in ticks])
        axis.set_ticks([], minor=True)


def _bars(axes: Any, points: Sequence[Point]) -> None:
    best = min(p.measured_s for p in points)
    shown = [p for p in points if p.name == OURS or p.peer]
    shown += [p for p in sorted(points, key=lambda p: p.measured_s) if p not in shown][:3]
    values = [p.measured_s / best for p in shown]
    low = [v - min(p.steps_s) / best for v, p in zip(values, shown, strict=True)]
    high = [max(p.steps_s) / best - v for v, p in zip(values, shown, strict=True)]
    colours = ["C2" if p.name == OURS else "C1" if p.peer else "C0" for p in shown]
    axes.bar(range(len(shown)), values, color=colours, yerr=[low, high], capsize=3)
    axes.axhline(1, color="grey", linewidth=1)
    for k, value in enumerate(values):
        axes.annotate(f"{value:.3f}", (k, 0), xytext=(0, 4), textcoords="offset points", ha="center", fontsize=8, color="white")
    axes.set_xticks(range(len(shown)), [p.name.split(":")[0] for p in shown], rotation=30, ha="right", fontsize=8)
