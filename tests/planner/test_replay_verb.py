"""`planner replay` from the outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.planner.contract.experts.policies import AheadScores
from penstock.planner.contract.experts.routing import Phase
from penstock.planner.contract.experts.routing_files import routing_line
from tests.cli import command, refusal
from tests.conftest import SHARED

ROUTED = [[0, 1], [2, 0], [1, 0], [3, 1], [0, 1], [2, 3], [1, 0], [2, 0]]


@pytest.fixture
def routings(tmp_path: Path) -> Path:
    """One layer of four experts: two tokens of a prompt, six decode steps. Of these, two slots under LRU find 1, 1, 1, 0, 0, 1 experts."""
    lines = [
        routing_line(0, Phase.prefill if pos < 2 else Phase.decode, pos, [experts], [[0.5, 0.2]]) for pos, experts in enumerate(ROUTED)
    ]
    path = tmp_path / "routing.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def result(*args: str, cwd: Path) -> dict[str, object]:
    done = command("planner", "replay", *args, cwd=cwd)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_last_line_is_json_and_only_what_was_asked_for_is_written(routings: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = command("planner", "replay", f"routings={routings}", "slots=2", "policy=lru", "out=replay.json", "plot=replay.png", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == json.loads((tmp_path / "replay.json").read_text())
    assert (tmp_path / "replay.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"routing.jsonl", "replay.json", "replay.png"}
    assert max(map(len, done.stdout.splitlines()[:-1])) <= 80 and "\x1b" not in done.stdout


def test_lru_and_the_bound_are_those_counted_by_hand(routings: Path, tmp_path: Path) -> None:
    told = result(f"routings={routings}", "slots=[2]", "policy=lru", cwd=tmp_path)
    scores = {s["policy"]: s for s in told["scores"]}
    assert told["tokens"] == 6 and told["experts"] == 4
    assert scores["lru"]["hit_rate"] == pytest.approx(4 / 12, abs=1e-5) and scores["lru"]["regret"] == 1
    assert scores["belady"]["hit_rate"] == pytest.approx(8 / 12, abs=1e-5) and scores["belady"]["missed_per_token"] == pytest.approx(
        4 / 6, abs=1e-5
    )
    whole = result(f"routings={routings}", "slots=[2]", "policy=lru", "score_prompts=true", cwd=tmp_path)
    assert whole["tokens"] == 8


def test_every_policy_that_the_routings_can_feed_is_compared_and_the_others_are_named(routings: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in routings.read_text().splitlines()]
    for line in lines:
        line["experts"] *= 2
        line["ahead"] = [[0.0, 1.0, 2.0, 3.0]]
    routings.write_text("\n".join(map(json.dumps, lines)))
    told = result(f"routings={routings}", cwd=tmp_path)
    assert {s["policy"] for s in told["scores"]} == {"belady", "lru", "lfu", "static", "gating", "markov", "lookahead", "mix"}
    assert {s["slots"] for s in told["scores"]} == {1, 2, 3}
    assert "centroids" in told["left_out"]["trajectory"]
    assert all(len(rates) == 5 for rates in told["hit_rates"].values())


def test_a_policy_without_its_scores_is_refused_when_it_is_named(routings: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) | {"experts": [json.loads(line)["experts"][0]] * 2} for line in routings.read_text().splitlines()]
    routings.write_text("\n".join(map(json.dumps, lines)))
    line = refusal("planner", "replay", f"routings={routings}", "policy=lookahead", cwd=tmp_path)
    assert "policy=lookahead" in line and '"ahead"' in line
    assert AheadScores.router == "router"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["routings=... is required"]),
        (["routings=absent"], ["routings=absent", "cannot be read"]),
        (["policy=mixx"], ["policy=mixx", "lru, lfu", "did you mean mix?"]),
        (["slots=0"], ["slots=0", "1 to 4"]),
        (["slots=[2,5]"], ["slots=5", "1 to 4"]),
        (["slots=two"], ["slots", "whole numbers"]),
        (["prefetch=5"], ["prefetch=5", "0 to 4"]),
        (["least_chance=1"], ["least_chance=1.0", "below 1"]),
        (["experts=3"], ["line 4", "expert 3", "0 to 2"]),
        (["experts=0"], ["experts=0"]),
        (["model=llama8b"], ["llama8b", "no experts"]),
        (["plot=replay.jpg"], ["plot=replay.jpg", ".png"]),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments: list[str], words: list[str], routings: Path, tmp_path: Path) -> None:
    given = arguments if not arguments or arguments[0].startswith("routings") else [f"routings={routings}", *arguments]
    line = refusal("planner", "replay", *given, cwd=tmp_path)
    assert all(word in line for word in words), line


def test_a_bad_line_is_named(routings: Path, tmp_path: Path) -> None:
    routings.write_text(routings.read_text() + "{\n")
    assert "line 9 is no JSON" in refusal("planner", "replay", f"routings={routings}", cwd=tmp_path)


def test_routings_without_decode_steps_say_how_to_score_them(routings: Path, tmp_path: Path) -> None:
    routings.write_text(routings.read_text().replace("decode", "prefill"))
    assert "score_prompts=true" in refusal("planner", "replay", f"routings={routings}", cwd=tmp_path)


def test_on_tiny_mixtral_mix_halves_what_lru_loses(tmp_path: Path) -> None:
    recorded = SHARED / "traces" / "tiny-mixtral.jsonl.xz"
    if not recorded.is_file():
        pytest.skip("no ../shared/traces beside this checkout")
    told = result(f"routings={recorded}", "policy=[lru,mix]", "slots=[2,4]", cwd=tmp_path)
    assert all(s["regret"] < 0.5 for s in told["scores"] if s["policy"] == "mix")
