"""Penstock: models larger than a machine's memory, streamed by a plan that is computed beforehand.

    plan = penstock.solve(model="DIR", hardware="local", vram="6GiB")
    with penstock.open(plan) as model:
        for token in model.stream("Once upon a time", max_new_tokens=64):
            print(token, end="")

Names are imported when they are first asked for. ``import penstock``, ``solve`` and ``load_plan`` import neither torch nor transformers.
The folders ``planner``, ``runtime`` and ``conf`` lie at the top of the source tree; links beside this file make them this package's.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.opened import Completion as Completion
    from penstock.opened import Model as Model
    from penstock.opened import Prompt as Prompt
    from penstock.opened import Token as Token
    from penstock.opened import open_model as open
    from penstock.planner.common.errors import UserError as UserError
    from penstock.planner.contract.plan.plan import Plan as Plan
    from penstock.plans import load_plan as load_plan
    from penstock.plans import solve as solve

_HOMES = {
    "Completion": "penstock.opened:Completion",
    "Model": "penstock.opened:Model",
    "Prompt": "penstock.opened:Prompt",
    "Token": "penstock.opened:Token",
    "open": "penstock.opened:open_model",
    "UserError": "penstock.planner.common.errors:UserError",
    "Plan": "penstock.planner.contract.plan.plan:Plan",
    "load_plan": "penstock.plans:load_plan",
    "solve": "penstock.plans:solve",
}
__all__ = ["Completion", "Model", "Plan", "Prompt", "Token", "UserError", "load_plan", "open", "solve"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
