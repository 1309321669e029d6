"""The engines that a plan can be written for."""

from __future__ import annotations

from planner.export.accelerate import ACCELERATE
from planner.export.deepspeed import DEEPSPEED
from planner.export.env import ENV
from planner.export.exported import Target
from planner.export.lightllm import LIGHTLLM
from planner.export.llama_cpp import LLAMA_CPP
from planner.export.vllm import VLLM

TARGETS: tuple[Target, ...] = (ENV, LIGHTLLM, ACCELERATE, LLAMA_CPP, VLLM, DEEPSPEED)
"""One for each of ``planner.command.verb_schema.TargetName``."""


def find_target(name: str) -> Target:
    """The target ``name``."""
    return next(target for target in TARGETS if target.name == name)
