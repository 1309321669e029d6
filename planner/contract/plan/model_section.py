"""A plan file's section ``model``: the model's units, those that are alike in one row, and what else is known of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.common.outside.bounds import EXABYTE, MOST_ELEMENTS, MOST_EXPERTS, MOST_LAYERS, check_bounds
from penstock.planner.common.strictly import build, convert
from penstock.planner.contract.experts.expert_hits import flaw
from penstock.planner.contract.given.formats import KNOWN_FORMATS, no_such_format
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.unit_spec import PER_LAYER, UnitKind, UnitSpec

_REMEDY = "write the plan again with `planner solve`"
_SPAN = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


@dataclass(frozen=True)
class UnitRow:
    """Units that are alike."""

    kind: UnitKind
    stored_bytes: int
    elements: int
    format: str
    layers: str | None = None
    """The layers that have such a unit, as ``0-2 5 7-79``; None for kinds that belong to no layer."""
    count: int = 1
    """In each of them."""


def model_mapping(model: ModelSpec) -> dict[str, Any]:
    """``model`` as the file shows it. :func:`model_from` takes it back."""
    routers = model.routers and {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(model.routers).items()}
    return {
        "name": model.name,
        "model_type": model.model_type,
        "layers": model.layers,
        "units": [_row(alike) for alike in _alike(model.units)],
        **{name: getattr(model, name) for name in ("tied", "vocab", "hidden", "attn_width", "kv_width", "ffn_width")},
        "compute_dtype": model.compute_dtype.value,
        "kv_dtype": model.kv_dtype.value,
        "routers": routers,
        "checkpoint": model.checkpoint,
        "digest": model.digest,
        "kv_elements": model.kv_elements,
        "state_bytes": model.state_bytes,
        "max_tokens": model.max_tokens,
        "scratch_bytes": model.scratch_bytes,
        "ffn_activation": model.ffn_activation,
    }


def model_from(data: Any) -> ModelSpec:
    """The model of a plan file. Raises UserError naming ``model.`` and the key."""
    if not isinstance(data, Mapping) or "layers" not in data or "units" not in data:
        raise UserError(f"model: layers or units missing; {_REMEDY}")
    values = dict(data)
    layers, rows = convert(int, values.pop("layers"), "model.layers"), values.pop("units")
    if not 1 <= layers <= MOST_LAYERS:
        raise UserError(f"model.layers={layers}: must be 1 or more, at most {MOST_LAYERS}")
    model = replace(build(ModelSpec, values | {"units": ()}, "model"), units=_units(rows, layers))
    lacking = [kind for kind in (UnitKind.embed, *(() if model.tied else (UnitKind.head,))) if not model.of_kind(kind)]
    if lacking:
        raise UserError(f"model.units: no row of kind {lacking[0]}; {_REMEDY}")
    check_bounds(model, "model")
    _check_experts(model)
    return model


def spans(layers: Iterable[int]) -> str:
    """Ascending numbers as ``0-2 5 7-79``."""
    found: list[list[int]] = []
    for layer in layers:
        if found and layer == found[-1][1] + 1:
            found[-1][1] = layer
        else:
            found.append([layer, layer])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def _alike(units: Iterable[UnitSpec]) -> list[list[UnitSpec]]:
    groups: dict[UnitSpec, list[UnitSpec]] = {}
    for unit in units:
        groups.setdefault(replace(unit, layer=None), []).append(unit)
    return list(groups.values())


def _row(alike: list[UnitSpec]) -> dict[str, Any]:
    one = alike[0]
    row: dict[str, Any] = {"kind": one.kind.value}
    if one.layer is not None:
        row["layers"] = spans(unit.layer for unit in alike if unit.layer is not None)
    if one.kind is UnitKind.expert:
        row["count"] = one.count
    return row | {"stored_bytes": one.stored_bytes, "elements": one.elements, "format": one.format.name}


def _units(rows: Any, layers: int) -> tuple[UnitSpec, ...]:
    """Every unit, kind by kind and layer by layer, once no layer lacks a block or has one twice."""
    if not isinstance(rows, list):
        raise UserError("model.units: must be a list of rows {kind: ..., stored_bytes: ..., elements: ..., format: ...}")
    units: list[UnitSpec] = []
    for i, given in enumerate(rows):
        where = f"model.units[{i}]"
        text = {"layers": str(given["layers"])} if isinstance(given, Mapping) and given.get("layers") is not None else {}
        row = build(UnitRow, {**given, **text} if isinstance(given, Mapping) else given, where)
        if row.format not in KNOWN_FORMATS:
            raise no_such_format(f"{where}.format={row.format}", row.format)
        least = 0 if row.kind is UnitKind.attn else 1
        if min(row.stored_bytes, row.elements) < least or row.count < 1:
            raise UserError(f"{where}: stored_bytes={row.stored_bytes}, elements={row.elements}, count={row.count}; allowed: 1 or more")
        if row.stored_bytes > EXABYTE or row.elements > MOST_ELEMENTS or row.count > MOST_EXPERTS:
            most = f"stored_bytes {EXABYTE}, elements {MOST_ELEMENTS}, count {MOST_EXPERTS}"
            raise UserError(f"{where}: stored_bytes={row.stored_bytes}, elements={row.elements}, count={row.count}; at most {most}")
        numbers = _layers(row, layers, f"{where}.layers")
        units += (UnitSpec(row.kind, n, row.stored_bytes, row.elements, KNOWN_FORMATS[row.format], row.count) for n in numbers)
    order = list(UnitKind)
    units.sort(key=lambda unit: (order.index(unit.kind), unit.layer or 0))
    for one, other in pairwise(units):
        if (one.kind, one.layer) == (other.kind, other.layer):
            of = "" if one.layer is None else f" of layer {one.layer}"
            raise UserError(f"model.units: {one.kind}{of} stands in two rows; {_REMEDY}")
    for kind in (UnitKind.attn, UnitKind.ffn):
        missing = set(range(layers)) - {unit.layer for unit in units if unit.kind is kind}
        if missing:
            raise UserError(f"model.units: no row of kind {kind} for layer {min(missing)} of {layers}; {_REMEDY}")
    return tuple(units)


def _layers(row: UnitRow, layers: int, where: str) -> list[int | None]:
    if row.kind not in PER_LAYER:
        if row.layers is not None:
            raise UserError(f"{where}={row.layers}: {row.kind} belongs to no layer; leave it out")
        return [None]
    numbers = numbers_in(row.layers or "", layers)
    if not numbers:
        raise UserError(f"{where}={row.layers}: must be numbers and spans within 0 to {layers - 1}, such as 0-{layers - 1}")
    return list(numbers)


def numbers_in(text: str, count: int) -> list[int]:
    """What :func:`spans` wrote of numbers below ``count``; empty for any other text."""
    numbers: list[int] = []
    for span in text.split():
        found = _SPAN.fullmatch(span)
        last = int(found[2] or found[1]) if found else count
        if found is None or last >= count or len(numbers) > count:
            return []
        numbers += range(int(found[1]), last + 1)
    return numbers


def _check_experts(model: ModelSpec) -> None:
    units, routers = model.of_kind(UnitKind.expert), model.routers
    if bool(units) != (routers is not None):
        raise UserError(f"model: rows of kind expert go with routers, and one of them is missing; {_REMEDY}")
    if routers is None:
        return
    if len({(unit.count, unit.elements) for unit in units}) > 1:
        raise UserError(f"model.units: experts of several sizes are not supported; {_REMEDY}")
    count = units[0].count
    if not 1 <= routers.top_k <= count:
        raise UserError(f"model.routers.top_k={routers.top_k} of count={count}; allowed: 1 to count; {_REMEDY}")
    for name in ("foreseen", "second_tier", "alone"):
        if not 0 <= getattr(routers, name) <= 1:
            raise UserError(f"model.routers.{name}={getattr(routers, name)}; allowed: 0 to 1; {_REMEDY}")
    if wrong := flaw(routers.hit_rates, count):
        raise UserError(f"model.routers.hit_rates: {wrong}; {_REMEDY}")
