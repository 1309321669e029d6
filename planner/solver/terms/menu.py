"""Menus: the values that the program chooses from, with what each costs, pruned to those that could be best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import ALIGN, GB, align_up
from penstock.planner.contract.bills.phase import Phase, prefill_phase
from penstock.planner.contract.bills.reuse import KeptSet
from penstock.planner.contract.decided.decisions import ResidentForms, WeightForm
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.decided.placement import head_block_bytes, head_blocks, slots_of_both
from penstock.planner.contract.decided.recording import prompts_never_recorded
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.workload import Workload
from penstock.planner.contract.prices.price import computing_of
from penstock.planner.contract.prices.sizes import activation_bytes, card_activation_bytes, recorded_prompt_bytes
from penstock.planner.contract.prices.stages import decode_compute_s, h2d_gbps, ssd_gbps
from penstock.planner.contract.ranks.rank_parts import part_sizes
from penstock.planner.contract.rules.limits import LIMITS
from penstock.planner.solver.terms.problem import Problem


@dataclass(frozen=True)
class Menus:
    """The values on offer where the hardware does not give them."""

    ring_slots: tuple[int, ...] = (4, 6, 8)
    """Two slots a kind copy one unit while another computes; more absorb jitter that the model does not see."""
    one_ffn_slots: int = 4
    """Of a ring in which FFN units have one slot: three of attention. While the card computes an FFN, the link brings the next attention.
    Where that is all that the link could do meanwhile, the second FFN slot is worth more as a resident: 3.5 % of a step of 8B at 6 GiB,
    measured on an H100 (docs/log.md, 2026-11-28)."""
    beside_attention: int = 3
    """The fewest slots of attention where the CPU computes FFN units, both kinds stream, and an FFN is copied ``beside_slower`` times as
    long as the CPU multiplies by one. The link brings the next layers' attention and an FFN meanwhile, whole units in
    turns. With two of attention the card waits for the third behind that FFN: 4 to 13 % of a step, simulated (docs/log.md, 2026-11-26)."""
    beside_slower: float = 1.25
    ssd_block_min_bytes: int = 4 * 2**20
    """Smaller blocks cost the interpreter more than they save in staging."""
    ssd_depth_min: int = 4
    """With fewer reads in flight the drive idles while a busy interpreter turns around."""
    in_turn_share: float = 0.85
    """Share of the drive's rate from which experts, or small layers, are read one after the other. Measured without a GPU: experts at 0.9
    of it take 10 to 12 % less of a step or a prompt. Layers of 13 MB keep the drive busy 1.00 of a step, and 0.86 where reads in flight
    fill all slots: what they bring arrives together, and the drive idles until the first layer was computed."""
    prompts_together: tuple[int, ...] = (4, 2, 1)
    """Prompts that a server's pass has room for. More come together in one pass of a hundred while the server keeps up."""
    prefix_parts: int = 8
    """Shares of a shared prefix that may be restored, where room is not for all of it."""
    chunk_tolerance: float = 0.01
    """A copy size is as good as another that is faster by no more than this: fewer copies cost the host less."""
    part_tolerance: float = 0.03
    """Parts of a pass are as good as smaller ones whose compute takes less by no more than this: a host launches fewer of them, and a card
    computes them better. On four H200s parts of 1024 took 0.963 s where parts of 256 took 1.341, 70B geometry and 32,768 tokens; by the law
    those were 5 % quicker."""
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    in_flight: int = 2
    """One copy runs while the next is queued; more only delays what is urgent."""


MENUS = Menus()


@dataclass(frozen=True)
class RingChoice:
    """``slots`` of a ring, ``ffn_slots`` of them for FFN units and blocks of the LM head where attention streams, too; 0: half of them."""

    slots: int
    ffn_slots: int = 0

    @property
    def of_both(self) -> tuple[int, int]:
        """Slots of attention and of these, where both stream."""
        return slots_of_both(self.slots, self.ffn_slots)


NO_RING = RingChoice(0)


@dataclass(frozen=True)
class SsdChoice:
    """``queue_depth`` reads of ``block_bytes``."""

    block_bytes: int
    queue_depth: int
    staging_bytes: int
    gbps: float


@dataclass(frozen=True)
class ChunkChoice:
    """H2D seconds per GB of each kind with copies of at most ``chunk_bytes``: (attn, ffn, head)."""

    chunk_bytes: int
    s_per_gb: tuple[float, ...]


@dataclass(frozen=True)
class PassChoice:
    """Prefill in passes of ``chunk_tokens`` per sequence."""

    chunk_tokens: int
    part_tokens: int
    """Of a pass that goes round several ranks in parts; 0: as a whole."""
    recorded_tokens: int
    """Of a pass or part that is recorded around attention, where nothing streams; 0: all are launched kernel by kernel."""
    activation_bytes: int
    phase: Phase
    kept_pages: int
    """Pages that must be kept for the tokens at the head of each prompt that are restored instead."""


def ssd_menu(hardware: HardwareProfile, model: ModelSpec, force: Force) -> list[SsdChoice]:
    """Measured (block, depth) points that a run can keep up, or forced ones; only those that read faster than every point with less
    staging.

    Those alone whose reads in flight are one expert's at most or, without experts, leave one of the fewest slots of streamed layers,
    unless all of them are much slower. Experts and layers then arrive one after the other, and the first one computes while the second is
    read.
    """
    least = min(MENUS.ssd_block_min_bytes, max(p.block_bytes for p in hardware.ssd_read))
    shallowest = min(MENUS.ssd_depth_min, max(p.queue_depth for p in hardware.ssd_read))
    measured = [p for p in hardware.ssd_read if p.block_bytes >= least and p.queue_depth >= shallowest]
    points = {(force.block_bytes or p.block_bytes // ALIGN * ALIGN, force.queue_depth or p.queue_depth) for p in measured}
    choices = [
        SsdChoice(block, depth, force.staging_bytes or block * depth, ssd_gbps(hardware, block, depth))
        for block, depth in points
        if block and block * depth <= (force.staging_bytes or block * depth)
    ]
    if not choices:
        raise UserError(
            f"force.staging_bytes={force.staging_bytes} is less than any block x queue depth (staging >= block x queue depth); "
            f"allowed: at least {min(block * depth for block, depth in points)}; raise it or force a smaller block_bytes or queue_depth"
        )
    slots = LIMITS.headroom_min * max(map(sum, zip(model.attn_bytes, model.ffn_bytes, strict=True)))
    most = model.experts.expert_bytes if model.experts else slots - 1
    in_turn = [c for c in choices if c.block_bytes * c.queue_depth <= most]
    if in_turn and max(c.gbps for c in in_turn) >= MENUS.in_turn_share * max(c.gbps for c in choices):
        choices = in_turn
    choices.sort(key=lambda c: (c.staging_bytes, -c.gbps, c.block_bytes))
    best: list[SsdChoice] = []
    for choice in choices:
        if not best or choice.gbps > best[-1].gbps:
            best.append(choice)
    return best


def chunk_menu(hardware: HardwareProfile, model: ModelSpec, force: Force) -> list[ChunkChoice]:
    """Whole units, copy sizes of the measured curve, or the forced one: a smaller one only where it is faster for some kind."""
    gpu = hardware.gpu
    kinds = (model.attn_max, model.ffn_max, head_block_bytes(model, head_blocks(model)))
    if gpu is None:
        return [ChunkChoice(force.chunk_bytes or max(kinds[:2]), (0.0,) * 3)]
    whole = align_up(max(kinds))
    sizes = sorted({whole, *(size for size, _ in gpu.h2d.points)}) if force.chunk_bytes is None else [force.chunk_bytes]
    best: list[ChunkChoice] = []
    for size in reversed(sizes):
        choice = ChunkChoice(size, tuple(1 / h2d_gbps(gpu, n, size) for n in kinds))
        if not any(_no_slower(larger, choice, MENUS.chunk_tolerance) for larger in best):
            best.append(choice)
    return best


def expert_chunk_bytes(hardware: HardwareProfile, model: ModelSpec, workload: Workload, batch: int, in_flight: int) -> int:
    """Bytes of one copy of a part of an expert: the smallest measured copy, or the first of its doublings that meets two conditions.

    * The link is as fast as with whole experts, within the tolerance.
    * ``in_flight`` copies keep the link busy while a layer computes: so long the host may wait at a router and queue nothing. With routers
      asked beforehand it is two layers, because their copies are seldom wrong.

    Not more, since a missing expert may wait for such copies.
    """
    gpu, experts = hardware.gpu, model.experts
    assert gpu is not None and experts is not None
    smallest, whole = gpu.h2d.points[0][0], align_up(experts.expert_bytes)
    size = smallest
    fastest = h2d_gbps(gpu, whole, whole)
    bridged_s = (2 if experts.foreseen else 1) * decode_compute_s(hardware, model, workload, batch) / model.layers
    away_bytes = bridged_s * fastest * GB
    while size < whole and (h2d_gbps(gpu, whole, size) < fastest * (1 - MENUS.chunk_tolerance) or size * in_flight < away_bytes):
        size *= 2
    return min(size, max(whole, smallest))


def _no_slower(one: ChunkChoice, other: ChunkChoice, tolerance: float) -> bool:
    return all(a <= b * (1 + tolerance) for a, b in zip(one.s_per_gb, other.s_per_gb, strict=True))


def form_menu(hardware: HardwareProfile, model: ModelSpec, force: Force) -> list[ResidentForms]:
    """Forms in which attention and FFN units may stay in VRAM: both as stored first; decoded where they are coded, or forced ones."""
    attn, ffn = (
        [forced] if forced else list(WeightForm) if coded and hardware.gpu else [WeightForm.stored]
        for forced, coded in ((force.attn_form, model.attn_coded), (force.ffn_form, model.ffn_coded))
    )
    return [ResidentForms(*pair) for pair in product(attn, ffn)]


def pass_menu(problem: Problem, kept: KeptSet) -> list[PassChoice]:
    """Prefill pass sizes: the whole prompt, then halves of it. Each counts from the prompt's first token, and from the ends of eighths of
    its shared prefix."""
    force, prompt = problem.force, problem.workload.prompt_tokens
    if force.prefill_chunk_tokens is not None:
        sizes = [force.prefill_chunk_tokens]
    else:
        sizes = [prompt]
        while sizes[-1] >= 2 * LIMITS.chunk_min_tokens:
            sizes.append(-(-sizes[-1] // 2))
    parts = MENUS.prefix_parts
    prefixes = sorted({kept.prefix_pages * part // parts for part in range(parts + 1)})
    every = product(sizes, prefixes, recorded_menu(problem))
    return [choice for tokens, pages, recorded in every for choice in _passes(problem, kept, tokens, pages, recorded)]


def _passes(problem: Problem, kept: KeptSet, tokens: int, pages: int, recorded: bool) -> Iterator[PassChoice]:
    """Those of ``tokens`` per sequence behind so many kept ``pages``, as a whole and in the best parts."""
    hardware, model, workload, force, batch = problem.hardware, problem.model, problem.workload, problem.force, problem.batch
    blocks, start, rows = head_blocks(model) if hardware.gpu else 1, pages * kept.page_tokens, batch * min(tokens, workload.prompt_tokens)
    activations = card_activation_bytes if hardware.gpu else activation_bytes

    def recorded_for(part: int) -> int:
        return (force.recorded_prompt_tokens or part or rows) if recorded else 0

    def phase_of(part: int) -> Phase:
        return prefill_phase(hardware, model, workload, batch, blocks, tokens, start, problem.forms, part, recorded_for(part))

    phases = {size: phase_of(size) for size in ([] if workload.is_served else part_sizes(model, rows))}
    for part in part_menu(force, {size: phase.rest.of(computing_of(hardware)) for size, phase in phases.items()}):
        many = recorded_for(part)
        if many == 0 or many >= (part or batch * tokens):
            nbytes = activations(model, workload, batch, tokens, part) + recorded_prompt_bytes(model, many)
            yield PassChoice(tokens, part, many, nbytes, phases.get(part) or phase_of(part), kept.needed(pages))


def recorded_menu(problem: Problem) -> list[bool]:
    """Whether prompts are recorded around attention: not, or either where ``problem`` lets them be, or as forced. Only where nothing
    streams: the program sees to it."""
    forced = problem.force.recorded_prompt_tokens
    if forced is not None:
        return [bool(forced)]
    launched = problem.workload.is_served or prompts_never_recorded(problem.hardware, problem.model) is not None
    return [False] if launched else [False, True]


def part_menu(force: Force, seconds: Mapping[int, float]) -> list[int]:
    """Tokens of a pass's parts: all together (0), and the largest of ``seconds`` that takes hardly longer than the quickest."""
    if force.prefill_part_tokens is not None:
        return [force.prefill_part_tokens]
    most = min(seconds.values(), default=0.0) * (1 + MENUS.part_tolerance)
    return [0, *[size for size in sorted(seconds, reverse=True) if seconds[size] <= most][:1]]


def served_chunks(workload: Workload, force: Force) -> list[int]:
    """Prompt tokens of a server's pass to try: those of one prompt, of a few, and of parts of one."""
    if force.prefill_chunk_tokens is not None:
        return [force.prefill_chunk_tokens]
    prompt = workload.prompt_tokens
    sizes = [prompt * many for many in MENUS.prompts_together]
    while sizes[-1] >= 2 * LIMITS.chunk_min_tokens:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def ring_menu(force: Force, also: Sequence[int] = ()) -> list[RingChoice]:
    """Rings of kinds that have half of the slots each, enough for a forced prefetch distance; of ``also`` so many slots, too."""
    if force.vram_slots is not None:
        return [RingChoice(force.vram_slots, force.vram_ffn_slots or 0)]
    least = (force.vram_prefetch_distance or 0) + LIMITS.ring_margin
    ffn = force.vram_ffn_slots or 0
    menu = sorted(slots for slots in {*MENUS.ring_slots, *also} if slots >= least and slots > ffn) or [max(least, ffn + 1)]
    return [RingChoice(slots, ffn) for slots in menu]


def one_ffn_ring(problem: Problem) -> list[RingChoice]:
    """The ring in which FFN units have one slot, where the program may choose it: none is forced. KV has copies between those of units,
    routed experts are no units of the ring, and of a rank with more layers than others some come before their FFN."""
    p, ring = problem, RingChoice(MENUS.one_ffn_slots, 1)
    forced = p.force.vram_slots is not None or p.force.vram_ffn_slots is not None
    deep = (p.force.vram_prefetch_distance or 0) + LIMITS.ring_margin > ring.slots
    others = p.model.experts is not None or p.workload.kv_spill or not (p.model.dealt is None or p.model.dealt.in_turns)
    return [] if forced or deep or others else [ring]


def batch_menu(workload: Workload) -> list[int]:
    """Batches to try: the workload's own; a menu when it is 0, up to the number of a server's clients, or of requests when there are
    several.

    A single request says nothing about how long the stream of requests is, so it does not bound the batch.
    """
    if workload.batch:
        return [workload.batch]
    if workload.requests == 1 and not workload.is_served:
        return list(MENUS.batches)
    most = min(workload.clients or workload.requests, MENUS.batches[-1])
    return sorted({b for b in MENUS.batches if b <= most} | {most})


def menus_on_offer(hardware: HardwareProfile, workload: Workload) -> dict[str, list[int]]:
    """Decision -> the values that the program chooses from, of those that have a menu of fewer than are allowed."""
    menus = {
        "vram_slots": list(MENUS.ring_slots),
        "block_bytes": [p.block_bytes for p in hardware.ssd_read if p.block_bytes >= MENUS.ssd_block_min_bytes],
        "queue_depth": [p.queue_depth for p in hardware.ssd_read if p.queue_depth >= MENUS.ssd_depth_min],
        "chunk_bytes": [size for size, _ in hardware.gpu.h2d.points] if hardware.gpu else [],
    }
    passes = (-(-workload.prompt_tokens // parts) for parts in (1, 2, 4, 8, 16, 32, 64))
    return menus | {"prefill_chunk_tokens": [tokens for tokens in passes if tokens >= LIMITS.chunk_min_tokens]}
