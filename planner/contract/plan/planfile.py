"""The plan as a file that a person can read and edit: written at once or not at all, read strictly, predicted anew."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from penstock.planner.common.errors import UserError, nearest
from penstock.planner.common.output import write_at_once
from penstock.planner.common.outside.plain_files import read_plain
from penstock.planner.common.outside.strict_yaml import YamlFlaw, load_strictly
from penstock.planner.common.strictly import build, convert
from penstock.planner.contract.bills.cost import Prediction
from penstock.planner.contract.bills.reuse import BreakEven
from penstock.planner.contract.config.config_schema import HardwareConfig, WorkloadConfig
from penstock.planner.contract.config.resolve import workload_from, workload_mapping
from penstock.planner.contract.config.resolve_hardware import hardware_from, hardware_mapping
from penstock.planner.contract.decided.decisions import Decisions, ExpertSlots, KvPages, KvReuse, WeightDecisions
from penstock.planner.contract.decided.speculating import Speculation
from penstock.planner.contract.plan.model_section import model_from, model_mapping
from penstock.planner.contract.plan.plan import FORMAT, Plan
from penstock.planner.contract.plan.plan_ranks import check_ranks
from penstock.planner.contract.plan.rank_predictions import predict_ranks, rank_terms
from penstock.planner.contract.plan.ranks_section import ranks_from, ranks_mapping
from penstock.planner.contract.rules.broken import broken_rules
from penstock.planner.contract.rules.rule import BrokenRule

_HEAD = """\
# A plan for `runtime run`, made by `planner solve`. Edit what it decides and it is checked again, and predicted again,
# when it is read. Sizes are bytes, rates GB/s with GB = 1e9.
"""
_COMMENTS = {
    "weights": "Where weights live and how they move: resident_units stay in VRAM, resident_layers in DRAM, the rest is streamed.",
    "kv": "KV cache pages of page_tokens tokens of one layer, per tier; a layer's pages lie in one tier.",
    "kept": "Under reuse: pages of page_tokens tokens of all layers, kept for prompts to come, and the bytes of such pages' files.",
    "experts": "Slots for routed experts, over all layers, per tier; what they keep, and how experts move.",
    "speculation": "Tokens that are drafted behind each sequence's last one, for one pass to verify; the model that drafts, if one does.",
    "ranks": "The model's layers are dealt over so many ranks: layer i to rank i mod count, or as many to each as layers: says. "
    "What is above is of rank 0; others: of those that decide otherwise.",
    "predicted": "What it promises; computed again when the plan is read. Stages overlap: a phase lasts as long as its slowest, and a "
    "decode step longer where experts are known late; nine_in_ten: [least, most] in nine of ten runs.",
    "break_even_tokens": "The shortest head of a prompt that is restored from a tier sooner than it is computed; null: none is.",
    "hardware": "What was assumed of the machine.",
    "model": "The model: a row for units that are alike. Stored bytes are what links carry and tiers hold; FLOPs follow from elements.",
    "workload": "The work that it was made for.",
}
_INTERVALS = "nine_in_ten"
"""In the section ``predicted``: between what the seconds lie in nine of ten runs."""
MOST_BYTES = 8 << 20
"""Of a plan's file."""
_UNWRAPPED = 2**31 - 1
_KEYS_A_LINE, _LINE = 6, 100
"""A mapping is written on one line up to this many keys and columns."""
_REQUIRED = ("weights", "kv", "batch", "prefill_chunk_tokens", "hardware", "model", "workload")
_OPTIONAL = ("notes", "experts", "speculation", "prefill_part_tokens", "recorded_prompt_tokens", "ranks", "predicted", "break_even_tokens")


def write_plan(plan: Plan, path: Path) -> None:
    """Write ``plan`` to ``path``; an older file there is replaced only by a complete one. Raises UserError."""
    text = plan_text(plan)

    def write(temporary: Path) -> None:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    write_at_once(path, "out", write)


def plan_text(plan: Plan) -> str:
    """What :func:`write_plan` writes."""
    return _HEAD + "".join(_section(name, value) for name, value in as_mapping(plan).items())


def plan_of_text(text: str) -> Plan:
    """The plan that :func:`plan_text` wrote down, predicted anew."""
    return _plan_from(load_strictly(text.encode()))


def read_plan(path: Path, key: str = "plan") -> Plan:
    """The plan in the file ``path``, which a user set as ``key``. Keys and types are checked, rules are not: see ``check_plan``.

    The prediction is computed anew, so that an edited plan's is true; only where a rule is broken it stays as written.
    Raises UserError naming the file and ``section.key``.
    """
    data = _load(path, key)
    try:
        return _plan_from(data)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def check_plan(plan: Plan) -> None:
    """Raise UserError with the first rule that ``plan`` breaks."""
    check_ranks(plan.hardware, plan.model, plan.workload, plan.ranks.count, plan.ranks.share)
    for rule in broken_in(plan):
        raise UserError(f"the plan breaks a rule ({rule.name}): {rule.message}")


def broken_in(plan: Plan) -> list[BrokenRule]:
    """Every rule that ``plan`` breaks; of several ranks each with its rank."""
    if plan.ranks.count == 1:
        return broken_rules(plan.hardware, plan.model, plan.workload, plan.decisions)
    terms = rank_terms(plan.hardware, plan.model, plan.workload, plan.ranks.decided(plan.decisions), plan.dealing)
    return [replace(rule, message=f"rank {rank}: {rule.message}") for rank, one in enumerate(terms) for rule in broken_rules(*one)]


def _plan_from(data: Mapping[str, Any]) -> Plan:
    known = ("penstock", *_REQUIRED, *_OPTIONAL)
    for key in data:
        if key not in known:
            raise UserError(f"{key}: no such section; a plan has {', '.join(known)}{nearest(str(key), known)}")
    for key in _REQUIRED:
        if key not in data:
            raise UserError(f"{key}: missing; write the plan again with `planner solve`")
    hardware = hardware_from(build(HardwareConfig, data["hardware"], "hardware"))
    model = model_from(data["model"])
    workload = workload_from(build(WorkloadConfig, data["workload"], "workload"))
    decisions = Decisions(
        weights=build(WeightDecisions, data["weights"], "weights"),
        kv=build(KvPages, data["kv"], "kv"),
        experts=convert(ExpertSlots | None, data.get("experts"), "experts"),
        batch=convert(int, data["batch"], "batch"),
        prefill_chunk_tokens=convert(int, data["prefill_chunk_tokens"], "prefill_chunk_tokens"),
        speculation=_speculation_from(data.get("speculation", {})),
        prefill_part_tokens=convert(int, data.get("prefill_part_tokens", 0), "prefill_part_tokens"),
        recorded_prompt_tokens=convert(int, data.get("recorded_prompt_tokens", 0), "recorded_prompt_tokens"),
    )
    ranks = ranks_from(data.get("ranks"), decisions, model.layers)
    check_ranks(hardware, model, workload, ranks.count, ranks.share)
    decided, dealing = ranks.decided(decisions), ranks.dealing(model.layers)
    if any(broken_rules(*terms) for terms in rank_terms(hardware, model, workload, decided, dealing)):
        predicted = build(Prediction, _without_intervals(data.get("predicted")), "predicted")
    else:
        predicted = predict_ranks(hardware, model, workload, decided, dealing)
    if "break_even_tokens" in data:
        build(BreakEven, data["break_even_tokens"], "break_even_tokens")
    notes = convert(tuple[str, ...], data.get("notes") or [], "notes")
    return Plan(hardware, model, workload, decisions, predicted, notes, ranks)


def _speculation_from(data: Any) -> Speculation:
    if not isinstance(data, Mapping) or data.get("model") is None:
        return build(Speculation, data, "speculation")
    decided = build(Speculation, {**data, "model": None}, "speculation")
    try:
        return dataclasses.replace(decided, model=model_from(data["model"]))
    except UserError as error:
        raise UserError(f"speculation.{error}") from error


def _speculation_mapping(decided: Speculation) -> dict[str, Any]:
    values = _plain(dataclasses.replace(decided, model=None))
    return values | {"model": None if decided.model is None else model_mapping(decided.model)}


def _without_intervals(predicted: Any) -> Any:
    """``predicted`` without what follows from the rest of the plan."""
    return {key: value for key, value in predicted.items() if key != _INTERVALS} if isinstance(predicted, Mapping) else predicted


def _load(path: Path, key: str) -> Mapping[str, Any]:
    try:
        data = load_strictly(read_plain(path, MOST_BYTES))
    except FileNotFoundError as error:
        raise UserError(f"{key}={path}: no such file; write one with `planner solve out={path}`") from error
    except OSError as error:
        raise UserError(f"{key}={path}: cannot be read ({error.strerror}); choose another {key}=") from error
    except YamlFlaw as error:
        raise UserError(f"{key}={path}: {error}; correct it there or write it again") from error
    if not isinstance(data, Mapping) or "penstock" not in data:
        raise UserError(f"{key}={path}: not a plan, the key `penstock` is missing; write one with `planner solve`")
    if data["penstock"] != FORMAT:
        found = str(data["penstock"])[:20]
        raise UserError(f"{key}={path}: a plan of format {found}, this program reads format {FORMAT}; solve again with `planner solve`")
    return data


def as_mapping(plan: Plan) -> dict[str, Any]:
    """What the file of ``plan`` holds, section by section. Where a rule is broken nothing is predicted of it but what was written."""
    decisions, sound = plan.decisions, not broken_in(plan)
    return {
        "penstock": FORMAT,
        "notes": list(plan.notes),
        "weights": _plain(decisions.weights),
        "kv": _kv_mapping(decisions.kv),
        "experts": _plain(decisions.experts),
        "batch": decisions.batch,
        "prefill_chunk_tokens": decisions.prefill_chunk_tokens,
        "speculation": None if decisions.speculation == Speculation() else _speculation_mapping(decisions.speculation),
        "prefill_part_tokens": decisions.prefill_part_tokens or None,
        "recorded_prompt_tokens": decisions.recorded_prompt_tokens or None,
        "ranks": _plain(ranks_mapping(plan.ranks, decisions)),
        "predicted": _rounded(_plain(plan.prediction) | ({_INTERVALS: _plain(plan.intervals)} if sound else {})),
        "break_even_tokens": _plain(plan.break_even) if plan.workload.kept_tokens and sound else None,
        "hardware": hardware_mapping(plan.hardware),
        "model": model_mapping(plan.model),
        "workload": dict(workload_mapping(plan.workload)),
    }


def _kv_mapping(kv: KvPages) -> dict[str, Any]:
    """Nothing is said of reuse where nothing is kept."""
    values = _plain(kv)
    return values if kv.reuse != KvReuse() else {key: value for key, value in values.items() if key != "reuse"}


def _section(name: str, value: Any) -> str:
    if value is None or value == []:
        return ""
    comment = f"\n# {_COMMENTS[name]}\n" if name in _COMMENTS else ""
    return comment + "\n".join(_lines(name, value)) + "\n"


def _lines(name: str, value: Any, indent: str = "") -> Iterator[str]:
    """``name: value``, on one line where that reads well, else one line a key or row."""
    short = _flow(value)
    nested = isinstance(value, Mapping) and any(isinstance(v, Mapping | list) and v for v in value.values())
    if isinstance(value, Mapping) and value and (nested or len(value) > _KEYS_A_LINE or len(short) > _LINE):
        yield f"{indent}{name}:"
        for key, item in value.items():
            yield from _lines(key, item, indent + "  ")
    elif isinstance(value, list) and any(isinstance(item, list | str | Mapping) for item in value):
        yield f"{indent}{name}:"
        yield from (f"{indent}  - {_flow(item)}" for item in value)
    else:
        yield f"{indent}{name}: {short}"


def _flow(value: Any) -> str:
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text = yaml.dump(value, Dumper=dumper, sort_keys=False, default_flow_style=True, width=_UNWRAPPED, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _plain(value: Any) -> Any:
    """Dataclasses, enumerations and tuples as what YAML has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _rounded(value: Any) -> Any:
    """Six figures are enough of a prediction, which is computed again when it is read."""
    if isinstance(value, Mapping):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
