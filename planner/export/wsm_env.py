"""`to=env`: WSM's variables, to be sourced. The inverse of ``penstock.planner.common.command.wsm``, from its own table.

The names are those of the documents that the project started from; ``docs/knobs.md`` lists them beside their keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.planner.common.command.wsm import TABLE
from penstock.planner.contract.decided.decisions import ResidentUnits
from penstock.planner.contract.decided.declared import FORCED
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.export.exported import Exported, Losses, Lost, Request, Target
from penstock.planner.export.otherwise import computed_beside, copied, decided, moved_price, planned, still_experts

NO_ROOM = "without units in VRAM it breaks a rule: DRAM's cache, or what the SSD gives it, is made for the others"
"""Why nothing is predicted of streaming every unit."""


def keys_of_plan(plan: Plan) -> dict[str, str]:
    """Key of `planner solve` -> the plan's value as text, of the keys that a variable sets; those of the ring only with a GPU."""
    gpu, set_by_variables = plan.hardware.gpu is not None, {variable.solve for variable in TABLE}
    keys = {one.key: one.of(plan.decisions) for one in FORCED.values() if one.key in set_by_variables and (gpu or not one.how.card)}
    if gpu:
        keys["workload.vram_guard_bytes"] = plan.workload.vram_guard_bytes
    return {key: str(value) for key, value in keys.items()}


def variables(values: Mapping[str, str]) -> dict[str, str]:
    """Variable -> text that sets each key in ``values``. Where one of a key's variables says it exactly, the others that cannot are left
    out; where none can, each says the nearest value below."""
    written = {}
    for variable in TABLE:
        if variable.solve is not None and variable.solve in values:
            value = values[variable.solve]
            rivals = [other.form for other in TABLE if other.solve == variable.solve]
            if variable.form.exact(value) or not any(form.exact(value) for form in rivals):
                written[variable.name] = variable.form.write(value)
    return written


def _export(request: Request) -> Exported:
    plan = copied(request.plan)
    values = keys_of_plan(plan)
    written = variables(values)
    key_of = {variable.name: variable.solve for variable in TABLE}
    together = _together(plan)
    losses = Losses((*computed_beside(request.plan), *_lost(plan, values, written)), together, "" if together else NO_ROOM)
    lines = [f"# {line}" for line in losses.lines(request)]
    lines += ["# The engine's own switches (WSM_SKIP_PRELOAD_WAIT and others) belong to a run, not to a plan: docs/knobs.md."]
    for name, text in written.items():
        lines += [f"# {key_of[name]}={values[key_of[name] or '']}", f"export {name}={text}"]
    return Exported("\n".join(lines) + "\n", losses)


def _streaming(plan: Plan) -> Plan | None:
    """The plan with no unit kept in VRAM, the LM head excepted."""
    d, w = plan.decisions, plan.decisions.weights
    units = ResidentUnits(0, 0, w.vram.resident_units.head)
    return decided(plan, replace(d, weights=replace(w, vram=replace(w.vram, resident_units=units))))


def _lost(plan: Plan, values: Mapping[str, str], written: Mapping[str, str]) -> list[Lost]:
    w, lost = plan.decisions.weights, []
    kept = w.vram.resident_units
    if kept.attn or kept.ffn:
        other = _streaming(plan)
        speed = other.prediction.decode_tokens_per_s if other else None
        what = f"{kept.attn} attention and {kept.ffn} FFN units stay in VRAM"
        lost.append(Lost(what, "every unit streams", speed, "" if other else NO_ROOM))
    for variable in TABLE:
        if variable.name in written and not variable.form.exact(values[variable.solve or ""]):
            said = variable.form.read(written[variable.name])
            lost.append(
                Lost(
                    f"{variable.solve}={values[variable.solve or '']}",
                    f"{variable.name} can say {said}",
                    None,
                    "a distance or size alone changes no predicted figure",
                )
            )
    if plan.model.experts:
        lost.append(Lost("expert slots and their policy", "a layer's experts move with its FFN, all of them", _experts_whole(plan)))
    rest = f"blocks of {w.ssd.block_bytes} bytes x {w.ssd.queue_depth}, copies of {w.h2d.chunk_bytes} bytes x {w.h2d.in_flight}"
    lost.append(
        Lost(
            f"{rest}, KV pages, {plan.decisions.prefill_chunk_tokens} prompt tokens a pass, batch {plan.decisions.batch}",
            "no variable; the engine takes its own",
            None,
            "the WSM documents do not say which",
        )
    )
    return lost


def _experts_whole(plan: Plan) -> float:
    moved = still_experts(plan)
    step, placement = planned(plan), plan.placement
    bill = moved_price(plan, placement.ssd_bytes_per_pass + moved.on_ssd, placement.h2d_bytes_per_pass + moved.outside_vram)
    return replace(step.moving(bill), routed_s=0.0).tokens_per_s


def _together(plan: Plan) -> float | None:
    other = _streaming(plan)
    if other is None:
        return None
    return _experts_whole(other) if plan.model.experts else other.prediction.decode_tokens_per_s


ENV = Target("env", "the WSM environment variables of the documents that the project started from", "env", _export)
