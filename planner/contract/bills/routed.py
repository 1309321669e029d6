"""What a router's late word costs a decode step: experts cannot be fetched before they are known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.planner.common.measures import GB
from penstock.planner.contract.bills.prefill import Moved
from penstock.planner.contract.decided.recording import come_together, launching
from penstock.planner.contract.experts.expert_misses import Misses, visit
from penstock.planner.contract.experts.expert_slots import fewest_slots
from penstock.planner.contract.experts.reading_visits import ReadingVisits, reading_visits
from penstock.planner.contract.experts.shared_visits import SharedVisits
from penstock.planner.contract.experts.visit_waits import Line, bent_lines, wait_lines
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.planner.contract.prices.decoding import unit_s
from penstock.planner.contract.prices.late_experts import ahead_of
from penstock.planner.contract.prices.launches import copied_issue_s, expert_launches
from penstock.planner.contract.prices.missed_experts import Missed, missed_beside_layers
from penstock.planner.contract.prices.price import Amount, Resource
from penstock.planner.contract.prices.stages import expert_step_s, launched_meanwhile_s, weight_pass_s
from penstock.planner.contract.ranks.rank_chain import fetching_turns

PAUSE_AT = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Reads a step at which the line that touches :func:`behind_last` stands for it."""


@dataclass(frozen=True)
class Routed:
    """The part of a decode step that cannot overlap, because only a layer's router says which experts the layer needs.

    A visit of u experts that finds k of them in DRAM alone waits for their copies, each f seconds, while the host launches what comes up
    to the next router, in seconds:

        step = compute + sum over layers of E[max(0, k * f - launches)]

    with k of Binomial(u, m / u), where m are missing on average (``penstock.planner.contract.experts.visit_waits``): by lines that touch
    it. Where few slots let them through, it waits as a prompt does whose slots are full (``LateExperts``), if that is longer. Where kernels
    are recorded, each copy takes ``called_s`` more. What is read from the SSD takes instead, for each of r reads,

        r * (fetch - launches / u)

    * **Rows.** A card computes one token's experts together behind the last of them. Of several rows each is computed as it comes, so
      (u - 1) * expert_compute goes on besides, as it does without a card. A visit waits for its reads, less all that it computes
      meanwhile, which is at least each of

          reads * max(0, fetch - (u - 1) * expert_compute)
          reads * fetch - (u - 1) * expert_compute

      The lines touch the mean where nothing and where all is read. Launches of experts are part of ``expert_compute`` here.
    * **The CPU.** Of k missed experts it may compute j beside the link's copies (``SharedVisits``). k * f is then the later end of both.
      The card computes and launches u - j, and ``compute`` is without as many as the CPU has on average.
    * **Many rows.** Visits that use nearly all experts know the next layer's: as many come ahead as in a prompt.
    * **One token.** Its visits read or do not (``penstock.planner.contract.experts.reading_visits``). One that reads hides its copies, one
      that does not waits for these alone. While a visit reads, the link brings what the ring has room for, and no more:

          step >= compute + reads + late * visits that read + copies of the others + streamed copies that nothing hides + LM head
          step >= reads + late * visits that read + copies of the others + streamed copies - room * visits that read + LM head

      Which visits read follows from what a step is expected to miss. That is not convex in slots, so it is a number here: what the plan
      misses, or what the program missed when it was solved before. The two bullets behind this one are of other steps.
    * **Both tiers.** Experts of one layer arrive from DRAM and SSD at once, so the slower link counts. A share 1 / sqrt(u) of both adds up.
    * **Late.** A layer that reads asks a drive that is idle, and the host is on the way to it and back: ``late_read_s``, once for all that
      it reads. Of the reads the share 1 / sqrt(u) pays that.
    * **Streamed weights** hide behind compute in the share C / (C + E) of a step. C is compute, E the copies of a plan that streams
      experts alone: the law stays linear in the decisions. Where the CPU computes experts, too, they hide as well while a visit waits for
      it and the link has copied all, however many experts a visit uses. The LM head hides behind nothing: it comes behind the last router,
      and the ring is full until then.
    * **Foresight.** The share ``foreseen ** max(1, L / m)`` of the misses overlaps with everything. L layers copy m experts, so L / m
      layers pass while one is copied. A name's chance falls with each of them.
    * **Pause.** Nothing names experts before a token's first router. r reads fall on random layers, so (1 - exp(-r)) / r of a step lies
      behind the last. For that share of compute, or of the copies if they take longer, the SSD is idle.

    * **Ranks.** Each of ``turns`` ranks misses experts of its own layers, one rank after the other. So their waits add up, and each has the
      drive, and its link at the rate that it carries alone. What streams to a rank hides behind the others' layers as well.
      Slices of an expert are missed by all ranks at once: they wait together, and share drive and links.

    Reads of a pass that touches all experts are known beforehand: they overlap with everything.
    """

    alone: float = 0.0
    """Share of the compute that nothing is fetched beside."""
    computed_s: float = 0.0
    """Compute that goes on while one missed expert arrives."""
    beside_reads_s: float | None = None
    """Compute of a layer that goes on while experts are read, where each is computed as it comes; None for one token's, which are computed
    together behind the last."""
    issued_s: float = 0.0
    """Issuing that goes on besides while one is copied."""
    called_s: float = 0.0
    """Of the host's before each copy, what nothing else hides."""
    called_each_s: float = 0.0
    """The host's before each copy."""
    waits: float = 1.0
    """Share of the copied experts that no router names early."""
    layers: int = 0
    """Of this rank's, those that route."""
    beside_s: float = 0.0
    """Of a visit, what goes on while its experts are copied."""
    beside_each_s: float = 0.0
    """Of that, what is one expert's."""
    slots: int = 0
    """Through which missed experts pass."""
    expert_s: float = 0.0
    """Computing with one, and launching that."""
    others_s: float = 0.0
    """Launching the rest of its layer, beyond what computing takes."""
    all_asked: float = 0.0
    """Share of the visits that use nearly all experts of a layer."""
    ahead: float = 0.0
    """Experts that have come before such a visit, and that it uses."""
    apart: float = 0.0
    """Share of the time in which reads and copies do not overlap."""
    exposed: float = 0.0
    """Share of the weights that stream which hides behind nothing."""
    copying: float = 0.0
    """The same where it is not known which experts come."""
    named: float = 0.0
    """Share of the missed experts that routers name early enough."""
    copies_s: float = 0.0
    """Of a step, as of a plan that streams nothing but experts."""
    turns: float = 1
    """How many times as long as this rank's layers the whole model's take, one after the other."""
    drive_alone: int = 1
    """Ranks of a host, each of which reads alone while it is its turn: their rates are a share of the drive's."""
    link_alone: float = 1.0
    """Seconds of a copy while no other rank's link carries, of those while all do."""
    even: float = 0.0
    """See :attr:`penstock.planner.contract.experts.expert_misses.Visit.even`."""
    asked: int = 0
    """Experts of a visit of one token that no router names early, beside a card; 0 for any other."""
    launching_s: float = 0.0
    """Of a visit, what is launched besides while its experts are copied, where the step is launched and could be recorded."""

    @classmethod
    def of(cls, hardware: HardwareProfile, model: ModelSpec, batch: int) -> Routed:
        """For a decode step of ``batch`` sequences."""
        if model.experts is None:
            return cls()
        one = visit(model.experts, batch)
        u, foreseen, missed = one.touched, model.experts.foreseen, 0.0
        carried = hardware.links.held_to if model.slices == 1 else 1.0
        if hardware.gpu:
            missed = missed_beside_layers(hardware.gpu, hardware.vram_bytes, model, model.experts, one)
            foreseen **= max(1.0, len(model.experts.layers) / max(missed, 1.0))
        alone, named = (1 - one.spread) * (1 - foreseen), (1 - one.spread) * foreseen
        expert_s = unit_s(hardware, model.of_kind(UnitKind.expert)[0], max(1.0, batch * model.experts.top_k / u))
        beside_each_s = 0.0 if come_together(hardware.gpu is not None, batch) else expert_s
        computed_s = alone * (u - 1) / u * beside_each_s
        issued_s = called_s = called_each_s = exposed = copying = copies_s = beside_s = launched_s = others_s = 0.0
        if hardware.gpu:
            meanwhile_s = launched_meanwhile_s(hardware, model, batch)
            issued_s, beside_s = alone * meanwhile_s / u, (u - 1) * beside_each_s + meanwhile_s
            each_s = expert_launches(hardware, model, batch) * meanwhile_s
            beside_each_s += each_s
            launched_s, others_s = expert_step_s(hardware, model, batch), meanwhile_s - u * each_s
            called_each_s = copied_issue_s(hardware, model, batch)
            called_s = alone * called_each_s
            copies_s = missed * model.experts.expert_bytes / hardware.gpu.h2d.peak / GB * carried
            copying = copies_s / (weight_pass_s(hardware, model, batch) + copies_s)
            exposed = alone * copying
        ranks, apart = fetching_turns(model), alone / math.sqrt(u)
        beside_reads_s = alone * (u - 1) * launched_s if hardware.gpu and batch > 1 else None
        each_host = 1 if model.dealt is None or model.slices > 1 else model.dealt.count // hardware.hosts
        return cls(
            alone,
            computed_s,
            beside_reads_s,
            issued_s,
            called_s,
            called_each_s,
            1 - foreseen if hardware.gpu else alone,
            len(model.experts.layers),
            beside_s,
            beside_each_s,
            fewest_slots(model.experts),
            launched_s,
            others_s,
            one.all_asked,
            ahead_of(hardware, model) * u / model.experts.count,
            apart,
            exposed,
            copying,
            named,
            ranks * copies_s,
            ranks,
            each_host,
            carried,
            one.even,
            model.experts.top_k if come_together(hardware.gpu is not None, batch) and not foreseen else 0,
            max(0.0, launched_meanwhile_s(launching(hardware, model), model, batch) - launched_meanwhile_s(hardware, model, batch)),
        )

    def beside(self, streamed: Streamed, missed: Missed) -> Amount:
        """What a step waits for copies of ``streamed``, whose visits wait for ``missed``."""
        exposed, alone = (self.exposed, self.alone) if missed.odds is None else (self.copying * missed.link_last, 1.0)
        return exposed * streamed.all + (alone - exposed) * streamed.head

    def read_s(self, fetch_s: float) -> float:
        """Seconds that an expert, ``fetch_s`` in transit from the SSD, adds to a step."""
        return max(0.0, fetch_s / self.drive_alone - self.computed_s)

    def reading(self, reads: Sequence[tuple[Amount, float, float]], unit_s: float) -> Sequence[Amount]:
        """What a step waits for ``reads`` at least: each of these, in units of ``unit_s``."""
        late = sum(count * (self.apart * late_s / unit_s) for count, _, late_s in reads)
        if self.beside_reads_s is None:
            return [late + sum(count * (self.read_s(fetch_s) / unit_s) for count, fetch_s, _ in reads)]
        few = sum(count * (max(0.0, fetch_s / self.drive_alone - self.beside_reads_s) / unit_s) for count, fetch_s, _ in reads)
        many = sum(count * (fetch_s / self.drive_alone / unit_s) for count, fetch_s, _ in reads)
        return [late + few, late + many - self.turns * self.layers * self.beside_reads_s / unit_s]

    def copy_s(self, fetch_s: float) -> float:
        """The same of its way from DRAM to the device, behind the SSD."""
        return max(0.0, fetch_s * self.link_alone + self.called_s - self.computed_s - self.issued_s)

    def waited(self, missed: Missed, copy_s: float) -> Sequence[Line]:
        """What a visit waits for ``missed`` experts, each of which is copied in ``copy_s``."""
        left = self._left(missed, copy_s)
        return wait_lines(left) if missed.odds is None else bent_lines(left, missed.odds, self.even)

    def visits(self, missed: Missed, copy_s: float, last_s: float, expected: Misses, fetch_s: float, late_s: float) -> ReadingVisits:
        """Of recorded steps that miss as many as ``expected``. ``last_s``: the copy of what the SSD brings last of an expert."""
        uses = self.asked * self.layers
        once_s = late_s + max(0.0, last_s * self.link_alone - self.beside_s)
        odds = expected.from_dram / uses, expected.dram / uses
        return reading_visits(self._left(missed, copy_s), *odds, fetch_s / self.drive_alone, once_s)

    @property
    def launched(self) -> Routed:
        """Where the step is launched kernel after kernel."""
        return replace(self, beside_s=self.beside_s + self.launching_s, launching_s=0.0)

    def _left(self, missed: Missed, copy_s: float) -> tuple[float, ...]:
        few, many = missed.visits, missed.all_asked
        left = []
        for n in range(len(few.taken)):
            left_s = (1 - self.all_asked) * self._left_s(few, n, copy_s, 0.0)
            left.append(left_s + self.all_asked * self._left_s(many, n, copy_s, self.ahead))
        return tuple(left)

    def _left_s(self, visits: SharedVisits, missed: int, copy_s: float, ahead: float) -> float:
        """Of a visit's wait for ``missed`` experts what nothing goes on beside. ``ahead`` have come unasked for."""
        taken = visits.taken[missed]
        copies, copy_s = missed - taken, copy_s * self.link_alone
        wait_s = max(visits.host_ends[missed], visits.link_ends[missed] * self.link_alone + copies * self.called_each_s)
        beside_s = self.beside_s - taken * self.beside_each_s
        full_s = (copies - ahead - self.slots) * copy_s - (copies - ahead - 2) * self.expert_s - self.others_s
        return max(0.0, wait_s - beside_s, full_s if self.expert_s < copy_s else 0.0)


def behind_last(read: float) -> tuple[float, float]:
    """(value without a read, change with each read) of the tangent to (1 - exp(-m)) / m at ``read``. That curve is the mean share of a step
    behind the last of m reads, if their number is Poisson's; without a read it is the whole step. The tangent is never above the curve."""
    if not read:
        return 1.0, -0.5
    part, gone = -math.expm1(-read) / read, math.exp(-read)
    each = (gone - part) / read
    return part - each * read, each


@dataclass(frozen=True)
class Fetched:
    """Experts that a decode step misses, and the seconds that each is in transit. Numbers for a plan, expressions in the program."""

    read: Sequence[tuple[Amount, float, float]]
    """From the SSD: (how many, seconds of one, seconds by which a layer that reads any takes longer), for each way in which a step may
    read."""
    copied: Amount
    """To the card, those from the SSD among them."""
    copy_s: float
    any_read: Amount
    """1 where any is read, else 0."""
    missed: Missed
    """Those that DRAM holds, whoever computes with them."""
    expected: Misses = Misses()
    """As many as the step is expected to miss: by these numbers visits read or do not."""
    last_s: float = 0.0
    """Of ``copy_s``, the last piece of an expert."""
    launched: Amount = 1
    """1 where kernels are launched one after the other, 0 where the step is recorded."""

    @property
    def from_dram(self) -> Amount:
        return self.copied - sum(count for count, *_ in self.read)


@dataclass(frozen=True)
class Streamed:
    """Copying what streams beside experts."""

    all: Amount
    head: Amount = 0
    """Of that, the LM head."""
    ahead: float = 0.0
    """What the ring has room for beyond the unit that computes."""


def held_up(routed: Routed, compute: Amount, step_s: float, streamed: Streamed, fetched: Fetched, unit_s: float = 1.0) -> Iterator[Amount]:
    """What a step that its routers hold up lasts at least, in units of ``unit_s``: each of these.

    ``compute``: of the whole step, ``step_s`` of it without looking embeddings up. An expert is copied piece by piece while it is read.
    """
    copy = routed.copy_s(fetched.copy_s) / unit_s
    reads = [(count * routed.turns, (routed.read_s(fetch_s) + routed.apart * late_s) / unit_s) for count, fetch_s, late_s in fetched.read]
    from_dram = fetched.from_dram * routed.turns
    known = (1 - routed.waits) * from_dram * (fetched.copy_s * routed.link_alone / unit_s)
    read, beside = sum(count for count, _ in reads), routed.beside(streamed, fetched.missed)
    readings = routed.reading([(count * routed.turns, fetch_s, late_s) for count, fetch_s, late_s in fetched.read], unit_s)
    most = routed.named * max(step_s * routed.turns, routed.copies_s) / unit_s
    pauses = [most * (none * fetched.any_read + each * read) for none, each in map(behind_last, PAUSE_AT)] if routed.named else []
    follow = sum(count * max(each, copy) for count, each in reads)
    if routed.asked:
        yield from _of_one_token(routed, compute, streamed, fetched, unit_s)
        return
    for line in routed.waited(fetched.missed, fetched.copy_s):
        none, each = (routed.waits * seconds / unit_s for seconds in line)
        missed = routed.turns * routed.layers * none + from_dram * each + known + beside
        yield routed.waits * compute + (1 - routed.apart) * read * copy + routed.apart * follow + missed
        for together in (*readings, *(reading + pause for reading in readings for pause in pauses)):
            yield routed.alone * compute + (1 - routed.apart) * together + routed.apart * (follow + missed)


def _of_one_token(routed: Routed, compute: Amount, streamed: Streamed, fetched: Fetched, unit_s: float) -> Iterator[Amount]:
    """The same of one token's step, by visits that read and visits that do not."""
    missed, copy_s, turns = fetched.missed, fetched.copy_s, routed.turns
    reads: Amount = 0
    reading: Amount = 0
    visits, hidden_s = ReadingVisits(), 0.0
    for count, fetch_s, late_s in fetched.read:
        asked = missed, copy_s, fetched.last_s, fetched.expected, fetch_s, late_s
        visits = routed.visits(*asked)
        hidden_s = max(hidden_s, turns * routed.layers * (visits.beyond_s - routed.launched.visits(*asked).beyond_s))
        reads += count * (turns * (fetch_s / routed.drive_alone + visits.each_s) / unit_s)
        reading += count * (turns * visits.reading)
    hidden = fetched.launched * (hidden_s / unit_s)
    units, from_dram = streamed.all - streamed.head, fetched.from_dram * turns
    shown = routed.exposed if missed.odds is None else routed.copying * missed.link_last
    copies = from_dram * (visits.resting * copy_s * routed.link_alone * missed.copied / unit_s)
    yield reads + units - reading * streamed.ahead + copies + streamed.head
    for none, each in routed.waited(missed, copy_s):
        waited = turns * routed.layers * (none / unit_s) + from_dram * (each / unit_s)
        yield compute - hidden + reads + visits.copying * waited + visits.resting * shown * units + streamed.head


def routed_s(
    hardware: HardwareProfile,
    model: ModelSpec,
    batch: int,
    compute_s: float,
    step_s: float,
    streamed: Streamed,
    missed: Misses,
    moved: Moved,
) -> float:
    """Seconds of a decode step that its routers hold up; 0 for a dense model."""
    if model.experts is None:
        return 0.0
    read = [(missed.dram, moved.expert_read.of(Resource.ssd), moved.read_late_s)]
    copy_s = moved.expert_copied.of(Resource.h2d)
    fetched = Fetched(read, missed.vram, copy_s, missed.dram > 0, moved.missed, missed, moved.last_piece * copy_s, not moved.recorded)
    return max(held_up(Routed.of(hardware, model, batch), compute_s, step_s, streamed, fetched))
