"""What the host issues for the layers of one pass: an MoE layer has more operations than the dense one that is measured."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.planner.common.measures import GB
from penstock.planner.contract.decided.decisions import KvPages, Tier
from penstock.planner.contract.decided.placement import Placement
from penstock.planner.contract.decided.recording import are_tabled, can_record, launched_because, serves_prompt
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import Experts, ModelSpec, touched_experts
from penstock.planner.contract.given.unit_spec import UnitKind, UnitSpec
from penstock.planner.contract.prices.price import SHARED


@dataclass(frozen=True)
class Operations:
    """Calls into PyTorch of one layer, views among them: the interpreter takes about as long for one as for a kernel.

    Counted under ``torch.inference_mode`` with ``transformers`` v5 and one token (tests/runtime/test_launches.py counts them again), routed
    experts as in ``experts.expert_forward``. Events are recorded on a GPU alone, by hooks in the probe's layer as in the runtime.
    """

    attention: int = 50
    """A Llama's layer without its MLP: norms, projections, rotary embedding, KV cache, attention, residual sums."""
    prompt: int = 4
    """More of these where a sequence has several tokens: the mask, and the cache's part of it."""
    behind: int = 6
    """The same where other tokens are cached before them: a mask of its own, and heads of K and V repeated to match it."""
    part: int = 15
    """More of a layer for each part of a prompt that goes through it by itself, from rank to rank: 8 make room for it, the rest are what
    receiving and sending take. On one core of Zen 4 a part takes 1.3 times a whole layer of a launched prompt (`bench/prompt_host.py`)."""
    begun: int = 90
    """Once of a pass with prompts, before its first layer: its tokens' tables, embeddings, rotations. The card waits. Of 8 layers of 8B
    that were recorded, wall less kernels is 1.1 ms for 128 tokens and 1.3 for 512. An operation took that host of four H100s 12.7 us."""
    recorded_part: int = 6
    """More of a part whose layer is recorded. On that host a part took 0.35 ms of two ranks and 0.40 of four, its pieces 0.11."""
    known: int = 13
    """Fewer of a prompt's layer on a card: the run's own code asks less for it than ``transformers`` does in the layer that is measured.
    Fitted with ``part``: a host of four H100s whose measured layer takes 1.35 ms launched 32 parts of a prompt in 48 to 54 ms, and in 57 to
    63 before that code asked less, when 63 were predicted."""
    mlp: int = 5
    """Three projections, SiLU, product."""
    marks: int = 4
    """Events at both ends of attention and FFN."""
    router: int = 19
    """Of an MoE layer, of Mixtral: scores, softmax, top-k and their sums, the choice read back, outputs put together, weighted and summed.
    Routers of other families have a few less or more, shared experts are not counted."""
    sorted: int = 4
    """More of these where several tokens are sorted by expert, and each token's outputs put apart."""
    expert: int = 5
    """Each that is touched: two projections, SiLU, product, the split of gate and up."""
    gathered: int = 4
    """More of these where an expert's tokens are gathered and scattered."""
    coded: int = 5
    """More of these for each product with a coded matrix, whose kernel Python looks up: 123 us on a host where an operation takes 23."""
    attention_products: int = 4
    mlp_products: int = 3
    expert_marks: int = 1
    """An event recorded behind an expert. One that has just come is waited for, once."""
    served: int = 16
    """Of another rank's MoE layer, of whose experts this one has slices: what is told taken apart, the choice read back, outputs put
    together, weighted, summed."""
    told: int = 8
    """More of these in a rank's own MoE layer whose experts are sliced: what is told put together, the sum in float32."""
    other: int = 3
    """More of these for each other rank: it is sent to, received from and added."""
    piece: int = 8
    """Of an MoE layer whose kernels up to its experts are recorded: their launch, the choice read back, outputs weighted, summed and put
    where the next launch reads them."""
    visit: int = 20
    """The same time for what is no operation of such a layer: its graph's launch, units entered and left, which experts lie where. A layer
    of gpt-oss-120b of which nothing moved took 363 us on an H200 (12 layers less 2), 95 of them kernels and weights."""
    step: int = 90
    """And once of such a step: its rows' tables, its last piece, the token. Of a dense step that is recorded as a whole, wall less kernels
    is 0.43 to 0.62 ms there."""
    together: int = 60
    """Of all of one token's experts whose matrices a card multiplies by in one launch, and of what such models' layers have beside: sinks,
    windows, biases. Fitted: a launched layer of gpt-oss-120b took 1.61 ms on an H200 and 2.7 ms on a host of two H100s, where a dense one
    takes 0.67 and 1.26 ms."""
    tabled: int = 20
    """Instead of ``piece``, ``visit`` and each expert's: of an MoE layer of one token, whose experts are recorded, too. A layer of
    gpt-oss-120b of which nothing moved took 257 to 290 us on an H200 (12 layers less 2)."""
    copied: int = 1
    """Of an expert that such a layer misses: its slot, its copy, an event. They come before the copy; nothing hides them. On an H100 whose
    operation takes 9 us, steps of 12 layers with 27 copies took 0.1 ms more than their bytes over the link and than steps that miss
    nothing: 3 us each. Before copies asked the driver less, 20 layers on an H200 took 6 to 15 us each."""
    handed: int = 8
    """Of an expert that the CPU computes: its slot, its unit, its rows, the call that begins with it. They come before the CPU begins, and
    all of them before the first copy. On a core of Zen 4 each took 24 to 35 us of Python, beside a card that does nothing, where a visit
    that misses none takes 25 to 30, and an expert's copy 10. No card has told it apart yet."""

    asked: int = 30
    """Of a layer that reads experts from the SSD, whose bytes nothing else overlaps: from its router's choice until the first read is asked
    for, and from the last byte until the launch. Some 110 and 230 us on two shared cores of Zen 4 (`bench/visit_host.py`, experts of
    13 MB: what is read has driven the interpreter out of the caches). Beside other programs a host of four H100s took 0.85 of what it took
    before, 876 us a visit. Since kernels wait for the last byte themselves, what came behind it is hidden. That is not fitted again: an
    H200's drive drifts by more."""

    def dense(self, gpu: bool) -> int:
        return self.attention + self.mlp + self.marks * gpu

    def routed(self, experts: Experts, tokens: int, gpu: bool, grouped: bool = False) -> float:
        """A layer with ``experts`` in a pass over ``tokens`` tokens; ``grouped``: see :func:`are_grouped`."""
        each = touched_experts(experts, tokens) * self.each(tokens, gpu, grouped)
        return self.attention + self.marks * gpu + self.routing(tokens, grouped) + each

    def in_pieces(self, experts: Experts, tokens: int, tabled: bool) -> float:
        """The same of a decode step that is recorded up to the layer's experts; ``tabled``: see :func:`are_tabled`."""
        return self.piece_routing(tokens, tabled) + touched_experts(experts, tokens) * self.piece_each(tokens, tabled)

    def piece_routing(self, tokens: int, tabled: bool) -> int:
        """Of that without what each expert takes."""
        return self.tabled if tabled else self.piece + self.visit + self.sorted * (tokens > 1)

    def piece_each(self, tokens: int, tabled: bool) -> int:
        """Of that what each expert takes."""
        return 0 if tabled else self.each(tokens, True)

    def shared(self, slices: int) -> int:
        """More of an MoE layer of whose experts each of ``slices`` ranks has a slice."""
        return self.told + self.other * (slices - 1) if slices > 1 else 0

    def serving(self, tokens: int, grouped: bool = False) -> int:
        """Of another rank's layer of sliced experts without what each expert takes."""
        return self.served + self.sorted * (tokens > 1) + self.together * grouped

    def routing(self, tokens: int, grouped: bool = False) -> int:
        """Of an MoE layer's FFN without what each expert takes."""
        return self.router + self.sorted * (tokens > 1) + self.together * grouped

    def each(self, tokens: int, gpu: bool, grouped: bool = False) -> int:
        """Of an expert that is touched."""
        return 0 if grouped else self.expert + self.gathered * (tokens > 1) + self.expert_marks * gpu


OPERATIONS = Operations()

MOST_COPIES = 5.5
"""Copies (``Gpu.copy_s``) that take the host as long as a layer's ``layer_launch_s``, at most, where steps are recorded.

Hosts that launch slowly run recorded steps as others do: those take the interpreter and the driver's calls, and launch hardly anything. On
two H100s where a launched layer takes 0.7 and 1.2 ms and a copy 88 us, steps of 12 layers of gpt-oss-120b are by this, with what they miss,
predicted at 0.96 (a run of which the CPU computes some experts, before visits took the host less) and 1.00 of what they took.
"""
_PRODUCTS = {UnitKind.attn: OPERATIONS.attention_products, UnitKind.ffn: OPERATIONS.mlp_products}


def are_grouped(hardware: HardwareProfile, model: ModelSpec, tokens: int) -> bool:
    """Whether a pass over ``tokens`` tokens computes a layer's experts in one launch a product."""
    return bool(hardware.gpu and tokens == 1 and all(unit.format.grouped for unit in model.of_kind(UnitKind.expert)))


def recorded_launch_s(hardware: HardwareProfile) -> float:
    """Host seconds by which operations of recorded steps are counted: ``layer_launch_s``, or less where copies say so."""
    gpu = hardware.gpu
    return min(hardware.layer_launch_s, MOST_COPIES * gpu.copy_s) if gpu and gpu.copy_s else hardware.layer_launch_s


def copied_issue_s(hardware: HardwareProfile, model: ModelSpec, tokens: int) -> float:
    """Host seconds before an expert's copy begins that a recorded step over ``tokens`` tokens misses; 0 where other launches hide them."""
    if model.experts is None or not can_record(hardware, model) or not are_tabled(model, tokens):
        return 0.0
    return OPERATIONS.copied / OPERATIONS.dense(True) * recorded_launch_s(hardware)


def handed_issue_s(hardware: HardwareProfile) -> float:
    """Host seconds before the CPU begins with an expert that it computes beside the card."""
    return OPERATIONS.handed / OPERATIONS.dense(True) * recorded_launch_s(hardware)


def asked_issue_s(hardware: HardwareProfile) -> float:
    """Host seconds by which a layer that reads experts from the SSD takes longer than they are in transit; 0 without a card, where compute
    goes on meanwhile."""
    return OPERATIONS.asked / OPERATIONS.dense(True) * recorded_launch_s(hardware) if hardware.gpu else 0.0


def expert_launches(hardware: HardwareProfile, model: ModelSpec, tokens: int) -> float:
    """Of what the host launches for an MoE layer of a step over ``tokens`` tokens, the share that is for one of its experts."""
    if model.experts is None:
        return 0.0
    if can_record(hardware, model):
        tabled = are_tabled(model, tokens)
        return OPERATIONS.piece_each(tokens, tabled) / OPERATIONS.in_pieces(model.experts, tokens, tabled)
    grouped = are_grouped(hardware, model, tokens)
    return OPERATIONS.each(tokens, True, grouped) / OPERATIONS.routed(model.experts, tokens, True, grouped)


def prompt_operations(hardware: HardwareProfile, before: bool) -> int:
    """More operations of a layer in a pass with a prompt than in a decode step; ``before``: other tokens are cached before them."""
    return (OPERATIONS.behind if before else OPERATIONS.prompt) - OPERATIONS.known * (hardware.gpu is not None)


def recorded_operations(hardware: HardwareProfile, model: ModelSpec, tokens: int, recorded_tokens: int) -> float:
    """More operations of a prompt's layer, which are less than none, where a pass of ``recorded_tokens`` was recorded around attention, by
    what that takes in place of a launched one's operations and of coded products'. 0 where it serves no pass of ``tokens``."""
    gpu, launch_s = hardware.gpu, hardware.layer_launch_s
    if gpu is None or not launch_s or not gpu.prompt_piece_s or not serves_prompt(recorded_tokens, tokens):
        return 0.0
    dense = OPERATIONS.dense(True)
    coded_s = sum(layers * coded_issue_s(hardware, unit) for unit, layers in model.coded.items()) / model.layers
    return (gpu.prompt_piece_s - coded_s) / launch_s * dense - dense - prompt_operations(hardware, True)


def part_operations(parts: int, tokens: int, recorded_tokens: int) -> int:
    """More operations of a layer for each of so many parts of a pass, of ``tokens`` each, where one of ``recorded_tokens`` is recorded; a
    whole pass has none."""
    return OPERATIONS.part + OPERATIONS.recorded_part * serves_prompt(recorded_tokens, tokens) if parts > 1 else 0


def begun_issue_s(hardware: HardwareProfile) -> float:
    """Host seconds of a pass with prompts before its first layer is launched, in which a card waits; 0 without one."""
    return OPERATIONS.begun / OPERATIONS.dense(True) * hardware.layer_launch_s if hardware.gpu else 0.0


def issue_s(hardware: HardwareProfile, model: ModelSpec, tokens: int, more: float = 0) -> float:
    """Host seconds to launch all layers of a pass over ``tokens`` tokens: for each layer the measured seconds, times its operations over
    those of a dense layer in a decode step. This pass's attention has ``more`` operations than that."""
    gpu = hardware.gpu is not None
    dense = OPERATIONS.dense(gpu)
    operations: float = model.layers * (dense + more)
    if model.experts:
        grouped, own = are_grouped(hardware, model, tokens), len(model.moe)
        operations += own * (OPERATIONS.routed(model.experts, tokens, gpu, grouped) + OPERATIONS.shared(model.slices) - dense)
        each = touched_experts(model.experts, tokens) * OPERATIONS.each(tokens, gpu, grouped)
        operations += (len(model.experts.layers) - own) * (OPERATIONS.serving(tokens, grouped) + each)
    coded_s = sum(layers * coded_issue_s(hardware, unit) for unit, layers in model.coded.items())
    return operations / dense * hardware.layer_launch_s + coded_s


def keeps_link_busier(hardware: HardwareProfile, placement: Placement) -> bool:
    """Whether a step is launched kernel by kernel though it could be recorded: its copies alone take as long as launches and copies that
    share a host (``price.SHARED``). Not where the CPU computes units, which a recorded step hands over, nor of several ranks, whose hops it
    holds.

    Fitted when a CUDA graph held the copies: of 8B in BF16 on H200s they reached 0.94 to 0.988 of what the link gives, by how its process
    happened to begin, and those that are launched 0.993 to 0.996 (`bench/one_row.py`). Copies between graphs, on one stream, come as fast
    as those on an H100 (docs/log.md, 2026-11-27). On an H200 such steps take 0.6 to 1.5 % more than launched ones (2026-11-29): the rule
    is worth that.
    """
    if hardware.gpu is None or placement.model.dealt is not None or placement.host_units:
        return False
    link_s = placement.h2d_bytes_per_pass / hardware.gpu.h2d.peak / GB
    return link_s > 0 and link_s >= SHARED * (link_s + issue_s(hardware, placement.model, 1))


def is_recorded(hardware: HardwareProfile, placement: Placement, kv: KvPages) -> bool:
    """Whether decode steps of a plan are recorded."""
    if not can_record(hardware, placement.model) or launched_because(placement, kv.of(Tier.dram) + kv.of(Tier.ssd)) is not None:
        return False
    return not keeps_link_busier(hardware, placement)


def pieces_issue_s(hardware: HardwareProfile, model: ModelSpec, tokens: int) -> float:
    """Host seconds to launch all of a decode step that is recorded up to each layer's experts; 0 where it is recorded as a whole."""
    if model.experts is None:
        return 0.0
    tabled = are_tabled(model, tokens)
    each, launch_s = OPERATIONS.in_pieces(model.experts, tokens, tabled), recorded_launch_s(hardware) if tabled else hardware.layer_launch_s
    return len(model.experts.layers) * each / OPERATIONS.dense(True) * launch_s


def step_issue_s(hardware: HardwareProfile, model: ModelSpec) -> float:
    """Host seconds of a decode step that is recorded up to each layer's experts, beside its layers; nothing hides them."""
    return OPERATIONS.step / OPERATIONS.dense(True) * recorded_launch_s(hardware) if model.experts else 0.0


def serving_issue_s(hardware: HardwareProfile, model: ModelSpec, tokens: int) -> float:
    """Host seconds in which a rank launches what slices of another rank's layer take beside the experts', when it has been told; 0 where no
    rank has any."""
    if model.slices == 1:
        return 0.0
    gpu = hardware.gpu is not None
    return OPERATIONS.serving(tokens, are_grouped(hardware, model, tokens)) / OPERATIONS.dense(gpu) * hardware.layer_launch_s


def coded_issue_s(hardware: HardwareProfile, unit: UnitSpec) -> float:
    """Host seconds by which launching products with ``unit`` takes longer than with a plain one; 0 on a CPU. None was seen of a format that
    has no product of its own."""
    if hardware.gpu is None or not unit.format.product_rows:
        return 0.0
    return OPERATIONS.coded * _PRODUCTS.get(unit.kind, 0) / OPERATIONS.dense(True) * hardware.layer_launch_s
