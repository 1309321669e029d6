"""Measuring a machine. Importing this package is cheap; what measures is loaded when it is first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.planner.common.user_folder import profile_dir
from penstock.planner.contract.config.profile_files import write_profile

if TYPE_CHECKING:
    from penstock.planner.probe.measure import probe
    from penstock.planner.probe.profile_table import profile_table

__all__ = ["probe", "profile_dir", "profile_table", "write_profile"]


def __getattr__(name: str) -> Any:
    if name == "probe":
        from penstock.planner.probe.measure import probe

        return probe
    if name == "profile_table":
        from penstock.planner.probe.profile_table import profile_table

        return profile_table
    raise AttributeError(f"module {__name__} has no attribute {name}")
