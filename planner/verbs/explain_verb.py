"""`planner explain`: a plan's reasons as tables, JSON and a page."""

from __future__ import annotations

from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

from penstock.planner.asked.verb_schema import ExplainConfig
from penstock.planner.common.bars import make_bar
from penstock.planner.common.console import make_console
from penstock.planner.common.output import check_apart, writable, write_at_once, write_json
from penstock.planner.common.user_folder import user_path
from penstock.planner.contract.config.config_schema import SolveConfig, WorkloadConfig
from penstock.planner.contract.plan.planfile import read_plan
from penstock.planner.explain import explanation
from penstock.planner.explain.explain_html import explanation_page, impossible_page
from penstock.planner.explain.explain_table import print_explanation, print_impossible
from penstock.planner.explain.explanation import Explanation, check_share, explain, question_of
from penstock.planner.replay.routing_hits import RoutedModel
from penstock.planner.solver import impossible
from penstock.planner.solver.impossible import Impossible, explain_impossible
from penstock.planner.solver.infeasible import Infeasible
from penstock.planner.solver.planning import Asked, read_question


def explain_verb(cfg: ExplainConfig) -> None:
    """Explain and tell; the last line is one JSON document. Files are written when all is found."""
    check_share(cfg.step)
    check_apart({"plan": cfg.plan, "out": cfg.out, "html": cfg.html})
    for key, place in (("out", cfg.out), ("html", cfg.html)):
        if place is not None:
            writable(user_path(place), key)
    given = read_plan(user_path(cfg.plan)) if cfg.plan is not None else None
    asked = _asked(cfg) if given is None else Asked(question_of(given), RoutedModel(given.model))
    with make_bar(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()) as bar:
        task = bar.add_task("solving again", total=None)
        try:
            found: Explanation | Impossible = explain(asked.question, given, cfg.step, lambda k, n: bar.update(task, completed=k, total=n))
        except Infeasible as error:
            bar.update(task, description="looking for what would fit", total=None)
            found = explain_impossible(error)
    result = {"plan": cfg.plan, **_document(found)}
    if cfg.out is not None:
        write_json(user_path(cfg.out), "out", result)
    if cfg.html is not None:
        page = explanation_page(found) if isinstance(found, Explanation) else impossible_page(found)
        write_at_once(user_path(cfg.html), "html", lambda temporary: temporary.write_text(page, encoding="utf-8"))
    console = make_console()
    for note in (*cfg.notes, *asked.notes, *(() if given is None else given.notes)):
        console.print(f"note: {note}", style="dim", soft_wrap=True)
    if isinstance(found, Explanation):
        print_explanation(found, console)
    else:
        print_impossible(found, console)
    if cfg.html is not None:
        console.print(f"\nwrote {cfg.html}; open it in a browser", soft_wrap=True)
    cfg.close(result)


def _document(found: Explanation | Impossible) -> dict[str, Any]:
    return explanation.document(found) if isinstance(found, Explanation) else impossible.document(found)


def _asked(cfg: ExplainConfig) -> Asked:
    assert cfg.hardware is not None and cfg.model is not None
    work = cfg.workload or WorkloadConfig()
    return read_question(SolveConfig(cfg.hardware, cfg.model, work, cfg.force, cfg.moe, cfg.calibration, ranks=cfg.ranks))
