"""Prints docs/results.md, every measured figure under bench/results, from the JSON files there: `make results` writes it."""

from __future__ import annotations

import ast
import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.studies import STUDIES, Check, Study, cells, head, ratio

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
WIDTH = 140
"""Of a line of text."""

HEAD = """\
# Results

Written by `make results` from the JSON files under `bench/results/`; no figure here is typed by hand. `docs/log.md` has the prediction made
before each measurement, and why a target was missed, as far as that is known.

Weights are random in all of these, because rates do not depend on them. A ratio is the measured figure over its limit. The same process
measured the limit: the link, the drive or compute alone. Machines' rates drift from one session to the next. Host time, deciding and
opening an index have no limit to measure; their bound is the requested one. *Predicted* is predicted over measured. If a file has several
runs, some are of older code; the lines below its table name the code of each.
"""


class Result(NamedTuple):
    """A file of bench/results: its directory is the machine, its name says the study."""

    path: Path
    study: Study
    document: Any

    @property
    def machine(self) -> str:
        return self.path.parent.name

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the document says of itself beside its rows; a list says nothing."""
        return self.document if isinstance(self.document, Mapping) else {}

    @property
    def checks(self) -> list[Check]:
        return list(self.study.checks(self.document))


def results(directory: Path = RESULTS) -> list[Result]:
    """All files: studies in the order of STUDIES, then machines by name. SystemExit for a file of no study."""
    order, found = list(STUDIES), []
    for path in directory.glob("*/*.json"):
        name = path.stem.partition("-")[0]
        if name not in STUDIES:
            raise SystemExit(f"{path}: no study is named {name}; choose from {', '.join(STUDIES)}, or add one to bench/studies.py")
        found.append((order.index(name), path))
    return [Result(path, STUDIES[order[place]], json.loads(path.read_text(encoding="utf-8"))) for place, path in sorted(found)]


def page(directory: Path = RESULTS) -> str:
    found = results(directory)
    parts = [HEAD, "## Machines\n", *_machines(found)]
    parts += ["\n## Targets\n", *_overview(found), "\n### Missed\n", *_missed(found)]
    for study in dict.fromkeys(result.study for result in found):
        commands = study.commands or commands_of(ROOT / "bench" / study.script)
        parts += [f"\n## {study.title}\n", f"{textwrap.fill(study.says, WIDTH)}\n", *(f"    {line}" for line in commands)]
        for result in found:
            if result.study is study:
                parts += ["", *_section(result)]
    return "\n".join(parts) + "\n"


def commands_of(script: Path) -> list[str]:
    """The commands of a benchmark's docstring: its lines that are indented as code."""
    doc = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    return [line.strip() for line in doc.splitlines() if line.startswith("    python ")]


def _machines(found: Iterable[Result]) -> Iterator[str]:
    yield from head("name", "GPU", "cores", "DRAM", "Python", "torch", "transformers", "measured")
    seen: dict[str, dict[str, set[str]]] = {}
    for result in found:
        if where := result.facts.get("machine"):
            where = {**where, **result.facts.get("versions", {})}
            said = (where["gpu"] or "none", where["cores"], f"{where['dram_gb']:.0f} GB")
            said += tuple(where[key] for key in ("python", "torch", "transformers", "date"))
            for place, value in enumerate(said):
                seen.setdefault(result.machine, {}).setdefault(str(place), set()).add(str(value))
    for name, facts in sorted(seen.items()):
        yield cells(name, *("; ".join(sorted(values)) for values in facts.values()))


def _overview(found: Iterable[Result]) -> Iterator[str]:
    yield from head("study", "machine", "figures with a target", "met", "file")
    for result in found:
        if checks := result.checks:
            yield cells(result.study.title, result.machine, len(checks), sum(check.met for check in checks), _link(result.path))


def _missed(found: Iterable[Result]) -> Iterator[str]:
    yield from head("study", "machine", "what", "ratio", "target", "run")
    for result in found:
        for check in result.checks:
            if not check.met:
                yield cells(result.study.title, result.machine, check.what, ratio(check.value), check.target, check.run)


def _section(result: Result) -> Iterator[str]:
    text, picture = result.path.with_suffix(".txt"), result.path.with_suffix(".png")
    _, _, more = result.path.stem.partition("-")
    yield f"### {result.study.title}: {result.machine}{', ' + more if more else ''}\n"
    yield f"{', '.join(_link(path) for path in (result.path, text) if path.exists())}\n"
    yield from result.study.table(result.document)
    if notes := list(_notes(result.facts)):
        yield from ("", *notes)
    if picture.exists():
        yield f"\n![{result.study.title}, {result.machine}]({_address(picture)})"


def _notes(facts: Mapping[str, Any]) -> Iterator[str]:
    for name, run in facts.get("runs", {}).items():
        yield f"* Run {name}: {run if isinstance(run, str) else run['what']}"
    if "code" in facts:
        yield f"* Code of {facts['code']}"
    if "note" in facts:
        yield f"* {facts['note']}"


def _address(path: Path) -> str:
    return f"../bench/results/{path.parent.name}/{path.name}"


def _link(path: Path) -> str:
    return f"[{path.parent.name}/{path.name}]({_address(path)})"


if __name__ == "__main__":
    print(page(), end="")
