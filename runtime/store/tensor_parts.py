"""From a module's parameters to a checkpoint's tensors: the one place where their different names and shapes meet.

transformers v5 renames checkpoint tensors and fuses some (a layer's experts become one parameter). Its own conversion mapping says how.
Here the mapping is followed on names and shapes alone. Each parameter becomes a list of pieces of checkpoint tensors that can be read
straight into place.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from penstock.planner.common.errors import UserError
from penstock.runtime.reading.layout import Piece


class Stored(Protocol):
    """What is known of a checkpoint tensor: ``penstock.planner.contract.checkpoint.checkpoint_files.TensorEntry`` fits."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class _Value:
    """A tensor that has a shape but no bytes: ``runs`` of checkpoint tensors, in row-major order."""

    shape: tuple[int, ...]
    runs: tuple[tuple[str, int, int], ...]
    """(checkpoint tensor, offset in it, bytes)."""

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self.runs)

    def cut(self, parts: int) -> Iterator[tuple[tuple[str, int, int], ...]]:
        """The runs of each of ``parts`` equal stretches."""
        size = self.nbytes // parts
        stretch: list[tuple[str, int, int]] = []
        room = size
        for tensor, offset, nbytes in self.runs:
            while nbytes:
                take = min(nbytes, room)
                stretch.append((tensor, offset, take))
                offset, nbytes, room = offset + take, nbytes - take, room - take
                if not room:
                    yield tuple(stretch)
                    stretch, room = [], size


def pieces_of(model: Any, names: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Stored]) -> dict[str, tuple[Piece, ...]]:
    """The pieces of every parameter of ``model`` that the checkpoint's ``tensors`` fill.

    ``model``: a transformers model, on the meta device or not. ``names``: its parameters (and persistent buffers) with
    their shapes. Parameters that no tensor fills are absent; tensors that fill none are ignored. UserError: a shape
    differs, or a conversion that moves single elements is needed.
    """
    renamings, converters = _transforms(model)
    prefix = getattr(model, "base_model_prefix", "")
    collected: dict[str, dict[str | None, list[str]]] = {}
    converter_of: dict[str, Any] = {}
    for key in sorted(tensors, key=_natural):
        name, pattern, converter = _rename(key, renamings, converters)
        name = _with_prefix(name, prefix, names)
        if name not in names:
            name, pattern, converter = _with_prefix(key, prefix, names), None, None
        if name in names:
            collected.setdefault(name, {}).setdefault(pattern, []).append(key)
            if converter is not None:
                converter_of[name] = converter
    result: dict[str, tuple[Piece, ...]] = {}
    for name, by_pattern in collected.items():
        values = {
            pattern: [_Value(tuple(tensors[key].shape), ((key, 0, tensors[key].nbytes),)) for key in keys]
            for pattern, keys in by_pattern.items()
        }
        filled = {name: values[None][0]} if None in values else _convert(model, name, converter_of[name], values, names)
        for target, value in filled.items():
            if target in names:
                result[target] = _pieces(target, value, names[target])
    return result


class Place(NamedTuple):
    """Where a tensor of a checkpoint goes."""

    parameter: str
    source: int
    """Which of the tensors that transformers puts together as the parameter: 0 is the first, as gate of gate and up."""


def places_of(model: Any, tensors: Iterable[str]) -> dict[str, Place]:
    """Tensor -> its place in ``model``, by names alone; without those that belong nowhere. Experts are in the order of their numbers."""
    renamings, converters = _transforms(model)
    names = dict(model.named_parameters())
    found = {}
    for key in sorted(tensors, key=_natural):
        name, pattern, converter = _rename(key, renamings, converters)
        name = _with_prefix(name, getattr(model, "base_model_prefix", ""), names)
        if name not in names:
            name, pattern, converter = _with_prefix(key, getattr(model, "base_model_prefix", ""), names), None, None
        if name in names:
            found[key] = Place(name, 0 if converter is None else converter.source_patterns.index(pattern))
    return found


def transposes_experts(model: Any) -> bool:
    """Whether transformers may transpose routed experts when it loads ``model``."""
    return any(_is_transpose(converter) for converter in _transforms(model)[1])


def stored_transposed(model: Any, tensors: Mapping[str, Stored]) -> set[str]:
    """Names of the routed experts' parameters that ``tensors`` hold with their last two dimensions exchanged, [experts, ..., ...] each."""
    renamings, converters = _transforms(model)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    found = set()
    for key, entry in tensors.items():
        name, _, converter = _rename(key, renamings, converters)
        name = _with_prefix(name, getattr(model, "base_model_prefix", ""), shapes)
        if converter is None or not _is_transpose(converter) or name not in shapes or not _is_experts(model, name):
            continue
        same = tuple(entry.shape) == shapes[name] and getattr(converter.operations[0], "check_dims", False)
        if not same and tuple(entry.shape) == (shapes[name][0], shapes[name][2], shapes[name][1]):
            found.add(name)
    return found


def _is_transpose(converter: Any) -> bool:
    operations = converter.operations
    if len(operations) != 1 or type(operations[0]).__name__ != "Transpose":
        return False
    return {getattr(operations[0], name, None) for name in ("dim0", "dim1")} == {1, 2}


def _is_experts(model: Any, name: str) -> bool:
    return hasattr(model.get_submodule(name.rpartition(".")[0]), "is_transposed")


def _transforms(model: Any) -> tuple[list[Any], list[Any]]:
    """The model's renamings and converters, in transformers' order; none for a module that is not transformers' own."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    if not isinstance(model, PreTrainedModel):
        return [], []
    mapping = get_model_conversion_mapping(model) or []
    return [t for t in mapping if not isinstance(t, WeightConverter)], [t for t in mapping if isinstance(t, WeightConverter)]


def _rename(key: str, renamings: list[Any], converters: list[Any]) -> tuple[str, str | None, Any]:
    """``key`` after every renaming and at most one converter, with that converter and the pattern of it that matched."""
    for renaming in renamings:
        key, _ = renaming.rename_source_key(key)
    for converter in converters:
        key, pattern = converter.rename_source_key(key)
        if pattern is not None:
            return key, pattern, converter
    return key, None, None


def _with_prefix(name: str, prefix: str, names: Mapping[str, Any]) -> str:
    """``name`` with the base model's prefix added or removed where only that makes it a parameter."""
    if not prefix or name in names:
        return name
    bare = name.removeprefix(f"{prefix}.")
    if bare in names:
        return bare
    return f"{prefix}.{name}" if f"{prefix}.{name}" in names else name


def _convert(
    model: Any, name: str, converter: Any, values: dict[str | None, list[_Value]], names: Mapping[str, tuple[int, ...]]
) -> dict[str, _Value]:
    """Follow ``converter``'s operations on shapes. Returns the parameters that they fill, by name."""
    patterns = [p for p in converter.source_patterns if p in values]
    parts = [values[p] for p in patterns]
    targets = [name.replace(converter.target_patterns[0], t) for t in converter.target_patterns]
    for operation in converter.operations:
        kind, dim = type(operation).__name__, getattr(operation, "dim", 0)
        one_tensor_each = all(len(part) == 1 for part in parts)
        if _is_transpose(converter) and one_tensor_each and _is_as_stored(model, name, parts[0][0], names):
            pass
        elif kind == "MergeModulelist" and dim == 0:
            parts = [[_stack(name, part)] for part in parts]
        elif kind == "Concatenate" and one_tensor_each:
            parts = [[_concatenate(name, [part[0] for part in parts], dim)]]
        elif kind == "Chunk" and dim == 0 and len(parts) == 1 and one_tensor_each and not getattr(operation, "num_shards_attribute", None):
            parts = [[value] for value in _split(parts[0][0], [parts[0][0].shape[0] // len(targets)] * len(targets))]
        elif kind == "Split" and dim == 0 and len(parts) == 1 and one_tensor_each and all(t in names for t in targets):
            parts = [[value] for value in _split(parts[0][0], [names[t][0] for t in targets])]
        else:
            raise UserError(
                f"model type {getattr(model.config, 'model_type', '?')}: parameter {name} needs the conversion {operation!r}, which is not "
                f"supported (allowed: MergeModulelist and Chunk along dimension 0, Concatenate); save the model again with "
                f"save_pretrained(..., save_original_format=False)"
            )
    if len(parts) != len(targets):
        raise UserError(f"parameter {name}: conversion gives {len(parts)} tensors for {len(targets)} parameters")
    return {target: part[0] for target, part in zip(targets, parts, strict=True)}


def _is_as_stored(model: Any, name: str, value: _Value, names: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the routed experts ``name`` of ``model`` are computed with as they are stored."""
    if name not in names or not _is_experts(model, name):
        return False
    return value.shape[1:] == names[name][1:]


def _stack(name: str, values: list[_Value]) -> _Value:
    """One more leading dimension over equal shapes."""
    if len({v.shape for v in values}) != 1:
        raise UserError(f"parameter {name}: its checkpoint tensors have different shapes {sorted({v.shape for v in values})}")
    return _Value((len(values), *values[0].shape), tuple(run for v in values for run in v.runs))


def _concatenate(name: str, values: list[_Value], dim: int) -> _Value:
    """Join along ``dim``; runs interleave when ``dim`` is not the first."""
    first = values[0].shape
    dim %= len(first)
    if any(v.shape[:dim] + v.shape[dim + 1 :] != first[:dim] + first[dim + 1 :] for v in values):
        raise UserError(f"parameter {name}: cannot join checkpoint tensors of shapes {[v.shape for v in values]} along dimension {dim}")
    outer = math.prod(first[:dim])
    stretches = zip(*(v.cut(outer) for v in values), strict=True)
    runs = tuple(run for row in stretches for stretch in row for run in stretch)
    return _Value((*first[:dim], sum(v.shape[dim] for v in values), *first[dim + 1 :]), runs)


def _split(value: _Value, rows: list[int]) -> list[_Value]:
    """Cut along the first dimension into ``rows``."""
    each = list(value.cut(value.shape[0]))
    result, start = [], 0
    for count in rows:
        runs = tuple(run for stretch in each[start : start + count] for run in stretch)
        result.append(_Value((len(each[start : start + count]), *value.shape[1:]), runs))
        start += count
    return result


def _pieces(name: str, value: _Value, shape: tuple[int, ...]) -> tuple[Piece, ...]:
    """Runs laid out from byte 0; runs that go on within one tensor become one."""
    if value.shape != shape:
        raise UserError(
            f"tensor {value.runs[0][0]} has shape {list(value.shape)} for parameter {name} of shape {list(shape)}; "
            f"config.json and the weights are of different models"
        )
    pieces: list[Piece] = []
    dest = 0
    for tensor, offset, nbytes in value.runs:
        last = pieces[-1] if pieces else None
        if last and last.tensor == tensor and last.offset + last.nbytes == offset:
            pieces[-1] = Piece(tensor, last.offset, last.nbytes + nbytes, last.dest)
        else:
            pieces.append(Piece(tensor, offset, nbytes, dest))
        dest += nbytes
    return tuple(pieces)


def part_of(pieces: Sequence[Piece], start: int, nbytes: int) -> tuple[Piece, ...]:
    """What of ``pieces``, which lie one behind the other, fills ``nbytes`` of a parameter from ``start`` on, as a parameter of its own."""
    part = []
    for number in range(max(0, bisect_right(pieces, start, key=lambda piece: piece.dest) - 1), len(pieces)):
        piece = pieces[number]
        if piece.dest >= start + nbytes:
            break
        first, last = max(piece.dest, start), min(piece.dest + piece.nbytes, start + nbytes)
        if first < last:
            part.append(Piece(piece.tensor, piece.offset + first - piece.dest, last - first, first - start))
    return tuple(part)


def _natural(key: str) -> list[tuple[int, int, str]]:
    """Sort experts by number: ``experts.2`` before ``experts.10``."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in key.split(".")]
