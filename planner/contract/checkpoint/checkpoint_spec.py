"""From a checkpoint's tensors, wherever they are stored, to the model's spec: names sorted into units, sizes checked."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.ffn_activation import ffn_activation
from penstock.planner.contract.checkpoint.hf_config import HfGeometry, geometry_from_config, text_config
from penstock.planner.contract.checkpoint.layer_states import keeps_state, layer_states
from penstock.planner.contract.checkpoint.quantised import as_matrices, quantisation_of
from penstock.planner.contract.checkpoint.tally import Tally, TensorInfo
from penstock.planner.contract.checkpoint.tensor_names import FUSED, classify, one_block
from penstock.planner.contract.experts.expert_hits import default_hit_rates
from penstock.planner.contract.given.formats import FORMATS, KNOWN_FORMATS, QUANTISED, Dtype, Format, plain_format
from penstock.planner.contract.given.model import ModelSpec, Routers
from penstock.planner.contract.given.unit_spec import UnitKind, UnitSpec


@dataclass
class _Sorted:
    """A checkpoint's tensors by unit, as they are gathered."""

    attn: dict[int, Tally] = field(default_factory=lambda: defaultdict(Tally))
    ffn: dict[int, Tally] = field(default_factory=lambda: defaultdict(Tally))
    """Without routed experts."""
    routed: dict[int, Tally] = field(default_factory=lambda: defaultdict(Tally))
    """All routed experts of a layer."""
    experts: dict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    """Layer -> expert -> bytes."""
    norm: Tally = field(default_factory=Tally)
    embed: Tally = field(default_factory=Tally)
    head: Tally = field(default_factory=Tally)
    table: tuple[int, ...] = ()
    """Shape of the embedding table."""
    head_table: tuple[int, ...] = ()

    stacks: set[str] = field(default_factory=set)
    modules: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Layer -> names directly under it, for messages."""
    dtypes: Counter[str] = field(default_factory=Counter)
    """Bytes of the layers' units by dtype."""
    shapes: dict[int, dict[str, tuple[int, ...]]] = field(default_factory=lambda: defaultdict(dict))
    """Layer -> name in it -> shape, routed experts apart."""
    lists: set[int] = field(default_factory=set)
    """Layers whose mixers are a list."""
    scratch_bytes: int = 0
    """Of the layers' largest coded matrix, decoded; an expert's gate and up are decoded together."""

    def rows(self, ending: str) -> set[int]:
        """First dimensions of the layers' tensors with such names."""
        return {shape[0] for shapes in self.shapes.values() for name, shape in shapes.items() if name.endswith(ending) and shape}

    def settle(self, geometry: HfGeometry, computed: Dtype) -> None:
        """What of a unit does not move with it is always resident. A tied model may store its table under the head's name."""
        for unit in (*self.attn.values(), *self.ffn.values()):
            self.norm.take(unit.loose(plain_format(computed).name))
        if not self.embed and geometry.tied is not False:
            self.embed, self.table, self.head = self.head, self.head_table, Tally()


def spec_from_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, tuple[int, tuple[int, ...], str]], name: str, checkpoint: str, digest: str
) -> ModelSpec:
    """The spec of a checkpoint whose ``tensors`` are name -> (nbytes, shape, dtype), by their original names.

    ``config`` is config.json's content. The same tensors give the same spec in place and packed. Raises UserError when a layer
    is missing, when config and tensors are of different models, and for models without self_attn and mlp blocks.
    """
    own, where = text_config(config), f"{checkpoint}/config.json"
    geometry = geometry_from_config(own, where)
    found = _sort(geometry, as_matrices(tensors, quantisation_of(own, where)))
    _check_layers(geometry, found, tensors)
    stored = KNOWN_FORMATS[found.dtypes.most_common(1)[0][0]]
    computed = _computed(geometry, stored)
    found.settle(geometry, computed)
    if len(found.table) != 2:
        raise UserError(f"{checkpoint}: embed_tokens.weight is missing; download the checkpoint again")
    vocab, hidden = found.head_table if found.head and len(found.head_table) == 2 else found.table
    _check_width(geometry, "hidden_size", geometry.hidden, {hidden}, "embed_tokens.weight")
    _check_width(geometry, "vocab_size", geometry.vocab, {vocab}, "embed_tokens.weight")
    if geometry.tied is False and not found.head:
        raise UserError(f"{checkpoint}: lm_head.weight is missing and config.json says tie_word_embeddings is false; download it again")
    tied = not found.head
    routers = _routers(geometry, found)
    shapes = [found.shapes[i] for i in range(geometry.layers)]
    plain = not geometry.compresses_kv and not any(map(keeps_state, shapes))
    kv_width = _width(geometry, "num_key_value_heads", geometry.kv_width, found.rows("k_proj.weight") if plain else set())
    states = layer_states(own, shapes, kv_width)
    kv_elements = sum(state.kv_elements for state in states)
    return ModelSpec(
        name=name,
        model_type=geometry.model_type,
        units=_units(geometry, found, stored, computed),
        tied=tied,
        vocab=vocab,
        hidden=hidden,
        attn_width=_attn_width(geometry, found),
        kv_width=kv_width,
        ffn_width=_ffn_width(geometry, found, routers),
        compute_dtype=computed,
        kv_dtype=computed,
        routers=routers,
        checkpoint=checkpoint,
        digest=digest,
        kv_elements=None if kv_elements == 2 * kv_width * geometry.layers else kv_elements,
        state_bytes=sum(state.state_bytes(stored.plain.nbytes) for state in states),
        max_tokens=geometry.max_tokens,
        scratch_bytes=found.scratch_bytes,
        ffn_activation="" if routers else ffn_activation(own, shapes),
    )


def _sort(geometry: HfGeometry, tensors: Mapping[str, TensorInfo]) -> _Sorted:
    found = _Sorted()
    for name, info in tensors.items():
        role = classify(name)
        if role.kind == "ignored" or (role.layer is not None and geometry.layers <= role.layer < geometry.layers + geometry.extra_layers):
            continue
        if role.kind != "norm" and info.dtype not in KNOWN_FORMATS:
            raise UserError(
                f"{geometry.where.rpartition('/')[0]}: tensor {name!r} is {info.dtype}, allowed are {', '.join(FORMATS)}; "
                "use the model's unquantised checkpoint"
            )
        if role.layer is not None:
            found.modules[role.layer].add(role.child)
        if role.kind in ("attn", "ffn") and role.layer is not None:
            found.stacks.add(role.stack)
            found.dtypes[info.dtype] += info.nbytes
            together = 1 if role.expert in (None, FUSED) else 2
            found.scratch_bytes = max(found.scratch_bytes, together * info.scratch_bytes)
            expert = FUSED if role.kind == "ffn" and _holds_experts(geometry, info) else role.expert
            if expert is not None and not geometry.whole_experts:
                found.routed[role.layer].add(info)
                found.experts[role.layer][expert] += info.nbytes
            else:
                (found.attn if role.kind == "attn" else found.ffn)[role.layer].add(info)
                found.shapes[role.layer][role.rest] = info.shape
                if role.kind == "attn" and role.is_one_of_many:
                    found.lists.add(role.layer)
        elif role.kind == "embed" and not found.embed:
            found.embed.add(info)
            found.table = info.shape
        elif role.kind == "head" and not found.head:
            found.head.add(info)
            found.head_table = info.shape
        else:
            found.norm.add(info)
    _unite(found)
    return found


def _holds_experts(geometry: HfGeometry, info: TensorInfo) -> bool:
    """Whether an FFN's tensor is a matrix for each routed expert of its layer, whatever its name: [experts, ..., ...]."""
    return len(info.shape) == 3 and info.shape[0] == geometry.experts > 1 and info.shape[1] > 1


def _unite(found: _Sorted) -> None:
    """Where all layers have one block only, or mixers that FFNs interleave, each of them is one unit."""
    layers = [*found.attn, *found.ffn]
    if all(one_block({kind for kind, sizes in (("attn", found.attn), ("ffn", found.ffn)) if i in sizes}, i in found.lists) for i in layers):
        for i, tally in found.attn.items():
            found.ffn[i].take(tally)
        found.attn.clear()


def _check_layers(geometry: HfGeometry, found: _Sorted, tensors: Mapping[str, object]) -> None:
    where = geometry.where.rpartition("/")[0]
    if not found.ffn:
        some = ", ".join(sorted(tensors, key=lambda n: (".0." not in n, n))[:3]) or "no tensors"
        raise UserError(f"{where}: not supported, needs a list of decoder layers, with self_attn, mlp and the like; found {some!r}")
    if len(found.stacks) > 1:
        stacks = ", ".join(sorted(found.stacks))
        raise UserError(f"{where}: not supported, needs one stack of decoder layers; found {stacks}")
    shared = next((name for names in found.modules.values() for name in names if name.startswith("shared_transf")), None)
    if shared is not None:
        raise UserError(f"{where}: not supported, its layers share one {shared}, and layers are streamed one by one; use another model")
    beyond = max(found.modules)
    if beyond >= geometry.layers:
        raise UserError(
            f"{where}: has tensors of layer {beyond} and config.json says num_hidden_layers is {geometry.layers}; "
            "restore the model's own config.json"
        )
    for layer in range(geometry.layers):
        if layer not in found.modules:
            raise UserError(
                f"{where}: layer {layer} is missing and config.json says num_hidden_layers is {geometry.layers}; download it again"
            )
        if found.experts.get(layer) and not found.ffn.get(layer):
            raise UserError(f"{where}: layer {layer} has experts and no router; download it again")
        blocks = (("self_attn", found.attn), ("mlp", found.ffn)) if found.attn else (("mlp", found.ffn),)
        lacking = [kind for kind, sizes in blocks if not sizes.get(layer)]
        if lacking:
            modules = ", ".join(sorted(found.modules[layer]))
            raise UserError(
                f"{where}: layer {layer} has no {' and no '.join(lacking)}, found {modules}; other layers have both: "
                "download it again, or use another model if it is made so"
            )


def _units(geometry: HfGeometry, found: _Sorted, stored: Format, computed: Dtype) -> tuple[UnitSpec, ...]:
    """A table in a float type narrower than it is computed with takes the room of the latter: it is cast where it lies."""
    layers = range(geometry.layers)
    units = [found.attn[i].unit(UnitKind.attn, i, stored) for i in layers] + [found.ffn[i].unit(UnitKind.ffn, i, stored) for i in layers]
    units += [whole.unit(UnitKind.expert, i, stored, geometry.experts) for i, whole in sorted(found.routed.items())]
    units += [found.norm.unit(UnitKind.norm, None, stored)] if found.norm else []
    tables = [tally.unit(kind, None, stored) for kind, tally in ((UnitKind.embed, found.embed), (UnitKind.head, found.head)) if tally]
    wide = [replace(table, stored_bytes=max(table.stored_bytes, table.elements * computed.nbytes)) for table in tables]
    return tuple(units + [table if table.format.needs_scratch else cast for table, cast in zip(tables, wide, strict=True)])


def _routers(geometry: HfGeometry, found: _Sorted) -> Routers | None:
    """What is known of the routers, once every MoE layer holds all of them at the same size: of coded ones that of each layer."""
    if not found.experts:
        return None
    where, count = geometry.where.rpartition("/")[0], geometry.experts
    if not count or not 1 <= geometry.top_k <= count:
        raise UserError(
            f"{geometry.where}: the checkpoint has experts, and the config names {count} of them with top-k {geometry.top_k}; "
            "restore the model's own config.json"
        )
    sizes, elements = set(), set()
    for layer, held in sorted(found.experts.items()):
        missing = set() if FUSED in held else set(range(count)) - set(held)
        if missing or sum(held.values()) % count or (FUSED not in held and len(held) != count):
            which = f"expert {min(missing)} is missing" if missing else f"the experts are not {count} of one size"
            raise UserError(f"{where}: in layer {layer} {which}; download it again")
        sizes.add(sum(held.values()) // count)
        elements.add(found.routed[layer].elements // count)
    if len(sizes) > 1 and (len(elements) > 1 or not all(QUANTISED.keys() & tally.dtypes.keys() for tally in found.routed.values())):
        raise UserError(f"{where}: experts of {len(sizes)} sizes are not supported; found {sorted(sizes)} bytes")
    return Routers(geometry.top_k, default_hit_rates(count, geometry.top_k))


def _ffn_width(geometry: HfGeometry, found: _Sorted, routers: Routers | None) -> int:
    dense = routers is None or len(found.experts) < geometry.layers
    widths = [geometry.ffn] if dense else []
    if routers is not None:
        widths.append(geometry.expert_ffn and routers.top_k * geometry.expert_ffn + geometry.shared_ffn)
    known = [width for width in widths if width]
    return max(known or found.rows(".weight"))


def _attn_width(geometry: HfGeometry, found: _Sorted) -> int:
    """What attention puts out, which its last projection takes: a query projection may hold gates beside the queries."""
    taken = {shape[1] for shapes in found.shapes.values() for name, shape in shapes.items() if name.endswith("o_proj.weight") and shape[1:]}
    if geometry.attn_width in taken:
        return geometry.attn_width or 0
    return _width(geometry, "num_attention_heads", geometry.attn_width, found.rows("q_proj.weight"))


def _width(geometry: HfGeometry, key: str, stated: int | None, rows: set[int]) -> int:
    """The width that the config states, or else the projections' own."""
    if stated:
        if key == "num_key_value_heads":
            _check_width(geometry, f"{key} x head_dim", stated, rows - {geometry.attn_width}, "k_proj.weight")
        return stated if stated in rows else max(rows, default=stated)
    return max(rows, default=0)


def _computed(geometry: HfGeometry, stored: Format) -> Dtype:
    """What products are computed in: the weights' own type, or what the config decodes quantised ones to."""
    if stored.name in QUANTISED:
        return Dtype(geometry.dtype) if geometry.dtype in list(Dtype) else stored.plain
    if geometry.dtype is not None and geometry.dtype != stored.plain:
        raise UserError(
            f"{geometry.where}: dtype is {geometry.dtype} and the weights are {stored.name}; weights are computed with as stored: "
            f"set dtype to {stored.plain} there, or convert the checkpoint"
        )
    return stored.plain


def _check_width(geometry: HfGeometry, key: str, stated: int | None, stored: set[int], tensor: str) -> None:
    if stated and stored and stated not in stored:
        raise UserError(
            f"{geometry.where}: {key} is {stated} and {tensor} has {max(stored)}; "
            "config.json and weights are of different models, download the checkpoint again"
        )
