"""The configuration's schema: what a user may set, its types, and what each key means.

OmegaConf checks against these; ``resolve`` and ``resolve_hardware`` beside it turn them, once, into the frozen types of all else.
Sizes are bytes (an override may say ``6GiB``), GB = 1e9.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from omegaconf import MISSING

from penstock.planner.common.closing import Closing
from penstock.planner.common.outside.bounds import (
    CORES,
    COUNT_BYTES,
    MOST_EXPERTS,
    MOST_LAYERS,
    RATE,
    RATE_IF_MEASURED,
    SECONDS,
    SHARE,
    SHARE_IF_MEASURED,
    SOME_BYTES,
    SOME_SECONDS,
    TOKENS,
    TOKENS_OR_NONE,
    Bounds,
)
from penstock.planner.contract.config.decided_keys import DecidedKeys, decided_keys
from penstock.planner.contract.decided.speculating import Speculate
from penstock.planner.contract.given.dealt import ExpertShare
from penstock.planner.contract.given.formats import Dtype
from penstock.planner.contract.given.workload import Objective


@dataclass
class SsdConfig:
    read: list[list[Any]] = MISSING
    """Read rates: rows of [block_bytes, queue_depth, GB/s], cold, O_DIRECT."""
    write_gbps: Annotated[float, RATE_IF_MEASURED] = MISSING
    """Sequential write."""
    long_gbps: Annotated[float, RATE_IF_MEASURED] = 0.0
    """Read rate once the drive has read for `burst_s` without a pause; 0: not measured, or no lower than `read`. Plans that read for longer
    go by it."""
    burst_s: Annotated[float, SECONDS] = 0.0
    """Seconds for which the drive keeps the rates of `read`."""


@dataclass
class DramConfig:
    copy_gbps: Annotated[float, RATE_IF_MEASURED] = MISSING
    """Bytes copied per second from DRAM to DRAM."""
    bus_gbps: Annotated[float, RATE_IF_MEASURED] = MISSING
    """Bytes per second through DRAM, reads and writes together: the SSD's reads, copies to and from the GPU, the CPU's products."""
    pin_s_per_gb: Annotated[float, SECONDS] = MISSING
    """Seconds to fault in and page-lock 1 GB."""


@dataclass
class CpuConfig:
    cores: Annotated[int, CORES] = MISSING
    """Cores that may be used."""
    threads: Annotated[int, Bounds(0, 2**20)] = 0
    """Threads that multiply fastest, which a run without a GPU uses; 0: torch's own choice."""
    matvec_gbps: Annotated[float, RATE] = MISSING
    """Bytes of BF16 weights multiplied by one vector per second."""
    dense_tflops: Annotated[float, RATE] = MISSING
    """BF16 matrix products at prefill shapes."""
    decode: dict[str, float] = field(default_factory=dict)
    """Format of weights -> 1e9 elements decoded per second; a format that is missing is derived from `matvec_gbps`."""
    products: dict[str, float] = field(default_factory=dict)
    """Format of weights -> GB/s of stored bytes that one row is multiplied by without a GPU; a format that is missing is decoded first."""
    attention_gbps: Annotated[float, RATE_IF_MEASURED] = 0.0
    """Bytes of K and V, repeated over query heads, that torch attends to by one token per second; 0: not measured, as `matvec_gbps`."""
    attention_tflops: Annotated[float, RATE_IF_MEASURED] = 0.0
    """torch's causal attention over prompts, FLOPs of the lower triangle alone; 0: not measured, as `dense_tflops`."""


@dataclass
class GpuConfig:
    name: str = MISSING
    """As the driver says it."""
    context_bytes: Annotated[int, COUNT_BYTES] = MISSING
    """VRAM taken by the CUDA context and its libraries."""
    dense_tflops: Annotated[float, RATE] = MISSING
    """BF16 matrix products at prefill shapes."""
    attention_tflops: Annotated[float, RATE] = MISSING
    """Causal attention over long prompts, FLOPs of the lower triangle alone."""
    burst_tflops: Annotated[float, RATE_IF_MEASURED] = 0.0
    """BF16 matrix products for the first `burst_s` of a card that has rested; 0: not measured, or no faster than `dense_tflops`."""
    burst_s: Annotated[float, SECONDS] = 0.0
    """Seconds of products until a card's power holds its clocks back."""
    memory_gbps: Annotated[float, RATE] = MISSING
    """Bytes of weights read per second at decode shapes."""
    h2d: list[list[Any]] = MISSING
    """Page-locked host to device: rows of [chunk_bytes, GB/s]."""
    d2h: list[list[Any]] = MISSING
    """Device to page-locked host: rows of [chunk_bytes, GB/s]."""
    h2d_pageable_gbps: Annotated[float, RATE_IF_MEASURED] = MISSING
    """Host to device from memory that is not page-locked; 0: not measured."""
    h2d_with_d2h_gbps: Annotated[float, RATE_IF_MEASURED] = MISSING
    """Host to device while the other direction is busy too."""
    copy_s: Annotated[float, SECONDS] = 1.3e-4
    """Host seconds of one copy to the device while kernels are launched, however small it is. The default is from an H100: copies of 4 MiB,
    79 microseconds each on the link, came 137 apart."""
    layer_kernels_s: Annotated[float, SECONDS] = 6.2e-5
    """Seconds of one layer's kernels beside its products, one after the other in a CUDA graph, as steps run whose weights VRAM and DRAM
    hold; 0: steps are launched kernel by kernel. The default is from an H200: a step of an 8B geometry in BF16, 5.88 ms by the wall, less
    its weights at the memory's rate."""
    prompt_piece_s: Annotated[float, SECONDS] = 0.0
    """Host seconds to launch a layer of a prompt whose kernels are recorded around its attention, where nothing streams; 0: not known, and
    prompts are launched kernel by kernel. `planner probe` measures it. Presets have 0.15 of `layer_launch_s`."""
    decode: dict[str, float] = field(default_factory=dict)
    """Format of weights -> 1e9 elements decoded per second; a format that is missing is derived from `memory_gbps`."""
    products: dict[str, float] = field(default_factory=dict)
    """Format of weights -> GB/s of stored bytes that a product of one row reads; a format that is missing is derived from `memory_gbps`."""


@dataclass
class CardConfig:
    device: Annotated[int, Bounds(0, 1023)] = MISSING
    """Its number."""
    vram_bytes: Annotated[int, SOME_BYTES] = MISSING
    """VRAM that a plan may use, the CUDA context included."""
    gpu: GpuConfig = field(default_factory=GpuConfig)


@dataclass
class HostConfig:
    threads: Annotated[int, CORES] = MISSING
    """Pinned threads that multiply beside the GPU; the other cores serve readers, copies and the interpreter."""
    products: dict[str, list[list[Any]]] = field(default_factory=dict)
    """Format of weights -> rows of [rows of the pass, GB/s of stored bytes], while nothing is copied to the GPU."""
    hop_s: Annotated[float, SECONDS] = 5e-5
    """Seconds from the GPU to the CPU and back, of one unit, beside the product. The default is from an H100 whose link was busy: 45
    microseconds from the word that asks to the one that answers, and 5 to read what was computed."""
    beside_h2d: Annotated[float, SHARE] = 1.0
    """Share of `products` that is left while copies to the GPU take the link's whole time."""
    h2d_beside: Annotated[float, SHARE] = 1.0
    """Share of the link's rate that is left while the CPU multiplies."""
    attention_gbps: Annotated[float, RATE_IF_MEASURED] = 0.0
    """GB/s of K and V that attention of one token a sequence reads where they lie in DRAM; 0: not known, so the GPU attends to all."""
    attention_beside_h2d: Annotated[float, SHARE_IF_MEASURED] = 0.0
    """`beside_h2d` of attention; 0: not measured, so it is taken to be that of products."""
    h2d_beside_attention: Annotated[float, SHARE_IF_MEASURED] = 0.0
    """`h2d_beside` while the CPU attends; 0: not measured, so it is taken to be that beside products."""
    attention_hop_s: Annotated[float, SECONDS] = 1e-4
    """Seconds from the GPU to the CPU and back, of one layer's attention, or of a unit that the interpreter hands over. The default is
    derived: a thread that sleeps on an event (20 microseconds), copies of the new rows (20), the GPU's wait for a flag (5), and as much
    again for a busy interpreter."""
    format_threads: dict[str, int] = field(default_factory=dict)
    """Format of weights -> threads that multiply by it, where more pay than `threads`: arithmetic binds it and not the bus."""
    ahead_bytes: Annotated[int, Bounds(0, 1 << 30)] = 0
    """Bytes that each thread reads ahead of the next unit's rows, into its core's cache, while the GPU computes. 0: none. `planner probe`
    takes half of a hardware thread's second-level cache; presets have none."""
    f16_products: dict[str, list[list[Any]]] = field(default_factory=dict)
    """`products` of models that compute in F16, not in BF16. Without them the CPU computes nothing of these beside the GPU."""


@dataclass
class LinksConfig:
    together_gbps: list[list[Any]] = field(default_factory=list)
    """Page-locked host to device of several GPUs at once: rows of [GPUs, GB/s of all together]; empty: each as fast as alone."""
    hop_s: Annotated[float | None, SECONDS] = None
    """Seconds in which the hidden state of a token goes from one rank to the next, while all links are busy. null: 70 microseconds, NCCL's
    send and receive of 16 KB between two H100s; without a GPU 420, gloo's between two processes of a busy host."""
    p2p_gbps: Annotated[float | None, RATE_IF_MEASURED] = None
    """Rate between ranks of the hidden states of a prompt; 0: not measured, and not waited for. null: 0; without a GPU 0.2, gloo's."""
    word_hop_s: Annotated[float, Bounds(0.0, 1.0)] = 0.0
    """Seconds in which the hidden state of a token goes from one rank to the next inside a recorded step, through page-locked memory of the
    host, while all links are busy; 0: not measured, or not possible, so steps of several ranks are launched kernel by kernel."""
    vram_bytes: Annotated[int | None, COUNT_BYTES] = None
    """VRAM that hops take of each card, beside what its rank has: buffers, with NCCL its kernels as well. null: 320 MiB, as NCCL's of two
    H100s; without a GPU 0."""


@dataclass
class NetworkConfig:
    gbps: Annotated[float, RATE_IF_MEASURED] = 0.0
    """GB/s of a large hidden state from one host to another, 1.25 for 10 Gbit/s; 0: not measured, and a plan for several hosts needs it."""
    hop_s: Annotated[float, SECONDS] = 1e-4
    """Seconds in which the hidden state of a token goes from one host to another. The default is twice what a word takes one way over TCP
    through one switch, 50 microseconds."""


@dataclass
class HardwareConfig:
    name: str = MISSING
    """As it is shown, and as a preset or profile is found."""
    vram_bytes: Annotated[int, COUNT_BYTES] = MISSING
    """VRAM that a plan may use, the CUDA context included; 0 computes on the CPU."""
    dram_bytes: Annotated[int, SOME_BYTES] = MISSING
    """DRAM that a plan may use."""
    ssd_bytes: Annotated[int, COUNT_BYTES] = MISSING
    """Free SSD space that a plan may use, for KV and for the weights of a model that has no checkpoint yet."""
    ssd: SsdConfig = field(default_factory=SsdConfig)
    dram: DramConfig = field(default_factory=DramConfig)
    cpu: CpuConfig = field(default_factory=CpuConfig)
    gpu: GpuConfig | None = None
    """None on a machine without a GPU."""
    host: HostConfig | None = None
    """What the CPU multiplies by beside a GPU; null: not measured, so that the GPU computes everything."""
    layer_launch_s: Annotated[float, SOME_SECONDS] = MISSING
    """Host seconds to issue one decoder layer's kernels."""
    origin: dict[str, str] = field(default_factory=dict)
    """Figure -> `measured DATE: how` or `datasheet: where`; a group's name covers all its figures."""
    pass_s: Annotated[float, SECONDS] = 0.0
    """Seconds that each pass over the model takes beyond its slowest stage, as `runtime run calibrate=true` found them."""
    start_s: Annotated[float, SECONDS] = 0.0
    """Seconds that a start takes beyond reading, page-locking and the first kernels, found likewise."""
    spread: dict[str, float] = field(default_factory=dict)
    """Of what runs have measured: figure -> the share by which nine of ten runs are within the profile's."""
    devices: list[int] | None = None
    """Numbers of the GPUs that a plan may use; null: the first one. `[0]` plans for one. Each is `gpu`, of `vram_bytes`, unless `others`
    names its number."""
    others: list[CardConfig] = field(default_factory=list)
    """GPUs that are unlike `gpu`: of each its number (`device`), its `vram_bytes`, and what `gpu` says of it."""
    links: LinksConfig | None = None
    """What several ranks share; null: not measured, so that each GPU's link carries what it does alone."""
    hosts: Annotated[int, Bounds(1, 64)] = 1
    """Machines like this one that a plan deals layers over, as many ranks on each; all else here is of one of them."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    """Between two hosts, as `planner probe probe.peers=` measures it."""


@dataclass
class ModelConfig:
    """A decoder's geometry. With ``checkpoint`` everything is read from there instead."""

    name: str = MISSING
    """As it is shown."""
    checkpoint: str | None = None
    """Directory of a Hugging Face checkpoint, of a packed store, or of a config.json alone; or ORG/NAME on the hub."""
    config: dict[str, Any] = field(default_factory=dict)
    """A published config.json, from which everything but `layers` is taken."""
    source: str = ""
    """Where the geometry comes from."""
    model_type: str = ""
    """As Hugging Face names it (`llama`, `mixtral`, ...)."""
    layers: Annotated[int | None, Bounds(1, MOST_LAYERS)] = None
    """Decoder layers; fewer than the model's own make a shortened model."""
    hidden: Annotated[int, Bounds(0, 2**24)] = 0
    """Elements of a token's hidden state."""
    ffn: Annotated[int, Bounds(0, 2**24)] = 0
    """Intermediate size of a dense FFN."""
    heads: Annotated[int, Bounds(0, 2**24)] = 0
    """Query heads."""
    kv_heads: Annotated[int, Bounds(0, 2**24)] = 0
    """Heads of K and V; fewer than query heads under grouped-query attention."""
    head_dim: Annotated[int, Bounds(0, 2**24)] = 0
    """Elements of one head."""
    vocab: Annotated[int, Bounds(0, 2**31)] = 0
    """Rows of the embedding table."""
    tied: bool = False
    """Whether the LM head is the embedding table."""
    qk_norm: bool = False
    """RMSNorm over head_dim on queries and keys (Qwen3)."""
    qkv_bias: bool = False
    """Whether the projections to Q, K and V add a bias (Qwen2)."""
    dtype: Dtype = Dtype.bfloat16
    """What weights are stored in and products are computed in."""
    experts: Annotated[int, Bounds(0, MOST_EXPERTS)] = 0
    """Routed experts a layer; 0 is a dense model."""
    top_k: Annotated[int, Bounds(0, MOST_EXPERTS)] = 0
    """Routed experts that one token visits."""
    expert_ffn: Annotated[int, Bounds(0, 2**24)] = 0
    """Intermediate size of one routed expert."""
    rope_theta: Annotated[float, Bounds(1e-3, 1e12, zero="above 0")] = 10000.0
    """Base of the rotary position embedding."""
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    """Scaled rotary embedding as Hugging Face names it (`rope_type`, `factor`, ...); empty is unscaled."""
    norm_eps: Annotated[float, Bounds(0, 1)] = 1e-5
    """Of RMSNorm."""
    max_positions: Annotated[int, TOKENS] = 4096
    """Longest sequence that the model is made for, in tokens."""


@dataclass
class WorkloadConfig:
    name: str = MISSING
    """As it is shown."""
    batch: Annotated[int, Bounds(0, 2**20)] = 1
    """Sequences decoded together; a menu is solved when the objective is throughput and this is 0."""
    prompt_tokens: Annotated[int, TOKENS] = 512
    """Tokens of each prompt."""
    new_tokens: Annotated[int, TOKENS] = 128
    """Tokens generated for each request."""
    context_tokens: Annotated[int, TOKENS_OR_NONE] = 0
    """Tokens that each sequence has room for, at least; 0: prompt_tokens and new_tokens. Seconds are predicted for these two."""
    requests: Annotated[int, TOKENS] = 1
    """Requests in all."""
    shared_prefix_tokens: Annotated[int, TOKENS_OR_NONE] = 0
    """Tokens at the head of every prompt that an earlier one began with, too."""
    kept_tokens: Annotated[int | None, TOKENS_OR_NONE] = None
    """Tokens of earlier prompts whose KV is worth keeping: the working set of all shared prefixes. Null: one prefix; 0 keeps nothing."""
    objective: Objective = Objective.latency
    """What the plan minimises: latency (seconds of all requests), throughput (seconds a token), ttft (time to first token)."""
    vram_guard_bytes: Annotated[int, COUNT_BYTES] = 134217728
    """VRAM to leave alone."""
    dram_reserve_bytes: Annotated[int, COUNT_BYTES] = 0
    """DRAM to leave alone, on top of what the hardware's budget leaves."""
    clients: Annotated[int, Bounds(0, 2**20)] = 0
    """Of a server: those who ask at the same time, each again once it was answered; 0: the requests come in batches, to no server."""
    arrivals_per_s: Annotated[float, Bounds(0, 1e6)] = 0.0
    """Of a server: requests that come in a second, at random; 0: clients ask as often as they are answered."""
    length_spread: Annotated[float, Bounds(0, 10)] = 0.0
    """Of a server: the standard deviation of the lengths of prompts and of replies, over their means."""
    queue: Annotated[int, Bounds(1, 2**20)] = 128
    """Requests that wait at a server at most; it refuses more."""
    kv_spill: bool = False
    """Let the KV of some layers lie outside VRAM, or outside DRAM without a GPU, and stream with each pass."""
    source: str = ""
    """Where the figures come from."""


@decided_keys("force")
class ForceConfig(DecidedKeys):
    """Decisions to fix; the rest is solved around them."""


@decided_keys("moe")
class MoeConfig(DecidedKeys):
    """How routed experts are kept and fetched; null leaves it to the program."""

    routings: str | None = None
    """Recorded routings (a file of `moe.record=`): how often kept experts are used again, and what routers foresee; null: as known of
    Mixtral-8x7B."""
    share: ExpertShare | None = None
    """How several ranks share a layer's experts: `whole`, all with the layer's rank, or `sliced`, a slice of each with every rank, whose
    links then bring a missed one together. null: `sliced` where DRAM has all experts for cards, and a plan is 5 % faster by it."""


class CalibrationUse(StrEnum):
    """Which corrections of the hardware's figures a plan goes by."""

    own = "own"
    """Those that runs on this machine found, where there are any."""
    off = "off"
    """None: the profile as it is."""


@dataclass
class SolveConfig(Closing):
    """`planner solve`"""

    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    force: ForceConfig = field(default_factory=ForceConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    calibration: CalibrationUse = CalibrationUse.own
    """`own`: rates as `runtime run calibrate=true` found them on this machine; `off`: as the profile has them."""
    speculate: Speculate = Speculate.none
    """Who drafts tokens for each pass to verify: `lookup`, the sequence itself; `draft`, the smaller model of draft=; `self`, the model's
    own copy in 4 bits; `mtp`, the model's own heads that predict further tokens; `auto`, the best of lookup and draft= where it pays;
    `none`, nobody. The text is that of plain decoding."""
    draft: str | None = None
    """Checkpoint or packed store of the model that drafts, which has the same tokens; for `self` the copy that `runtime pack format=int4`
    made, or a better one."""
    ranks: Annotated[int | None, Bounds(1, 1024)] = None
    """Processes that a model's layers are dealt over, one GPU each or, without GPUs, a share of the cores each; null: one for each GPU of
    the profile, or one alone where that is no slower."""
    out: str = "plan.yaml"
    """The plan file to write."""
    notes: list[str] = field(default_factory=list, metadata={"internal": True})
    """What was read from the environment."""
