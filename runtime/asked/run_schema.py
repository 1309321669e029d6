"""The configuration schema of the runtime's verbs: what a user may set, its types, and what each key means."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from omegaconf import MISSING

from penstock.planner.common.closing import Closing
from penstock.planner.common.errors import UserError
from penstock.planner.common.outside.bounds import SOME_BYTES, TOKENS, Bounds
from penstock.planner.contract.config.config_schema import CalibrationUse, ForceConfig, HardwareConfig, ModelConfig, WorkloadConfig
from penstock.planner.contract.decided.speculating import Speculate
from penstock.runtime.asked.sampling_keys import SamplingKeys

ROUNDS, WARMUP_ROUNDS = Bounds(1, 10**6), Bounds(0, 10**6)


class Validation(StrEnum):
    """What a run compares beyond the rules and the prediction, which every run checks."""

    none = "none"
    full = "full"
    """The streamed logits against the unstreamed model's; loads the whole model a second time."""


class CpuProduct(StrEnum):
    """How a CPU multiplies few rows by coded matrices, and attends."""

    stored = "stored"
    """Straight from the stored form; few tokens attend by sums of our own, also where no matrix is coded."""
    decode = "decode"
    """Decoded to what the model computes in first, then as torch multiplies: bit for bit what the decoded model gives."""


@dataclass
class EngineConfig:
    """How the engine moves and multiplies; all but ``cpu_product`` leave every bit of the result as it is."""

    wrap_around: bool = True
    """At the last layers, prefetch the first ones for the next pass."""
    warmup_layers: int | None = None
    """Layers of the DRAM cache's first fill, the first ones that compute visits, that must have arrived before it starts; null: all."""
    balance_units: int | None = 1
    """Units from the first one that waits for its VRAM slot on, itself counted, of which the copier may take another kind's first.
    1: strictly in forward order; null: as many as are copied ahead."""
    keep_finished_units: int = 0
    """Later units that must have computed before a finished one's VRAM slot is given to another."""
    cpu_product: CpuProduct | None = None
    """How a CPU that computes without a card multiplies few rows by coded matrices: `stored`, straight from the stored form, or `decode`,
    to what the model computes in first, bit for bit what the decoded model gives. null: stored, but the lossless form, which is to give
    BF16's bits. Where any are multiplied as stored, attention of few tokens is not torch's either; nor where `stored` is asked for with
    BF16 weights."""
    graphs: bool | None = None
    """Record a decode step as CUDA graphs, and launch those; true: wherever its weights lie in VRAM or DRAM; false: launch kernel after
    kernel; null: as the plan has it, which launches where the link binds by far."""


@dataclass
class ReuseConfig:
    """KV pages of prompts that are kept for later prompts that begin alike: on disk, and in the memory that the plan has for them."""

    dir: str | None = None
    """Directory of the pages; null: none outlive the process, auto: penstock/kv in the user's cache directory ($XDG_CACHE_HOME or
    ~/.cache). One process at a time writes there."""
    read_only: bool = False
    """Only read from the directory, beside whoever writes there: what is computed is kept in this process's memory alone."""
    limit_bytes: int | None = None
    """The pages of all models in it, at most; beyond it the least recently used go. null: the plan's kv.reuse.ssd_bytes, or 10 GiB where
    it has none."""
    staging_bytes: int | None = None
    """DRAM that pages pass through where the plan has none for them; two pages at least. Null: 64 MiB, or what the plan leaves of
    `hardware.dram_bytes` where that is less."""
    flush_s: float = 30.0
    """Seconds that a run waits, in all, until its prompts' pages are in the directory: between batches where the next one needs their
    memory, and at the end. What is not written then is not kept."""
    scratch_dir: str | None = None
    """Where the KV of a plan with `kv.ssd_pages` lies while it runs, in a file without a name; null: beside the checkpoint."""
    read_gbps: float | None = None
    """Rate of the directory's drive, by which it is decided whether reading is faster than computing; null: measured at the start."""


@dataclass
class ExpertsConfig:
    """Routed experts of a run."""

    record: str | None = None
    """File to write of what every token was routed to, for `planner replay` and `planner solve moe.routings=`; plain, or *.gz, *.xz."""


class Clip(StrEnum):
    """What becomes of a prompt that is longer than the plan's context."""

    tail = "tail"
    """Its tail stays."""


@dataclass
class RunConfig(SamplingKeys, Closing):
    """`runtime run`"""

    plan: str = MISSING
    """The plan file, written by `planner solve`."""
    checkpoint: str | None = None
    """Hugging Face checkpoint or packed store to run; null takes the plan's. A run does not compare a store with its checksums: `runtime
    verify` does."""
    adapter: str | None = None
    """Directory of the LoRA adapter (PEFT) that the store to run was packed with; what is not merged yet is refused."""
    prompt: str | None = field(default=None, metadata={"literal": True})
    """Text to reply to, through the model's chat template where it has one; - reads standard input."""
    prompts: str | None = None
    """File of prompts, one a line. In a *.jsonl each line is a JSON object: `messages` (objects with `role` and `content`, for the chat
    template), `prompt` (raw text) or `tokens` (ids), and at will `max_new_tokens` and `conversation` (a name; its earlier turns come before
    the prompt)."""
    template: Any = field(default_factory=dict, metadata={"open": True})
    """`template.KEY=value` is an option of the model's chat template, such as `template.enable_thinking=false`; `template=false` continues
    raw text."""
    clip: Clip | None = None
    """`tail` drops the head of a prompt that is longer than the plan's context; null refuses it."""
    replan: bool = False
    """Solve the plan's problem again: for a longer context where a prompt needs it, for the GPUs that are here where it is for more."""
    prompt_tokens: Annotated[int | None, TOKENS] = None
    """Length of random prompts when no text is given; null takes the plan's."""
    batch: int | None = None
    """Sequences together; null takes the plan's, or the number of prompts when fewer."""
    max_new_tokens: int | None = None
    """Tokens to generate for each prompt that does not say so itself; null takes the plan's."""
    stop: list[str] = field(default_factory=list, metadata={"literal": True})
    """Texts that end a sequence, besides the model's own stop tokens."""
    validate: Validation = Validation.none
    """`full` compares the logits with the unstreamed model's."""
    rounds: Annotated[int, ROUNDS] = 1
    """Times that all prompts are run; figures are means or medians over rounds, texts are the first one's."""
    warmup_rounds: Annotated[int, WARMUP_ROUNDS] = 0
    """Rounds before those, of which nothing is reported."""
    limits: bool = False
    """Measure limits in this process, before and after the run: the SSD's rate with the plan's blocks and depth, the arena's H2D, both at
    once. At the end, also what computing takes when nothing moves."""
    quiet: bool = False
    """Print the texts alone."""
    out: str = "run.json"
    """The report to write."""
    trace: str | None = None
    """Timeline to write of reads, copies, compute and waits: *.json, a Chrome trace for ui.perfetto.dev, or *.png, a picture."""
    speculate: Speculate | None = None
    """Who drafts tokens for each pass to verify: `lookup`, the sequence itself; `draft`, a smaller model; `self`, the model's own copy in 4
    bits; `mtp`, the model's own further heads; `auto`, who the plan has, or lookup; `none`, nobody; null: as the plan has it. The text is
    that of plain decoding, and drafting stops where it does not pay."""
    draft: str | None = None
    """Checkpoint or packed store of the model that drafts, in place of the plan's; the plan must leave room for it."""
    calibrate: bool = False
    """Keep what the run measured of the machine, for `planner solve` to go by."""
    verbose: bool = False
    """Log each load and eviction."""
    kv: ReuseConfig = field(default_factory=ReuseConfig)
    moe: ExpertsConfig = field(default_factory=ExpertsConfig)
    force: ForceConfig = field(default_factory=ForceConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    notes: list[str] = field(default_factory=list, metadata={"internal": True})
    """What was read from the environment."""


@dataclass
class ChatConfig(SamplingKeys, Closing):
    """`runtime chat`"""

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
    """The same."""
    checkpoint: str | None = None
    """Hugging Face checkpoint or packed store to talk with; null takes the plan's."""
    adapter: str | None = None
    """As in `runtime run`."""
    system: str | None = field(default=None, metadata={"literal": True})
    """The system message that a conversation begins with."""
    template: Any = field(default_factory=dict, metadata={"open": True})
    """`template.KEY=value` is an option of the model's chat template, such as `template.enable_thinking=false`; `template=false` talks in
    raw text."""
    max_new_tokens: int | None = None
    """Tokens of a reply, at most; null: as many as the context has room for."""
    clip: Clip | None = None
    """`tail` forgets the first turns of a conversation that outgrows the context; null refuses it."""
    quiet: bool = False
    """Print the replies alone."""
    kv: ReuseConfig = field(default_factory=ReuseConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    notes: list[str] = field(default_factory=list, metadata={"internal": True})
    """What was read from the environment."""


@dataclass
class BenchConfig(SamplingKeys, Closing):
    """`runtime bench`"""

    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    force: ForceConfig = field(default_factory=ForceConfig)
    """As in `planner solve`; a mode that contradicts it is not run."""
    calibration: CalibrationUse = CalibrationUse.own
    """As in `planner solve`."""
    modes: list[str] = field(default_factory=lambda: ["full", "preload", "stream", "mixed"])
    """Where weights are while the model runs. full: all where it computes (VRAM, or DRAM without a GPU). preload: all in VRAM and DRAM, as
    many in VRAM as fit. stream: all in DRAM, none resident in VRAM. mixed: the best plan that reads the SSD, too. Without a GPU preload
    and stream are full."""
    checkpoint: str | None = None
    """Hugging Face checkpoint or packed store to run; null takes the model's."""
    rounds: Annotated[int, ROUNDS] = 3
    """Times that all requests are run."""
    warmup_rounds: Annotated[int, WARMUP_ROUNDS] = 1
    """Rounds before those, of which nothing is reported."""
    prompt: str | None = field(default=None, metadata={"literal": True})
    """Text to continue; null runs random tokens."""
    prompts: str | None = None
    """File of prompts, one a line, or of requests (*.jsonl), as in `runtime run`."""
    out: str = "bench.json"
    """Every mode's report, with the keys of WSM's benchmark (docs/origins.md)."""
    verbose: bool = False
    """Show what each run prints, each load and eviction included."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    notes: list[str] = field(default_factory=list, metadata={"internal": True})
    """What was read from the environment."""


class PackFormat(StrEnum):
    """What a pack can make of a checkpoint's linear layers and routed experts."""

    lossless = "lossless"
    """12 bits a weight; every bit comes back."""
    int4 = "int4"
    """4 bits a weight, rounded to the nearest in groups of 128."""
    rows = "rows"
    """The numbers of GPTQ and AWQ in the order of rows, which a product reads as they lie: compressed-tensors' pack-quantized."""


@dataclass
class PackConfig(Closing):
    """`runtime pack`"""

    checkpoint: str = MISSING
    """Hugging Face checkpoint to read."""
    out: str = MISSING
    """Directory of the packed store."""
    adapter: str | None = None
    """Directory of a LoRA adapter (PEFT) to merge into the weights, as PEFT's merge_and_unload does."""
    format: PackFormat | None = None
    """Store linear layers and routed experts otherwise; null: as they are. Of a BF16 checkpoint, `lossless`: in 12 bits, of which every bit
    comes back; embedding, head, norms and units whose exponents do not fit stay as they are. `int4`: rounded to the nearest of 4 bits in
    groups of 128 columns; for quality take a quantiser's checkpoint. Of GPTQ and AWQ, `rows`: the same numbers in an order that products
    read as they lie; not with `desc_act`."""
    device: str | None = None
    """Raw block device to write the weights to instead of a file in `out`; needs force=true."""
    force: bool = False
    """Overwrite: an existing store, or a block device that is not mounted."""


@dataclass
class FetchConfig(Closing):
    """`runtime fetch`"""

    name: str = MISSING
    """The model on the Hugging Face hub: ORG/NAME."""
    out: str | None = None
    """Directory to download into; null: one of the model's name, here."""
    revision: str = "main"
    """Branch, tag or commit."""


@dataclass
class VerifyConfig(Closing):
    """`runtime verify`"""

    store: str = MISSING
    """Directory of a packed store."""


class KvAction(StrEnum):
    """What is done with a directory of KV pages."""

    list = "list"
    """Tell what each model keeps there."""
    verify = "verify"
    """Read every page and compare it with its checksums."""
    clear = "clear"
    """Remove every page, or those of one namespace."""


@dataclass
class KvConfig(Closing):
    """`runtime kv`"""

    action: KvAction = MISSING
    """What to do; the word alone will do. `verify` ends with status 1 when something is damaged."""
    dir: str = "auto"
    """Directory of KV pages; auto: penstock/kv in the user's cache directory, as in `runtime run`."""
    namespace: str | None = None
    """The one namespace to clear, as `list` shows it; null: all."""


@dataclass
class SynthConfig(Closing):
    """`runtime synth`"""

    model: ModelConfig = field(default_factory=ModelConfig)
    out: str = MISSING
    """Directory of the checkpoint to make."""
    seed: Annotated[int, Bounds(0, 2**63 - 1)] = 0
    """Of the random weights."""
    shard_bytes: Annotated[int, SOME_BYTES] = 2147483648
    """Bytes of one safetensors file, at most (a tensor is never split)."""


def check_template(wanted: Any) -> None:
    """UserError where ``template=`` is neither true, false nor options."""
    if wanted is not None and not isinstance(wanted, bool | dict):
        raise UserError(
            f"template={wanted}: must be false, which is raw text, or options such as template.enable_thinking=false; set it so"
        )
