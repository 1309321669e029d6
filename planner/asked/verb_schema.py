"""The configuration schema of the planner's other verbs: beside ``contract.config.config_schema``, which describes a problem and a plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from omegaconf import MISSING

from penstock.planner.common.closing import Closing
from penstock.planner.common.outside.bounds import RATE, TOKENS, TOKENS_OR_NONE, Bounds
from penstock.planner.contract.config.config_schema import (
    CalibrationUse,
    ForceConfig,
    HardwareConfig,
    ModelConfig,
    MoeConfig,
    WorkloadConfig,
)


@dataclass
class ExplainConfig(Closing):
    """`planner explain`"""

    plan: str | None = None
    """The plan file to explain; null: what the other keys ask for, as `planner solve` reads them."""
    hardware: HardwareConfig | None = None
    model: ModelConfig | None = None
    workload: WorkloadConfig | None = None
    force: ForceConfig = field(default_factory=ForceConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    calibration: CalibrationUse = CalibrationUse.own
    """As in `planner solve`; a plan file holds its own rates."""
    ranks: Annotated[int | None, Bounds(1, 1024)] = None
    """As in `planner solve`; a plan file has its own."""
    step: float = 0.1
    """The step of each resource, up and down, as a share of it. Of memory: whole GB, and room for at least one layer."""
    out: str | None = None
    """A JSON file to write."""
    html: str | None = None
    """A page with pictures to write, such as explain.html."""
    notes: list[str] = field(default_factory=list, metadata={"internal": True})
    """What was read from the environment."""


@dataclass
class ReplanConfig(Closing):
    """`planner replan`"""

    plan: str = MISSING
    """The plan file whose problem is solved again."""
    context_tokens: Annotated[int | None, TOKENS] = None
    """Tokens that each sequence is to have room for, prompt and reply together; null: as the plan has it."""
    devices: list[int] | None = None
    """Numbers of the GPUs that are to be used, of each host, with a rank each at most; null: the plan's."""
    out: str = "plan.yaml"
    """The plan file to write; one that is there is moved aside."""


@dataclass
class DiffConfig(Closing):
    """`planner diff`"""

    a: str = MISSING
    """A plan file."""
    b: str = MISSING
    """The plan file to compare it with."""
    out: str | None = None
    """A JSON file to write."""


@dataclass
class DoctorConfig(Closing):
    """`planner doctor`"""

    path: str = "."
    """A file or directory on the file system that holds the checkpoint."""
    out: str | None = None
    """A JSON file to write."""


@dataclass
class ProbeSettings:
    path: str = "."
    """A directory on the file system that holds the checkpoint."""
    quick: bool = False
    """15 s at most instead of 60. Links of several GPUs come on top: two H100s took 87 s."""
    name: str = "local"
    """The profile's name: `hardware=NAME` finds it."""
    gpu: int = 0
    """Index of the GPU that plans will use."""
    force: bool = False
    """Keep the figures although an earlier profile of this name has better ones."""
    peers: str | None = None
    """HOST:PORT where `probe.serve` waits on another host: the network to it is measured, too. Several with blanks between."""
    serve: str | None = None
    """HOST:PORT of this host: wait there for the `probe.peers` of others, and measure nothing else. Both need PENSTOCK_SECRET."""


@dataclass
class ProbeConfig(Closing):
    """`planner probe`"""

    probe: ProbeSettings = field(default_factory=ProbeSettings)


@dataclass
class ReplayConfig(Closing):
    """`planner replay`"""

    routings: str = MISSING
    """What `runtime run moe.record=` wrote: JSON lines, plain, gz or xz."""
    model: ModelConfig | None = None
    """Whose experts they are; for their number and bytes."""
    policy: list[str] = field(default_factory=list)
    """Policies to compare, beside LRU and Belady's bound; empty: all that the routings can feed."""
    slots: list[int] = field(default_factory=list)
    """Numbers of slots a layer; empty: all from 1 to one less than the experts, or 15 of them."""
    prefetch: int | None = None
    """Experts of the coming layer that are fetched ahead, at most; null: as many as a token uses."""
    least_chance: float = 0.0
    """What a policy finds less likely than this is not fetched ahead."""
    experts: int | None = None
    """Experts of one layer; null: those of the model, or as many as the routings name."""
    score_prompts: bool = False
    """Score the tokens of prompts, too, as if each were a step of its own; else they are only studied."""
    out: str | None = None
    """A JSON file to write."""
    plot: str | None = None
    """A picture to draw, such as replay.png."""


class TargetName(StrEnum):
    """The engines that a plan can be exported to."""

    env = "env"
    accelerate = "accelerate"


@dataclass
class ExportConfig(Closing):
    """`planner export`"""

    plan: str = MISSING
    """The plan file, written by `planner solve`."""
    to: TargetName = MISSING
    """The engine to write for."""
    out: str | None = None
    """The file to write; null: beside here, named after the plan and the engine."""


@dataclass
class ReportConfig(Closing):
    """`planner report`"""

    dir: str = MISSING
    """The directory to gather: one sweep, such as sweeps/0, or all of them; the name alone will do."""
    out: str | None = None
    """Name of the files to write, without their endings .csv, .json and .html; null: report, in the directory."""


class RuleBreaks(StrEnum):
    """What becomes of a plan that breaks rules."""

    refuse = "refuse"
    warn = "warn"
    """It is simulated where it can be."""


@dataclass
class DemoConfig:
    """A plan that ships with the program, and what is changed in it."""

    about: str = MISSING
    """In words."""
    plan: str = MISSING
    """Which one, of conf/plans."""
    cap_layers: int | None = None
    """Layers that the DRAM cache shrinks to; null: the plan's."""
    hwm_layers: int | None = None
    """Layers that it may hold at most; null: the plan's."""
    prefetch_distance: int | None = None
    """Layers that may be read ahead; null: the plan's."""


@dataclass
class PlayedConfig:
    """Requests that come to a server. A plan of `workload=serve` is played so; another one where clients, arrivals or load are given."""

    requests: Annotated[int, TOKENS] = 2000
    """How many are played."""
    clients: Annotated[int | None, TOKENS] = None
    """Clients who each ask again as soon as they are answered; null: the plan's."""
    arrivals_per_s: Annotated[float | None, RATE] = None
    """Requests that come in a second, at random; null: the plan's, or as often as clients ask."""
    load: Annotated[float | None, Bounds(1e-3, 10)] = None
    """The same as a share of the planned load, which is the highest rate that the plan sustains."""
    prompt_tokens: Annotated[int | None, TOKENS] = None
    """Mean tokens of a prompt; null: the plan's."""
    new_tokens: Annotated[int | None, TOKENS] = None
    """Mean tokens of a reply; null: the plan's."""
    length_spread: Annotated[float | None, Bounds(0, 10)] = None
    """Standard deviation of both over their means; null: the plan's."""
    shared_prefix_tokens: Annotated[int | None, TOKENS_OR_NONE] = None
    """Tokens at the head of every prompt that are the same, such as a system prompt; null: the plan's."""
    seed: int = 0
    """Of moments and lengths: the same seed, the same requests."""


@dataclass
class SimulateConfig(Closing):
    """`planner simulate`"""

    plan: str | None = None
    """The plan file, written by `planner solve`."""
    demo: DemoConfig | None = None
    """A demonstration in place of a plan."""
    force: ForceConfig = field(default_factory=ForceConfig)
    rules: RuleBreaks = RuleBreaks.refuse
    """What becomes of a plan that breaks rules; `warn` simulates it where it can."""
    wrap_around: bool = True
    """At the last layers, prefetch the first ones for the next pass."""
    routings: str | None = None
    """Recorded routings for a plan of a MoE model; null: experts are drawn, as often used again as the plan expects."""
    serve: PlayedConfig = field(default_factory=PlayedConfig)
    trace: str | None = None
    """Timeline to write of reads, copies, compute and waits: *.json, a Chrome trace for ui.perfetto.dev, or *.png, a picture."""
    out: str | None = None
    """A JSON file to write."""
