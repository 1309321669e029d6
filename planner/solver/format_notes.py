"""What a plan says of weights in formats that only the planner knows."""

from __future__ import annotations

from penstock.planner.contract.given.model import ModelSpec


def format_notes(model: ModelSpec) -> tuple[str, ...]:
    """One note where the runtime does not stream ``model`` yet."""
    names = ", ".join(model.planned_only)
    said = f"not run yet: weights in {names} are planned for by their stored bytes, what decoding them costs is not counted"
    return (said,) if names else ()
