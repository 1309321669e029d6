"""The engines that a plan can be written for."""

from __future__ import annotations

from penstock.planner.export.accelerate import ACCELERATE
from penstock.planner.export.deepspeed import DEEPSPEED
from penstock.planner.export.exported import Target
from penstock.planner.export.lightllm import LIGHTLLM
from penstock.planner.export.llama_cpp import LLAMA_CPP
from penstock.planner.export.vllm import VLLM
from penstock.planner.export.wsm_env import ENV

TARGETS: tuple[Target, ...] = (ENV, LIGHTLLM, ACCELERATE, LLAMA_CPP, VLLM, DEEPSPEED)
"""One for each of ``penstock.planner.asked.verb_schema.TargetName``."""


def find_target(name: str) -> Target:
    """The target ``name``."""
    return next(target for target in TARGETS if target.name == name)
