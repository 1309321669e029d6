"""The engines that a plan can be written for."""

from __future__ import annotations

from planner.errors import UserError, nearest
from planner.export.accelerate import ACCELERATE
from planner.export.deepspeed import DEEPSPEED
from planner.export.env import ENV
from planner.export.exported import Target
from planner.export.lightllm import LIGHTLLM
from planner.export.llama_cpp import LLAMA_CPP
from planner.export.vllm import VLLM

TARGETS: tuple[Target, ...] = (ENV, LIGHTLLM, ACCELERATE, LLAMA_CPP, VLLM, DEEPSPEED)


def find_target(name: str) -> Target:
    """The target ``name``. Raises UserError with the choices."""
    names = [target.name for target in TARGETS]
    for target in TARGETS:
        if target.name == name:
            return target
    raise UserError(f"to={name}: no such target; choose of {', '.join(names)}{nearest(name, names)}")
