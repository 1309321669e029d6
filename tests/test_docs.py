"""What the pages name exists: files, links and headings, verbs and keys of commands, keys and figures of the tuning guide."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.planner.common.command.known_keys import keys_of
from penstock.planner.common.command.overrides import normalise
from penstock.planner.common.command.verb import grammar_of, spelled_out
from penstock.planner.common.errors import UserError
from penstock.planner.contract.config.config_schema import ForceConfig
from penstock.planner.contract.decided.decisions import KvPages
from penstock.runtime.asked.run_schema import ReuseConfig
from penstock.runtime.experts.tiers.expert_stats import TierStats
from penstock.runtime.memory.gpu_sampler import FIGURES
from tests.cli import ROOT, command, docs_script
from tests.runtime.fakes import LockingCopier
from tests.runtime.faults import put_in
from tests.runtime.running import desk
from tests.support import decisions, plan_for, save_tiny, workload

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [page.name for page in PAGES]
HISTORY = "log.md"
"""It also names what has gone since."""
VERBS = {(name, verb.name): verb for name in ("planner", "runtime") for verb in importlib.import_module(f"{name}.cli").PROGRAM.verbs}
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?:planner|runtime|conf|bench|docs|tests)/[\w./-]*")
STREAMED = replace(decisions(gpu=True, resident=(2, 2, 0), head_blocks=1), kv=KvPages(64, 2, 4, 0))
"""Weights and KV stream to a card."""
OTHERS = {"vm.nr_hugepages", "h2d.kv", "plan.yaml", "non_blocking", "allocations_after_warmup"}
"""Names in the tuning guide that are neither keys nor figures as they stand there; the last one is of a real card's report alone."""
PLACES = ("MACHINE", "NAME", "STUDY")
"""Words that stand for a file's own name."""


def text_of(name: str) -> str:
    return PAGES[NAMES.index(name)].read_text(encoding="utf-8")


def code_lines(text: str) -> Iterator[str]:
    """Lines of code, indented or fenced; those that end in a backslash joined with the next."""
    fenced, held = False, ""
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            held += line.strip()
            if not held.endswith("\\"):
                yield held.removeprefix("$ ")
                held = ""
            held = held.removesuffix("\\")


def commands(text: str) -> Iterator[str]:
    """What is to be typed: code lines and code spans that begin with a program's name and go on with a word."""
    said = [*code_lines(text), *(span for line in text.splitlines() if not line.startswith("    ") for span in SPAN.findall(line))]
    yield from (line for line in said if re.match(r"(?:planner|runtime) [a-z]", line))


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def headings(path: Path) -> set[str]:
    return {slug(line.lstrip("# ")) for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")}


@pytest.mark.parametrize("name", NAMES)
def test_every_link_leads_somewhere(name: str) -> None:
    page, lost = PAGES[NAMES.index(name)], []
    for link in LINK.findall(text_of(name)):
        if re.match(r"https?:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in headings(path)):
            lost.append(link)
    assert lost == []


@pytest.mark.parametrize("name", [name for name in NAMES if name != HISTORY])
def test_every_file_that_is_named_exists(name: str) -> None:
    lost = []
    for span in SPAN.findall(text_of(name)):
        path = span.rstrip("/")
        if FILE.fullmatch(span) and not any(word in span for word in PLACES) and not (ROOT / path).exists():
            lost.append(span)
    assert lost == []


@pytest.mark.parametrize("name", [name for name in NAMES if name != HISTORY])
def test_every_script_of_a_command_exists(name: str) -> None:
    scripts = [match[1] for line in code_lines(text_of(name)) if (match := re.match(r"python ((?:bench|docs)/\S+\.py)", line))]
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


@pytest.mark.parametrize("name", [name for name in NAMES if name != HISTORY])
def test_every_command_is_of_a_verb_and_of_keys_that_it_has(name: str, clean_environment: Path) -> None:
    profile = clean_environment / "hardware" / "local.yaml"
    profile.parent.mkdir()
    profile.touch()
    wrong = []
    for line in commands(text_of(name)):
        words = shlex.split(line, comments=True)
        verb = VERBS.get((words[0], words[1]))
        if verb is None:
            wrong.append(line)
            continue
        multirun = "--multirun" in words
        typed = [word for word in words[2:] if not word.startswith("-") and word != "…"]
        grammar = grammar_of(verb, multirun)
        for override in spelled_out(typed, verb.words):
            if override.startswith("hydra") or override.endswith("="):
                continue
            try:
                normalise(override, grammar)
            except UserError as error:
                wrong.append(f"{line}: {error}")
    assert wrong == []


def report_names(part: Any, path: str = "") -> Iterator[str]:
    """Every key of a report, alone and with those above it."""
    if isinstance(part, Mapping):
        for key, value in part.items():
            yield from (key, f"{path}{key}", *report_names(value, f"{path}{key}."))
    elif isinstance(part, list):
        yield from (name for value in part for name in report_names(value, path))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Keys of reports: of a run without a card that keeps pages, and of one on a fake card with KV that streams, both with limits; and
    the counters of experts and of NVML, which neither has."""
    work = tmp_path_factory.mktemp("reports")
    checkpoint = save_tiny(work / "tiny")
    plans = {"cpu": plan_for(checkpoint, decisions(pages=8)), "card": plan_for(checkpoint, STREAMED, True, workload(kv_spill=True))}
    names = {"experts.vram", "experts.dram", "experts.missed", *TierStats().report(), *(f"gpu.{figure.key}" for figure in FIGURES)}
    for name, plan in plans.items():
        (work / name).mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("penstock.runtime.engine.link_limits.SECONDS", 0.01)
            if name == "card":
                put_in(patch, LockingCopier())
            kept = ReuseConfig(dir=str(work / "pages")) if name == "cpu" else ReuseConfig()
            report = desk(work / name, plan).run(max_new_tokens=2, limits=True, kv=kept, force=ForceConfig(page_tokens=64))
            names |= set(report_names(report))
    return names


def test_every_key_and_figure_of_the_tuning_guide_exists(told: set[str]) -> None:
    keys = {path for verb in VERBS.values() for path in keys_of(verb.schema)}
    known = keys | told | {key.rpartition(".")[2] for key in keys} | OTHERS
    spans = {span.partition("=")[0] for span in SPAN.findall(text_of("tuning.md"))}
    named = {span for span in spans if re.fullmatch(r"[a-z0-9]+(?:[._][a-z0-9]+)+", span)}
    assert len(named) > 60
    assert sorted(named - known) == []


def test_every_page_is_in_the_index_and_in_the_menu_of_the_site() -> None:
    index, menu = text_of("index.md"), yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert [name for name in NAMES if name != "index.md" and f"{name})" not in index] == []
    listed = [name for entry in menu for name in (next(iter(entry.values())) if isinstance(entry, dict) else [entry])]
    assert sorted(listed) == sorted(name.replace("README", "readme") for name in NAMES)


@pytest.mark.parametrize(
    ("link", "on_the_site"),
    [
        ("[a](docs/kv.md#tiers)", "[a](kv.md#tiers)"),
        ("![a](docs/kv.png)", "![a](kv.png)"),
        ("[a](bench/link.py)", "`a`"),
        ("[a](docs/house.py)", "`a`"),
        ("[a](https://b.c/d)", "[a](https://b.c/d)"),
        ("[a](#b)", "[a](#b)"),
    ],
)
def test_links_of_the_readme_lead_to_pages_of_the_site(link: str, on_the_site: str) -> None:
    assert docs_script("site_hooks").relinked(link, "", "docs") == on_the_site
    assert docs_script("site_hooks").relinked("[a](../README.md#b)", "docs", "docs") == "[a](readme.md#b)"


def test_what_the_readme_shows_of_solve_is_what_solve_prints(tmp_path: Path) -> None:
    _, _, block = text_of("README.md").partition("    $ planner solve ")
    asked, *shown = block.partition("\n\n")[0].splitlines()
    printed = command("planner", "solve", *asked.split(), cwd=tmp_path).stdout.splitlines()
    for part in "\n".join(line.removeprefix("    ") for line in shown).split("…"):
        lines = part.strip("\n").splitlines()
        assert any(printed[i : i + len(lines)] == lines for i in range(len(printed))), part
