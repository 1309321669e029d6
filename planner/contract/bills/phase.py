"""How often one prefill, or one decode step, pays the prices of what it moves: the step law."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from penstock.planner.common.measures import GB
from penstock.planner.contract.decided.decisions import ResidentForms
from penstock.planner.contract.decided.placement import head_block_bytes
from penstock.planner.contract.decided.recording import can_record
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.planner.contract.given.workload import Objective, Workload
from penstock.planner.contract.prices.decoding import unit_s
from penstock.planner.contract.prices.late_experts import LateExperts
from penstock.planner.contract.prices.launches import (
    begun_issue_s,
    coded_issue_s,
    issue_s,
    part_operations,
    recorded_operations,
    serving_issue_s,
    step_issue_s,
)
from penstock.planner.contract.prices.price import NOTHING, Amount, Place, Price, Resource, computing, computing_of, total
from penstock.planner.contract.prices.price_table import KvPrice, computed, passed
from penstock.planner.contract.prices.stages import (
    MixedPass,
    decode_compute_s,
    earlier_kv,
    kv_fill,
    last_part_share,
    lookup_s,
    mixed_compute_s,
    more_operations,
    prefill_compute_s,
    prefill_issue_s,
    prefill_passes,
    prompt_fill,
    recorded_s,
)
from penstock.planner.contract.ranks.rank_chain import Passed, chained_s, turns
from penstock.planner.contract.ranks.rank_parts import parts_of

STORED = ResidentForms()
_NONE: Mapping[UnitKind, Amount] = MappingProxyType({})


@dataclass(frozen=True)
class Phase:
    """One prefill of a batch, or one of its decode steps."""

    passes: int
    """Over the weights."""
    rows: int
    """Tokens of one pass, all sequences together."""
    kv_read: float
    """Times that the KV of the sequences' end is read from where it lies."""
    kv_back: float
    """The share of it that is copied from the card."""
    kv_written: float
    """The share of it that is written to the drive."""
    rest: Price
    """Compute beyond reading the units once a pass: issuing, KV, FLOPs, routed experts."""
    lookups: Price
    """Rows of an embedding table that lies in DRAM beside a card."""
    launches: Price = NOTHING
    """Launching kernel after kernel, where no step is recorded: what it takes beyond a recorded one."""
    coded: Mapping[UnitKind, Price] = field(default_factory=dict)
    """Of a kind whose units stay decoded: multiplying in all passes by one that comes as it is stored, beyond by one that stays."""
    late: LateExperts = LateExperts()
    """What each pass waits for routed experts; a decode step has a law of its own, ``penstock.planner.contract.bills.routed``."""
    head: Price = NOTHING
    """Waiting in all passes for one block of the LM head that streams, when all layers are computed."""

    def bill(self, each_pass: Price, kv: KvPrice, far: Amount, streamed: Mapping[UnitKind, Amount] = _NONE, launched: Amount = 1) -> Price:
        """``each_pass``: all units and missed experts once. ``kv``: all that lies outside the device. ``far``: 1 where embedding rows are
        looked up over the link, else 0. ``streamed``: units of each kind that do not stay. ``launched``: 1 where kernels are launched one
        after the other, 0 where the step is recorded.
        Linear in all five, so it holds for numbers as for the program's variables."""
        moved = each_pass * self.passes + kv.read * self.kv_read + kv.back * self.kv_back + kv.written * self.kv_written
        coded = total(price * streamed.get(kind, 0) for kind, price in self.coded.items())
        head = self.head * streamed.get(UnitKind.head, 0)
        return moved + self.rest + self.lookups * far + self.launches * launched + coded + head

    def repeated(self, count: int) -> Phase:
        """So many of it."""
        coded = {kind: price * count for kind, price in self.coded.items()}
        rest, lookups, launches, head = (price * count for price in (self.rest, self.lookups, self.launches, self.head))
        moved = (self.kv_read * count, self.kv_back * count, self.kv_written * count)
        return Phase(self.passes * count, self.rows, *moved, rest, lookups, launches, coded, self.late, head)

    def in_units_of(self, seconds: float) -> Phase:
        """The same with so many seconds as the unit of time."""
        coded = {kind: price * (1 / seconds) for kind, price in self.coded.items()}
        rest, lookups, launches, head = (price * (1 / seconds) for price in (self.rest, self.lookups, self.launches, self.head))
        late = self.late.in_units_of(seconds)
        return replace(self, rest=rest, lookups=lookups, launches=launches, coded=coded, late=late, head=head)


def decode_phase(
    hardware: HardwareProfile, model: ModelSpec, workload: Workload, batch: int, head_blocks: int, forms: ResidentForms = STORED
) -> Phase:
    """A step at the mean context."""
    computed_by = model.decoded(forms.decoded)
    passed = Passed(batch, head_s=unit_s(hardware, model.lm_head, batch), served_s=serving_issue_s(hardware, model, batch))
    kinds = forms.decoded

    def own_s(machine: HardwareProfile, own: ModelSpec, kernels_s: float) -> float:
        return decode_compute_s(machine, own.decoded(kinds), workload, batch, kernels_s)

    launched_s = chained_s(hardware, model, passed, own_s)
    context = workload.prompt_tokens + workload.new_tokens / 2
    records = can_record(hardware, model)
    compute_s = launched_s
    if records:
        recorded = replace(passed, recorded=True)

        def layers_s(machine: HardwareProfile, own: ModelSpec, _: float) -> float:
            return recorded_s(machine, own.decoded(kinds), context, batch) - step_issue_s(machine, own)

        compute_s = chained_s(hardware, model, recorded, layers_s) + step_issue_s(hardware, model)  # all ranks' at the same time
    read = model.multiplied_bytes(batch) + batch * context * model.kv_bytes_per_token
    rest = _rest(hardware, model, head_blocks, 1, compute_s, read)
    lookups = _lookups(hardware, model, batch, 1)
    coded = _coded(hardware, model, forms, 1, batch, issues=not records)
    issued_s = _issued_s(hardware, model, issue_s(hardware, model if records else computed_by, batch))
    launches = Price({computing_of(hardware): max(0.0, launched_s - compute_s)}, issued=issued_s)
    head = _head(hardware, model, head_blocks)
    return Phase(1, batch, kv_fill(workload), 1 / workload.max_tokens, 0.0, rest, lookups, launches, coded, head=head)


def prefill_phase(
    hardware: HardwareProfile,
    model: ModelSpec,
    workload: Workload,
    batch: int,
    head_blocks: int,
    chunk_tokens: int,
    start: int = 0,
    forms: ResidentForms = STORED,
    part_tokens: int = 0,
    recorded_tokens: int = 0,
) -> Phase:
    """Of prompts from token ``start`` on, in passes of ``chunk_tokens`` per sequence. Those of several ranks in parts of ``part_tokens``.
    ``recorded_tokens``: of a pass or part that is recorded around attention. A server's are of one prompt, beside ``batch`` rows, and are
    launched."""
    if workload.is_served:
        return _served_phase(hardware, model, workload, batch, head_blocks, chunk_tokens, start, forms)
    passes, left = prefill_passes(workload, chunk_tokens, start), workload.prompt_tokens - start
    rows = batch * min(chunk_tokens, left)
    computed_by = model.decoded(forms.decoded)
    # a layer computes a part as a pass of its own would, with more operations, but for the weights, which come once a pass
    parts = parts_of(rows, part_tokens)
    each = -(-rows // parts)
    more = part_operations(parts, each, recorded_tokens) + recorded_operations(hardware, computed_by, each, recorded_tokens)
    at_once = -(-min(chunk_tokens, left) // parts)
    head_s = batch * 2 * model.lm_head.elements / hardware.dense_tflops / 1e12
    compute_s = chained_s(
        hardware,
        model,
        Passed(
            rows,
            passes,
            parts,
            head_s,
            last_part_share(hardware, model, workload, chunk_tokens, parts, start),
            served_s=serving_issue_s(hardware, model, rows),
        ),
        lambda machine, own, least_s: prefill_compute_s(
            machine, own.decoded(forms.decoded), workload, batch, at_once, start, least_s, more
        ),
    )
    compute_s += passes * begun_issue_s(hardware)
    rest = _rest(hardware, model, head_blocks, passes, compute_s, passes * model.multiplied_bytes(rows))
    rest += Price(issued=_issued_s(hardware, model, prefill_issue_s(hardware, computed_by, workload, batch, at_once, start, more)))
    late = _late(hardware, model, rows, passes, lambda machine: prefill_compute_s(machine, computed_by, workload, batch, at_once, start))
    lookups = _lookups(hardware, model, batch * left, passes)
    filled = prompt_fill(workload)
    coded = _coded(hardware, model, forms, passes * parts, each, in_turn=1 / parts)
    head = _head(hardware, model, head_blocks) * passes
    kv_read = earlier_kv(workload, passes, start)
    return Phase(passes, rows, kv_read, filled, filled, rest, lookups, coded=coded, late=late, head=head)


def mixed_phase(
    hardware: HardwareProfile, model: ModelSpec, mixed: MixedPass, pool_tokens: int, head_blocks: int, forms: ResidentForms = STORED
) -> Phase:
    """One pass over rows that decode and over parts of prompts. The KV of all has room for ``pool_tokens``. Several ranks compute it one
    after the other, as a whole."""
    computed_by, many = model.decoded(forms.decoded), mixed.all_tokens
    earlier = mixed.rows * mixed.context
    head_s = (mixed.rows + 1) * 2 * model.lm_head.elements / hardware.dense_tflops / 1e12
    passed = Passed(many, head_s=head_s, served_s=serving_issue_s(hardware, model, many))
    kinds = forms.decoded
    compute_s = chained_s(
        hardware, model, passed, lambda machine, own, least_s: mixed_compute_s(machine, own.decoded(kinds), mixed, least_s)
    )
    rest = _rest(hardware, model, head_blocks, 1, compute_s, model.multiplied_bytes(many) + earlier * model.kv_bytes_per_token)
    rest += Price(issued=_issued_s(hardware, model, issue_s(hardware, computed_by, many, more_operations(hardware, mixed))))
    late = _late(hardware, model, many, 1, lambda machine: mixed_compute_s(machine, computed_by, mixed))
    lookups, coded = _lookups(hardware, model, many, 1), _coded(hardware, model, forms, 1, many)
    read, written = (earlier + mixed.before) / pool_tokens, many / pool_tokens
    head = _head(hardware, model, head_blocks)
    return Phase(1, many, read, written, mixed.tokens / pool_tokens, rest, lookups, coded=coded, late=late, head=head)


def _served_phase(
    hardware: HardwareProfile,
    model: ModelSpec,
    workload: Workload,
    rows: int,
    head_blocks: int,
    chunk_tokens: int,
    start: int,
    forms: ResidentForms,
) -> Phase:
    """Passes of one prompt, each with as many prompt tokens as such passes carry on average. Unless throughput alone counts, with all that
    they may carry: a larger pass is then better only where it takes no longer, and nobody waits for it."""
    passes, most = prefill_passes(workload, chunk_tokens, start), chunk_tokens
    if workload.objective is Objective.throughput:
        most = round(workload.turn(rows, chunk_tokens).tokens)
    tokens = max(1, min(most, max(chunk_tokens, workload.prompt_tokens) - start))
    context, seen = workload.prompt_tokens + workload.new_tokens / 2, (workload.prompt_tokens + start) / 2
    mixed = MixedPass(rows, context, tokens, seen, float(start))
    return mixed_phase(hardware, model, mixed, rows * workload.max_tokens, head_blocks, forms).repeated(passes)


def units_bytes(model: ModelSpec, head_blocks: int) -> int:
    """Of all units that a pass visits, routed experts apart."""
    return sum(model.attn_bytes) + sum(model.ffn_bytes) + head_blocks * head_block_bytes(model, head_blocks)


def units_computed(hardware: HardwareProfile, model: ModelSpec, head_blocks: int) -> Price:
    """Multiplying by all of them once, wherever they lie."""
    return computed(hardware, units_bytes(model, head_blocks), Place.card if hardware.gpu else Place.host)


def _rest(hardware: HardwareProfile, model: ModelSpec, head_blocks: int, passes: int, compute_s: float, read_bytes: float) -> Price:
    """What is left of ``compute_s``, and of the ``read_bytes`` of weights and KV that a CPU reads meanwhile, beyond the units' own."""
    whole = Price({computing(Place.card if hardware.gpu else Place.host): compute_s})
    if hardware.gpu is None:
        whole += passed(hardware, read_bytes)
    return whole + units_computed(hardware, model, head_blocks) * -passes


def _issued_s(hardware: HardwareProfile, model: ModelSpec, seconds: float) -> float:
    """:attr:`Price.issued`. What experts wait for has a law of its own, ``penstock.planner.contract.bills.routed``."""
    return seconds if hardware.gpu and model.experts is None else 0.0


def _late(hardware: HardwareProfile, model: ModelSpec, rows: int, passes: int, own_s: Callable[[HardwareProfile], float]) -> LateExperts:
    """``own_s``: compute seconds of this rank's layers in all passes on a machine."""
    if model.experts is None:
        return LateExperts()
    return LateExperts.of(hardware, model, rows, passes, own_s(hardware) - own_s(replace(hardware, layer_launch_s=0.0)))


def _head(hardware: HardwareProfile, model: ModelSpec, head_blocks: int) -> Price:
    """What one of the LM head's blocks that streams adds to a pass: nothing is left to compute beside its copy. One of all blocks comes in
    time, while the last layers are computed."""
    gpu = hardware.gpu
    if gpu is None:
        return NOTHING
    return Price(behind=head_block_bytes(model, head_blocks) / gpu.h2d.peak / GB * (head_blocks - 1) / head_blocks)


def _coded(
    hardware: HardwareProfile, model: ModelSpec, forms: ResidentForms, passes: int, rows: int, issues: bool = True, in_turn: float = 1
) -> Mapping[UnitKind, Price]:
    """:attr:`Phase.coded`, a kind's units taken as equal. ``issues``: launching them is part of it. ``in_turn``: the share of the passes in
    which one rank computes at a time."""
    found = {}
    for kind in sorted(forms.decoded):
        units = model.of_kind(kind)
        beyond_s = sum(unit_s(hardware, unit, rows) - unit_s(hardware, unit.decoded, rows) for unit in units) / len(units)
        issued_s = _issued_s(hardware, model, passes * coded_issue_s(hardware, units[0])) if issues else 0.0
        found[kind] = Price({computing_of(hardware): passes * (1 + in_turn * (turns(model) - 1)) * beyond_s}, issued=issued_s)
    return found


def _lookups(hardware: HardwareProfile, model: ModelSpec, rows: int, passes: int) -> Price:
    """Meanwhile the ring brings a layer, and is full."""
    if hardware.gpu is None or not model.computes_embedding:
        return NOTHING
    seconds, layer_s = lookup_s(hardware, model, rows, passes), (model.attn_max + model.ffn_max) / hardware.gpu.h2d.peak / GB
    return Price({Resource.card: seconds}, rests=max(0.0, seconds - passes * layer_s))
