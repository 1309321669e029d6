"""What the host takes to launch passes is told where a card computes them."""

from __future__ import annotations

from penstock.runtime.engine.sides.launch_seconds import LaunchSeconds


def test_prompts_and_steps_are_told_apart_and_the_first_pass_of_each() -> None:
    launching = LaunchSeconds()
    assert launching.facts() == {"prompts": None, "steps": None}
    for seconds in (0.4, 0.1, 0.2):
        launching.note(True, seconds)
    assert launching.facts() == {"prompts": {"passes": 3, "first_s": 0.4, "median_s": 0.2}, "steps": None}
