"""The page of an explanation: needs nothing from elsewhere, and a browser shows what it says."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from penstock.planner.contract.plan.tier_fill import fills
from penstock.planner.explain.explain_html import explanation_page, impossible_page
from penstock.planner.explain.explanation import Explanation, explain
from penstock.planner.render.svg import change_picture, tiers_picture
from penstock.planner.solver.impossible import explain_impossible
from penstock.planner.solver.infeasible import Infeasible
from penstock.planner.solver.planning import answer
from penstock.planner.solver.terms.problem import Question
from tests.planner.browser import ask, screenshot
from tests.planner.small import GB, MB, machine, model, work

LOADS = re.compile(r"<script|<link|<iframe|<img|\bsrc=|\bhref=|@import|url\(|https?:", re.IGNORECASE)


@pytest.fixture(scope="module")
def explained() -> Explanation:
    return explain(Question(machine(vram=1500 * MB, dram=2 * GB), model(24), work()), None, 0.1)


@pytest.fixture
def page(explained: Explanation, tmp_path: Path) -> Path:
    path = tmp_path / "explain.html"
    path.write_text(explanation_page(explained), encoding="utf-8")
    return path


def no_plan() -> str:
    with pytest.raises(Infeasible) as none:
        answer(Question(machine(vram=300 * MB), model(16), work()))
    return impossible_page(explain_impossible(none.value))


class Balance(HTMLParser):
    """Every element that opens is closed in order."""

    VOID = ("meta", "line", "rect", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag not in self.VOID or (tag == "rect" and not self.get_starttag_text().endswith("/>")):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_loads_nothing_and_is_well_formed(explained: Explanation) -> None:
    for text in (explanation_page(explained), no_plan()):
        assert not LOADS.search(text)
        balance = Balance()
        balance.feed(text)
        assert balance.open == []


def test_a_name_cannot_become_markup(explained: Explanation) -> None:
    from dataclasses import replace

    plan = replace(explained.plan, model=replace(explained.plan.model, name="<script>alert(1)</script>"))
    told = replace(explained.neighbours[0], found=None, why="cap <= <b>")
    text = explanation_page(replace(explained, plan=plan, neighbours=(told,)))
    assert "<script" not in text and "cap &lt;= &lt;b&gt;" in text


def test_a_tiers_items_fill_as_much_of_its_bar_as_of_the_tier(explained: Explanation) -> None:
    (vram, *_) = fills(explained.plan)
    widths = [float(w) for w in re.findall(r'width="([\d.]+)"', tiers_picture([vram]))]
    whole, items = widths[0], widths[1:]
    assert sum(items) / whole == pytest.approx(vram.taken_bytes / vram.capacity_bytes, abs=1e-3)
    assert items == sorted(items, reverse=True)


def test_bars_of_change_are_in_proportion_and_no_plan_is_said() -> None:
    picture = change_picture([("a", -0.1, 0.2), ("b", 0.0, None), ("c", 0.05, 0.1)])
    widths = {said: float(w) for w, said in re.findall(r'width="([\d.]+)"[^>]*><title>([^<]*)', picture)}
    assert widths["a step less: +20.00%"] == pytest.approx(2 * widths["a step more: -10.00%"], rel=1e-3)
    assert "a step less: no plan fits" in picture
    tops = re.findall(r'y="([\d.]+)" width="[\d.]+" height="([\d.]+)" class="(?:good|bad)"><title>a step (?:more: \+5|less: \+10)', picture)
    assert len({top for top, _ in tops}) == 2, "two bars on one side lie above each other"


def test_a_browser_shows_the_pictures_the_tables_and_the_advice(page: Path, explained: Explanation, tmp_path: Path) -> None:
    found = json.loads(
        ask(
            page,
            tmp_path / "profile",
            """
        const boxes = [...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect());
        const free = [...document.querySelectorAll('svg')[0].querySelectorAll('rect.free')].map(r => r.getBoundingClientRect().width);
        return JSON.stringify({
            title: document.title, heads: [...document.querySelectorAll('h2')].map(h => h.textContent),
            pictures: boxes.map(b => [b.width, b.height]), rows: document.querySelectorAll('table tr').length,
            buy: document.querySelector('p.buy').textContent, wide: document.documentElement.scrollWidth <= window.innerWidth,
            free: free, loaded: performance.getEntriesByType('resource').length });""",
        )
    )
    assert found["title"] == "small on small"
    assert found["heads"][0] == "What to buy next" and len(found["heads"]) == 7
    assert len(found["pictures"]) == 3 and all(width > 300 and height > 50 for width, height in found["pictures"])
    assert found["rows"] == 3 + len(explained.constraints) + len(explained.margins) + len(explained.neighbours)
    assert found["buy"].startswith(explained.best_buy.offer.name) and found["wide"] and found["loaded"] == 0
    assert len(found["free"]) == 3 and min(found["free"]) > 200


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_from_the_background_in_both_schemes(dark: bool, page: Path, tmp_path: Path) -> None:
    """Contrast of 4.5 and more, of all text that is drawn (WCAG 2.2, 1.4.3)."""
    if dark:
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace("@media (prefers-color-scheme: dark)", "@media all"), encoding="utf-8")
    worst = json.loads(
        ask(
            page,
            tmp_path / "profile",
            """
        const light = c => { const f = c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
            .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * f[0] + 0.7152 * f[1] + 0.0722 * f[2]; };
        const back = getComputedStyle(document.body).backgroundColor;
        const against = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
        const texts = [...document.querySelectorAll('h1,h2,p,td,th,li')].map(e => against(getComputedStyle(e).color, back));
        const drawn = [...document.querySelectorAll('svg text:not(.in)')].map(e => against(getComputedStyle(e).fill, back));
        const inside = [...document.querySelectorAll('svg text.in')].map(e => {
            const fill = getComputedStyle(e.previousElementSibling).fill; return against(getComputedStyle(e).fill, fill); });
        return JSON.stringify([back, Math.min(...texts), Math.min(...drawn), Math.min(...inside)]);""",
        )
    )
    back, *contrasts = worst
    assert (back == "rgb(20, 24, 29)") is dark
    assert min(contrasts) >= 4.5, worst


def test_a_screenshot_has_the_colours_of_the_bars(page: Path, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    screenshot(page, tmp_path / "profile", picture)
    image = pytest.importorskip("matplotlib.image").imread(picture)
    seen = {tuple(round(float(v) * 255) for v in pixel[:3]) for row in image[::2] for pixel in row[::2]}
    assert {(0x3F, 0x73, 0xA8), (0x2A, 0x7F, 0x51), (0xB8, 0x4A, 0x34)} <= seen, "a tier's first item, faster, slower"


def test_a_browser_shows_what_is_short_where_no_plan_fits(tmp_path: Path) -> None:
    path = tmp_path / "none.html"
    path.write_text(no_plan(), encoding="utf-8")
    said = ask(path, tmp_path / "profile", "return document.body.innerText;")
    assert "No plan fits." in said and "VRAM" in said and "raise to hardware.vram_bytes=" in said
