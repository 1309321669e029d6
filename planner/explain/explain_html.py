"""An explanation as one HTML page that needs nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from penstock.planner.common.measures import show_bytes, show_seconds
from penstock.planner.contract.plan.tier_fill import Fill, fills
from penstock.planner.explain.explain_table import EXPLAINED, SIMPLE, seconds_more, signed, standing, value_text
from penstock.planner.explain.explanation import Explanation, advice, step_text
from penstock.planner.render.stage_names import stage_names
from penstock.planner.render.step_lanes import KINDS, lanes
from penstock.planner.render.svg import COLOURS, change_picture, lack_picture, look_of, look_of_item, step_picture, tiers_picture
from penstock.planner.solver.impossible import Impossible, shown_gb

STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1d2733; --dim: #66717e; --line: #d5dae0; --free: #eef1f4; --left: #b4bbc4;
  --good: #2a7f51; --bad: #b84a34; --in: #fff;
  --c0: #3f73a8; --c1: #4d7d2e; --c2: #24797a; --c3: #7d5fa5; --c4: #9a5f2c; --c5: #6b6b2e; --c6: #9a4772; --c7: #5a6b8f }
@media (prefers-color-scheme: dark) { :root { --back: #14181d; --text: #dfe5eb; --dim: #95a0ac; --line: #333b45; --free: #222931;
  --left: #5a636d; --good: #52b784; --bad: #e07a62; --in: #0f1317;
  --c0: #78a9dc; --c1: #94c46f; --c2: #63bcbc; --c3: #b699d8; --c4: #dca06c; --c5: #b8b870; --c6: #d68ab0; --c7: #94a6cc } }
body { margin: 2rem auto; padding: 0 1rem; max-width: 52rem; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin-bottom: 0.2rem } h2 { font-size: 1.1rem; margin: 2rem 0 0.5rem }
p.dim, caption, footer { color: var(--dim); font-size: 0.9rem } .warn { color: var(--bad) } .buy { font-weight: 600 }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: 0.2rem 0.6rem 0.2rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
th { color: var(--dim); font-weight: normal } td.n, th.n { text-align: right }
tr.binds td { font-weight: 600 } tr.slack td { color: var(--dim) }
svg { width: 100%; height: auto; display: block; font: 11px system-ui, sans-serif } svg text { fill: var(--text) }
svg text.name { fill: var(--dim) } svg text.in { fill: var(--in) } svg text.last { text-anchor: end } svg text.mid { text-anchor: middle }
svg text.bad { fill: var(--bad) } svg .axis { stroke: var(--dim); stroke-width: 1 }
rect { shape-rendering: crispEdges } rect.free { fill: var(--free) } rect.left { fill: var(--left) }
rect.good { fill: var(--good) } rect.bad { fill: var(--bad) }
rect.seam { stroke: var(--back); stroke-width: 0.6 }
ul.legend { list-style: none; margin: 0.3rem 0 0.8rem; padding: 0; font-size: 0.85rem }
ul.legend li { display: inline-block; margin-right: 1rem }
ul.legend i { display: inline-block; width: 0.8em; height: 0.8em; margin-right: 0.35em; background: var(--free) }
ul.legend i.left { background: var(--left) }
""" + "\n".join(f"rect.c{i} {{ fill: var(--c{i}) }} ul.legend i.c{i} {{ background: var(--c{i}) }}" for i in range(COLOURS))


def explanation_page(explanation: Explanation) -> str:
    """The whole page."""
    e, plan = explanation, explanation.plan
    work, drawn = plan.workload, lanes(plan)
    body = [
        f"<h1>{escape(plan.model.name)} on {escape(plan.hardware.name)}</h1>",
        _p(f"{work.name}: {work.prompt_tokens} prompt and {work.new_tokens} new tokens, batch {plan.decisions.batch}, "
           f"for {work.objective}. All figures are predictions.", "dim"),
        *(_p(f"This plan breaks a rule: {rule}. What follows is about the program's own plan.", "warn") for rule in e.broken),
        _p(standing(e)),
        "<h2>What to buy next</h2>", *(_p(sentence, "" if n else "buy") for n, sentence in enumerate(advice(e))),
        "<h2>What one user more costs</h2>", *map(_p, e.one_more.sentences()),
        "<h2>Tiers, each filled to scale</h2>", tiers_picture(fills(plan)), *map(_legend, fills(plan)),
        "<h2>A decode step</h2>",
        step_picture(drawn, plan.prediction.decode_s_per_token, {str(stage): name for stage, name in stage_names(plan).items()}),
        _swatches("", [(look_of(kind), said) for kind, said in KINDS.items() if kind in {p.kind for lane in drawn for p in lane.parts}]),
        _p("Each stage works through its layers side by side with the others; the step lasts as long as the slowest.", "dim"),
        "<h2>What holds it back</h2>",
        _table(("", "", "used", ""), [
            (str(c.grip), (c.name, str(c.grip), f"{c.share:.0%}", c.note)) for c in e.constraints
        ], (2,)),
        "<h2>What each resource is worth</h2>",
        change_picture([(m.resource.name, -m.gain, m.loss) for m in e.margins]),
        _table(("", "has", "step", "saved per unit and token", "a step more", "a step less"), [
            ("binds" if m.binds else "", (
                m.resource.name, f"{m.amount:.4g} {m.resource.unit}", step_text(m),
                f"{show_seconds(max(0.0, m.value_s) if m.gained_s > 1e-9 * m.base.token_s else 0.0)} per {m.resource.unit}",
                signed(-m.gain), signed(m.loss),
            )) for m in e.margins
        ], (1, 2, 3, 4, 5)),
        "<h2>What each decision costs at its neighbours</h2>",
        _table(("", "decided", "forced", "a token", "all"), [
            ("", (
                n.key, value_text(n.key, n.decided), "as in the plan" if n.is_decided else value_text(n.key, n.value),
                n.why if n.lost_s is None else seconds_more(n.lost_s, n.base.token_s), "" if n.lost_s is None else signed(n.loss),
            )) for n in e.neighbours
        ], (1, 2, 3, 4)),
        _p(SIMPLE if e.is_simple else EXPLAINED, "dim"),
    ]  # fmt: skip
    return _page(f"{plan.model.name} on {plan.hardware.name}", body)


def impossible_page(impossible: Impossible) -> str:
    """The page where no plan fits."""
    p = impossible.problem
    body = [
        f"<h1>{escape(p.model.name)} on {escape(p.hardware.name)}</h1>",
        _p("No plan fits.", "warn"),
        _p(impossible.refusal, "dim"),
        "<h2>What is short</h2>",
        lack_picture([(s.tier.upper(), s.capacity_bytes, s.together_bytes) for s in impossible.shortages]),
        _table(("", "has", "lacks", "lacks alone"), [
            ("binds" if s.together_bytes else "", (
                s.tier.upper(), show_bytes(s.capacity_bytes), shown_gb(s.together_bytes) if s.together_bytes else "-",
                "more of it alone does not help" if s.alone_bytes is None else shown_gb(s.alone_bytes) if s.alone_bytes else "-",
            )) for s in impossible.shortages
        ], (1, 2, 3)),
        "<h2>What would fit, the cheapest first</h2>",
        _table(("", "a token", "prefill"), [
            ("", (r.change, *(("-", "-") if r.found is None else (show_seconds(r.found.token_s), show_seconds(r.found.prefill_s)))))
            for r in impossible.remedies
        ], (1, 2)),
    ]  # fmt: skip
    return _page(f"{p.model.name} on {p.hardware.name}: no plan fits", body)


def _page(title: str, body: Iterable[str]) -> str:
    content = "\n".join(body)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{content}\n"
        "<footer><p>Made by planner explain.</p></footer>\n</body>\n</html>\n"
    )


def _p(text: str, look: str = "") -> str:
    return f'<p class="{look}">{escape(text)}</p>' if look else f"<p>{escape(text)}</p>"


def _legend(fill: Fill) -> str:
    items = [(look_of_item(name, at), f"{name.replace('_', ' ')} {show_bytes(n)}") for at, (name, n) in enumerate(fill.items.items())]
    items.append(("", f"free {show_bytes(max(0, fill.free_bytes))}"))
    return _swatches(f"{fill.tier.upper()} {show_bytes(fill.capacity_bytes)}:", items)


def _swatches(title: str, items: Iterable[tuple[str, str]]) -> str:
    """(class of the colour, what it means)."""
    head = f"<li>{escape(title)}</li>" if title else ""
    return f'<ul class="legend">{head}{"".join(f"<li><i class={look or chr(34) * 2}></i>{escape(said)}</li>" for look, said in items)}</ul>'


def _table(head: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], figures: Sequence[int]) -> str:
    """``rows`` are (class, cells); ``figures`` are the columns that stand to the right."""

    def cells(tag: str, texts: Sequence[str]) -> str:
        return "".join(f"<{tag}{' class=n' if at in figures else ''}>{escape(text)}</{tag}>" for at, text in enumerate(texts))

    lines = "\n".join(f'<tr class="{look}">{cells("td", texts)}</tr>' for look, texts in rows)
    return f"<table>\n<tr>{cells('th', head)}</tr>\n{lines}\n</table>"
