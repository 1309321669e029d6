"""The keys of `runtime serve`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from penstock.planner.common.closing import Closing
from penstock.planner.contract.config.config_schema import CalibrationUse, ForceConfig, HardwareConfig, ModelConfig, WorkloadConfig
from penstock.planner.contract.decided.speculating import Speculate
from penstock.runtime.asked.run_schema import EngineConfig, ReuseConfig
from penstock.runtime.serve.front.front_limits import FrontLimits


class Auth(StrEnum):
    """Who may ask."""

    keys = "keys"
    """Who has a key of the file `keys`."""
    none = "none"
    """Everyone who reaches the address."""


@dataclass
class ServeConfig(Closing):
    """`runtime serve`"""

    plan: str | None = None
    """The plan file, written by `planner solve`; null: what the other keys ask for is solved first, as `planner solve` reads them."""
    hardware: HardwareConfig | None = None
    model: ModelConfig | None = None
    workload: WorkloadConfig | None = None
    force: ForceConfig = field(default_factory=ForceConfig)
    calibration: CalibrationUse = CalibrationUse.own
    """As in `planner solve`; a plan file holds its own rates."""
    speculate: Speculate | None = None
    """As in `planner solve` where no plan is named, as in `runtime run` where one is."""
    draft: str | None = None
    """Checkpoint or packed store of the model that drafts; as `speculate`."""
    checkpoint: str | None = None
    """Hugging Face checkpoint or packed store to serve; null takes the plan's."""
    adapter: str | None = None
    """As in `runtime run`."""
    name: str | None = None
    """The model's name, which clients ask for; null takes the plan's."""
    template: Any = field(default_factory=dict, metadata={"open": True})
    """`template.KEY=value` is an option of the model's chat template where a request gives none, such as
    `template.enable_thinking=false`."""
    host: str = "127.0.0.1"
    """Address to listen on. Any but this machine's own wants `keys`, or `auth=none`."""
    port: int = 8000
    """0 takes any that is free; a line on standard error says which."""
    auth: Auth | None = None
    """`keys`: API keys of the file `keys` are wanted. `none`: no key is, whoever asks. null: keys where there is a file, else none, and
    then only this machine's own addresses and names are served."""
    keys: str | None = None
    """File of API keys, one a line."""
    origins: list[str] = field(default_factory=list)
    """Origins of web pages that may ask from a browser (CORS), such as https://example.org; the server's own page needs none."""
    drain_s: float = 30.0
    """Seconds that replies under way are given to end, after SIGTERM or SIGINT."""
    hang_s: float | None = None
    """Silence of a loaded engine after which it is killed and started anew; it speaks once a pass, or every two seconds when idle. null: 20
    times the longest pass that the plan predicts, 60 s at least."""
    limits: FrontLimits = field(default_factory=FrontLimits)
    kv: ReuseConfig = field(default_factory=ReuseConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    notes: list[str] = field(default_factory=list, metadata={"internal": True})
    """What was read from the environment."""
