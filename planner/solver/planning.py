"""From the configuration to a plan: what was asked, answered."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import GB
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.checkpoint.left_out import FURTHER, left_out
from penstock.planner.contract.config.config_schema import CalibrationUse, SolveConfig
from penstock.planner.contract.config.resolve import model_from, workload_from
from penstock.planner.contract.config.resolve_hardware import hardware_from
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.decided.speculating import Drafter, Speculate, Speculation
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.lessons.draft_lesson import DraftLesson
from penstock.planner.contract.lessons.learned import seen_drafts, with_calibration
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.missed_experts import host_split
from penstock.planner.contract.ranks.dealing import Dealing
from penstock.planner.replay.routing_hits import RoutedModel, with_hits
from penstock.planner.solver.context_limit import within_limit
from penstock.planner.solver.drafts.draft_choice import Solve, drafter_asked
from penstock.planner.solver.drafts.speculation_choice import speculating
from penstock.planner.solver.notes.expert_notes import expert_notes
from penstock.planner.solver.notes.format_notes import format_notes
from penstock.planner.solver.notes.kept_notes import reuse_notes
from penstock.planner.solver.ranks_choice import answer_dealt, may_spare, on_ranks
from penstock.planner.solver.share_choice import share_of
from penstock.planner.solver.simple_choice import Choice, choose, doubt
from penstock.planner.solver.terms.problem import Question


def make_plan(cfg: SolveConfig) -> Plan:
    """Solve for ``cfg``. Raises UserError for a value that cannot be, ``Infeasible`` when there is no plan."""
    asked = read_question(cfg)
    drafter = drafter_asked(cfg.speculate, cfg.draft, asked.question.model, cfg.model.config)
    told = (*cfg.notes, *left_out(asked.question.model.checkpoint), *asked.notes)
    if asked.question.ranks > 1:
        formats = format_notes(asked.question.model, cfg.model, asked.question.hardware)
        beside = None if drafter is not None and drafter.drafter is Drafter.mtp else drafter
        made = plan_dealt(asked.question, cfg.speculate, beside, asked.drafts, (*formats, *told))
        first = made.of_rank(0)
        more = (*reuse_notes(first, asked.question.force), *expert_notes(first, asked.hits.source))
        return replace(made, notes=(*made.notes, *more))

    def solved(vram_bytes: int, dram_bytes: int) -> Plan:
        plan = answer(asked.question.on(asked.question.hardware.less(vram_bytes, dram_bytes)), told)
        decided = plan.decisions
        model = asked.hits.in_slots(decided.experts, host_split(plan.hardware, plan.model, decided.experts, decided.batch))
        return replace(plan, model=model, prediction=predict(plan.hardware, model, plan.workload, plan.decisions))

    plan = solved(0, 0)
    plan = speculating(plan, cfg.speculate, asked.question.force.speculate_tokens, drafter, solved, asked.drafts)
    model = plan.model
    return replace(
        plan,
        notes=(
            *format_notes(model, cfg.model, plan.hardware),
            *(note for note in plan.notes if plan.decisions.speculation.drafter is not Drafter.mtp or not note.endswith(FURTHER)),
            *reuse_notes(plan, asked.question.force),
            *expert_notes(plan, asked.hits.source),
        ),
    )


def plan_dealt(
    question: Question,
    asked: Speculate,
    drafter: Speculation | None = None,
    seen: tuple[DraftLesson, ...] = (),
    notes: tuple[str, ...] = (),
) -> Plan:
    """The plan of several ranks, with drafts as ``asked``: see ``speculating``. Where ``drafter`` lies with the first of them, layers are
    dealt as gives the most tokens a second."""

    def solve(layers: tuple[int, ...], host_ffn: int, vram_bytes: int, dram_bytes: int) -> Plan:
        force = question.force
        if any((vram_bytes, dram_bytes)) and force.host_ffn is None:
            force = force.but(host_ffn=host_ffn)  # the CPU's turns are priced for ranks that have as many of them
        return answer_dealt(replace(question, layers=layers, force=force, taken=(vram_bytes, dram_bytes)), notes)

    def redealt(dealing: Dealing, host_ffn: int) -> Solve:
        return partial(solve, () if dealing.is_even else dealing.counts, host_ffn)

    usual = partial(solve, question.layers, 0)
    spares = redealt if may_spare(question) else None
    return speculating(usual(0, 0), asked, question.force.speculate_tokens, drafter, usual, seen, spares)


def answer(question: Question, notes: tuple[str, ...] = ()) -> Plan:
    """The plan to run, with a note where it is the simple one. Raises UserError; ``Infeasible`` when there is none."""
    return plan_of(question, choose(question), notes)


def plan_of(question: Question, choice: Choice, notes: tuple[str, ...] = ()) -> Plan:
    """``choice`` as the plan that answers ``question``; of several ranks the first one's."""
    q = question.of_rank(0)
    why = (doubt(choice.left),) if choice.left else (choice.acted.told,) if choice.acted else ()
    predicted = predict(q.hardware, q.model, q.workload, choice.decisions)
    return Plan(q.hardware, q.model, q.workload, choice.decisions, predicted, (*notes, *why))


@dataclass(frozen=True)
class Asked:
    """A question as the configuration has it. ``notes`` say by which runs its machine is corrected, ``hits``: whose its model's are.
    ``drafts`` are what runs taught of them."""

    question: Question
    hits: RoutedModel
    notes: tuple[str, ...] = ()
    drafts: tuple[DraftLesson, ...] = ()


def read_question(cfg: SolveConfig) -> Asked:
    """What ``cfg`` asks, of the machine as runs found it. Raises UserError for a value that cannot be."""
    hardware, workload, model = hardware_from(cfg.hardware), workload_from(cfg.workload), model_from(cfg.model)
    workload, short = within_limit(workload, model)
    if workload.kv_spill and not hardware.ssd_write_gbps:
        raise UserError("hardware.ssd.write_gbps=0: KV pages that spill are written to the SSD; set its rate, or workload.kv_spill=false")
    if workload.kept_tokens and hardware.gpu is None and not hardware.dram_copy_gbps:
        raise UserError("hardware.dram.copy_gbps=0: KV that is restored is copied in DRAM; set its rate, or workload.kept_tokens=0")
    notes: tuple[str, ...] = ()
    if not model.kv_moves and (workload.kv_spill or workload.kept_tokens):
        workload = replace(workload, kv_spill=False, kept_tokens=0)
        notes = (f"KV stays on the compute device and is not kept for later prompts: {model.kv_stays_because}",)
    hardware = _reading(hardware, model)
    force = Force.from_config(cfg.force, cfg.moe)
    hits = with_hits(model, cfg.moe)
    calibrated: tuple[str, ...] = ()
    drafts: tuple[DraftLesson, ...] = ()
    if cfg.calibration is CalibrationUse.own:
        drafts = seen_drafts(hardware, hits.model)
        hardware, calibrated = with_calibration(hardware, hits.model)
    question = Question(hardware, hits.model, workload, force)
    question, why_one = on_ranks(cfg, question)
    share, why_so = share_of(cfg.moe.share, question)
    return Asked(replace(question, share=share), hits, (*notes, *calibrated, *short, *why_one, *why_so), drafts)


def _reading(hardware: HardwareProfile, model: ModelSpec) -> HardwareProfile:
    """``hardware`` at its drive's long rate, where what no memory can hold of ``model`` takes longer to read than the drive's burst. Each
    pass reads that, and the passes follow each other."""
    outside = model.weight_bytes - hardware.dram_bytes - hardware.vram_bytes
    if outside / GB / hardware.ssd_peak_gbps <= hardware.ssd_burst_s:
        return hardware
    if hardware.ssd_long_gbps:
        said = f"{hardware.origin.get('ssd.read', '')}; held to the drive's long rate, {hardware.ssd_long_gbps:.3g} GB/s".lstrip("; ")
        return replace(hardware.read_long(), origin=hardware.origin | {"ssd.read": said})
    return hardware
