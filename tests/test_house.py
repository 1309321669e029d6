"""The house, read from its imports: two wings, one door, rooms in one direction, and every module with a name of its own."""

from __future__ import annotations

from collections import Counter
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.cli import ROOT, docs_script

PLANNER = (
    "planner.common", "planner.common.outside", "planner.common.timeline", "planner.common.peers", "planner.common.command",
    "planner.contract.given", "planner.contract.ranks", "planner.contract.decided", "planner.contract.policy",
    "planner.contract.speculation",
    "planner.contract.experts.policies", "planner.contract.experts", "planner.contract.gguf", "planner.contract.stored",
    "planner.contract.checkpoint", "planner.contract.published", "planner.contract.config", "planner.contract.prices",
    "planner.contract.bills", "planner.contract.rules", "planner.contract.lessons", "planner.contract.plan", "planner.contract.serving",
    "planner.asked", "planner.probe.between", "planner.probe.watched", "planner.probe", "planner.replay",
    "planner.simulate.lanes", "planner.simulate", "planner.simulate.ranks",
    "planner.solver.terms", "planner.solver.drafts", "planner.solver.notes", "planner.solver",
    "planner.render", "planner.explain",
    "planner.export", "planner.report", "planner.doctor", "planner.verbs", "planner",
)  # fmt: skip
"""The planner's rooms from the bottom up. A room imports from itself and from those before it."""
RUNTIME = (
    "runtime.asked", "runtime.company",
    "runtime.formats.kernels", "runtime.formats.native", "runtime.formats.twelve", "runtime.formats.gguf",
    "runtime.formats", "runtime.memory", "runtime.beside.native", "runtime.beside", "runtime.reading.native", "runtime.reading",
    "runtime.store",
    "runtime.model.fused", "runtime.model.further", "runtime.model", "runtime.moving",
    "runtime.experts.products", "runtime.experts.tiers", "runtime.experts",
    "runtime.kv.batch", "runtime.kv.attention", "runtime.kv.outside", "runtime.kv.disk", "runtime.kv.pages",
    "runtime.recorded", "runtime.recorded.prompts", "runtime.handed", "runtime.speculate", "runtime.hops", "runtime.ranks",
    "runtime.engine.sides", "runtime.engine.passes", "runtime.engine", "runtime.told", "runtime.led",
    "runtime.tools.recoding", "runtime.tools", "runtime.timed",
    "runtime.serve.wire", "runtime.serve.motor", "runtime.serve.dialects", "runtime.serve.page", "runtime.serve.front",
    "runtime.serve.routes", "runtime.serve", "runtime",
)  # fmt: skip
"""The runtime's."""
MOST_MODULES = 15
"""In one room."""
SHARED_NAMES = {"base", "cli"}
"""Names that say what a module is to its room: its types, its program."""


PAGE = docs_script("house")
HOUSE = PAGE.House(ROOT)


@pytest.mark.parametrize("wing", [PLANNER, RUNTIME], ids=["planner", "runtime"])
def test_a_room_imports_none_above_it(wing: tuple[str, ...]) -> None:
    height = {name: number for number, name in enumerate(wing)}
    found = [
        f"{module} -> {target}"
        for module, targets in HOUSE.arrows.items()
        for target in targets
        if HOUSE.room(module) in height and HOUSE.room(target) in height and height[HOUSE.room(target)] > height[HOUSE.room(module)]
    ]
    assert found == []


def test_every_module_lies_in_a_room() -> None:
    rooms = {*PLANNER, *RUNTIME, "planner.contract", "runtime.kv"}
    assert {name for name in HOUSE.modules if HOUSE.room(name) not in rooms} == set()


def test_the_runtime_comes_in_by_the_door() -> None:
    found = [
        f"{module} -> {target}"
        for module, targets in HOUSE.arrows.items()
        for target in targets
        if module.startswith("runtime") and target.startswith("planner") and not target.startswith(PAGE.DOOR)
    ]
    assert found == []


@pytest.mark.parametrize(("wing", "never"), [("planner", "penstock.runtime"), ("planner", "bench"), ("runtime", "bench")])
def test_a_wing_does_not_import_what_stands_on_it(wing: str, never: str) -> None:
    found = [(name, target) for name, path in HOUSE.modules.items() if name.startswith(wing) for target in PAGE.imported(path)]
    assert [(name, target) for name, target in found if f"{target}.".startswith((f"{never}.", "tests."))] == []


def test_no_files_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter(HOUSE.arrows).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_no_two_modules_share_a_name() -> None:
    names = Counter(path.stem for path in HOUSE.modules.values() if path.name != "__init__.py")
    assert {name for name, count in names.items() if count > 1} - SHARED_NAMES == set()


def test_no_room_is_crowded() -> None:
    crowds = Counter(HOUSE.room(name) for name, path in HOUSE.modules.items() if path.name != "__init__.py")
    assert {name: count for name, count in crowds.items() if count > MOST_MODULES} == {}


@pytest.mark.parametrize("folder", ["planner", "runtime", "tests", "bench", "docs", "penstock"])
def test_nobody_imports_the_folders_by_their_bare_names(folder: str) -> None:
    bare = {"planner", "runtime", "conf"}
    paths = [path for path in (ROOT / folder).glob("**/*.py") if not path.is_symlink()]
    assert [(path.name, name) for path in paths for name in PAGE.imported(path) if name.partition(".")[0] in bare] == []
