"""The house as its imports have it, and `house.png` of `contributing.md`: two wings, the door between them, and their rooms.

python docs/house.py
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

DOOR = ("planner.common", "planner.contract")
"""All that the runtime imports of the planner."""
INK, PALE, ARROW = "#1f2937", "#64748b", "#94a3b8"
COLOUR = {"planner": "#dbeafe", "door": "#fef3c7", "runtime": "#dcfce7"}
COLUMN = {"planner": 0.0, "door": 50.0, "runtime": 100.0}
SIDE = {"planner": -1, "door": 1, "runtime": 1}
"""Of a column, on which the arrows between its own rooms lie: -1 is left."""
WIDTH, HEIGHT, GAP = 32.0, 3.4, 1.2
BULGE = 9.0
"""How far such an arrow leaves its column, at most."""


@cache
def imported(path: Path) -> tuple[str, ...]:
    """What ``path`` imports anywhere: inside functions and for type checkers, too. Read once: each rule of the house asks again."""
    return tuple(_imported(ast.parse(path.read_text(encoding="utf-8"))))


def _imported(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@dataclass(frozen=True)
class House:
    """The modules of both wings below ``root``. A package is named as its ``__init__`` is."""

    root: Path

    @cached_property
    def modules(self) -> Mapping[str, Path]:
        """Dotted name without ``penstock.`` -> file."""
        found = {}
        for wing in ("planner", "runtime"):
            for path in (self.root / wing).rglob("*.py"):
                parts = path.relative_to(self.root).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        return found

    @cached_property
    def arrows(self) -> Mapping[str, frozenset[str]]:
        """Module -> modules of the house that it imports."""
        found: dict[str, set[str]] = defaultdict(set)
        for name, path in self.modules.items():
            for target in imported(path):
                inside = target.removeprefix("penstock.")
                inside = inside if inside in self.modules else inside.rpartition(".")[0]
                if target.startswith("penstock.") and inside in self.modules and inside != name:
                    found[name].add(inside)
        return {name: frozenset(found[name]) for name in self.modules}

    def room(self, module: str) -> str:
        """The package that ``module`` lies in."""
        return module if self.modules[module].name == "__init__.py" else module.rpartition(".")[0]

    @cached_property
    def rooms(self) -> Mapping[str, tuple[int, int]]:
        """Room with modules of its own -> how many, and their lines."""
        sizes: dict[str, list[int]] = defaultdict(list)
        for name, path in self.modules.items():
            if path.name != "__init__.py":
                sizes[self.room(name)].append(len(path.read_text(encoding="utf-8").splitlines()))
        return {room: (len(lines), sum(lines)) for room, lines in sizes.items()}

    @cached_property
    def doors(self) -> Mapping[str, frozenset[str]]:
        """Room -> other rooms that it imports from."""
        found: dict[str, set[str]] = {room: set() for room in self.rooms}
        for name, targets in self.arrows.items():
            if self.room(name) in found:
                found[self.room(name)] |= {self.room(t) for t in targets} & found.keys() - {self.room(name)}
        return {room: frozenset(targets) for room, targets in found.items()}

    def floor(self, room: str) -> int:
        """One above the highest room of the same column that ``room`` imports from."""
        below = [self.floor(target) for target in self.doors[room] if column(target) == column(room)]
        return 1 + max(below, default=-1)

    def needed(self, room: str) -> frozenset[str]:
        """The rooms that ``room`` imports from, without those that another of them imports from anyhow."""
        targets = self.doors[room]
        return targets - {further for target in targets for further in self._reach(target)}

    def _reach(self, room: str) -> frozenset[str]:
        return self.doors[room].union(*(self._reach(target) for target in self.doors[room]))


def column(room: str) -> str:
    """Which wing ``room`` lies in, or that it is of the door."""
    return "door" if f"{room}.".startswith(tuple(f"{name}." for name in DOOR)) else room.partition(".")[0]


def draw(house: House, out: Path) -> None:
    """Write the picture: a box a room, higher than all that it imports from, and an arrow to each room that it needs at first hand."""
    from matplotlib import pyplot as plt
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
    from matplotlib.path import Path as Curve

    stacks: dict[str, list[str]] = defaultdict(list)
    for room in sorted(house.rooms, key=lambda r: (house.floor(r), r)):
        stacks[column(room)].append(room)
    tallest = max(map(len, stacks.values()))
    at: dict[str, tuple[float, float]] = {}
    for name, rooms in stacks.items():
        step = (HEIGHT + GAP) * tallest / len(rooms)
        at |= {room: (COLUMN[name], (k + 0.5) * step) for k, room in enumerate(rooms)}
    figure, axes = plt.subplots(figsize=(14, 12))
    for room, (x, y) in at.items():
        axes.add_patch(FancyBboxPatch((x, y), WIDTH, HEIGHT, boxstyle="round,pad=0.2", facecolor=COLOUR[column(room)], edgecolor=PALE))
        modules, lines = house.rooms[room]
        label = room.removeprefix("planner.").removeprefix("runtime.") if room not in COLOUR else f"{room}.cli"
        axes.text(x + 0.8, y + HEIGHT / 2, label, va="center", color=INK, fontsize=9)
        axes.text(x + WIDTH - 0.6, y + HEIGHT / 2, f"{modules} files, {lines:,}", va="center", ha="right", color=PALE, fontsize=7)
    for room, (x, y) in at.items():
        for target in house.needed(room):
            tx, ty = at[target]
            if column(target) == column(room):
                side = SIDE[column(room)]
                edge = x + (WIDTH + 0.3 if side > 0 else -0.3)
                far = edge + side * (0.8 + (BULGE - 0.8) * (y - ty) / (tallest * (HEIGHT + GAP)))
                points = [(edge, y + HEIGHT * 0.35), (far, y), (far, ty + HEIGHT), (edge, ty + HEIGHT * 0.65)]
                curve = Curve(points, [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4])
            else:
                right = tx > x
                curve = Curve([(x + (WIDTH if right else 0), y + HEIGHT / 2), (tx + (0 if right else WIDTH), ty + HEIGHT / 2)])
            axes.add_patch(FancyArrowPatch(path=curve, arrowstyle="->", mutation_scale=8, color=ARROW, lw=0.8, zorder=0.5))
    top = tallest * (HEIGHT + GAP) + 3.5
    for name, title in (("planner", "planner decides"), ("door", "the door: contract and common"), ("runtime", "runtime obeys")):
        axes.text(COLUMN[name] + WIDTH / 2, top, title, ha="center", color=INK, fontsize=12, weight="bold")
    axes.set_xlim(-BULGE, COLUMN["runtime"] + WIDTH + BULGE)
    axes.set_ylim(0, top + 3)
    axes.axis("off")
    figure.savefig(out, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    here = Path(__file__).resolve()
    draw(House(here.parents[1]), here.with_name("house.png"))
