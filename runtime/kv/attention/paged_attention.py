"""Attention of a packed input over the pages of the pool: registered with `transformers`, which calls it in every layer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from penstock.planner.common.errors import UserError
from penstock.runtime.kv.attention.behind_others import BehindOthers
from penstock.runtime.kv.attention.layer_views import LayerViews, seen, write
from penstock.runtime.kv.attention.page_tables import Elsewhere, PagedKernel, PageTables, Put, Traits, slots_of
from penstock.runtime.kv.attention.row_groups import Loose, Rect, groups_of, packed
from penstock.runtime.kv.attention.row_masks import MaskRequest, request_mask
from penstock.runtime.kv.batch.kv_pool import KvPool
from penstock.runtime.kv.batch.kv_windows import first_seen, kinds, windows
from penstock.runtime.kv.batch.page_spans import spans
from penstock.runtime.kv.batch.rows_alone import keeps_its_own
from penstock.runtime.kv.batch.token_shape import Pair, TokenShape
from penstock.runtime.model.fused.direct import ATTENDS
from penstock.runtime.model.rows import Step

NAME = "penstock_rows"
_OWN = "penstock_own_attention"
"""Attribute of a model: the implementation that it had."""
_MOST_FLASH_DIM = 256
"""Of a head, that FlashAttention takes."""
_MOST_COPIES = 4
"""Groups up to which new K and V are written by a strided copy each; beyond, by one indexed copy."""
_SHORT = 16
"""Tokens of a row up to which a kernel over page tables is no slower than FlashAttention, which reads as many keys."""
Attention = Callable[..., tuple[torch.Tensor, Any]]


class AttentionModule(nn.Module):
    """What `transformers`' modules of attention have; none is made of this class."""

    layer_idx: int


@dataclass(frozen=True)
class RowPlaces:
    """Where the rows of a pass lie, as one call of attention after the other computes them."""

    groups: Sequence[Rect | Loose] = ()
    slots: torch.Tensor | None = None
    """[tokens]: where new K and V are written, if by one indexed copy."""
    tabled: Sequence[Loose] = ()
    """Rows that a kernel computes over ``tables``."""
    tables: PageTables | None = None
    behind: BehindOthers = field(default_factory=BehindOthers)
    """What attends with several tokens behind others, on a card."""


def run_attention(
    module: AttentionModule, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: MaskRequest | None, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """What `transformers` calls in place of a function of its own: [1, heads, tokens, dim] each -> [1, tokens, heads, dim]."""
    found: tuple[torch.Tensor, None] = getattr(module, ATTENDS)(module, query, key, value, attention_mask, **kwargs)
    return found


class AttentionByRows:
    """Has a model's layers call what a :class:`PagedAttention` feeds them. A second time does nothing."""

    def convert(self, model: PreTrainedModel) -> None:
        """A model that does not attend through `transformers`' interface alone, or keeps a cache of its own, stays as it is."""
        AttentionInterface.register(NAME, run_attention)
        AttentionMaskInterface.register(NAME, request_mask)
        own = model.config.get_text_config(decoder=True)._attn_implementation
        of_its_own = keeps_its_own(model) or _reads_its_mask(model)
        if own != NAME and model._can_set_attn_implementation() and not of_its_own:
            setattr(model, _OWN, own)
            model.set_attn_implementation(NAME)


def _no_eager(module: nn.Module, *_: Any, **__: Any) -> Any:
    """Stands for a model's eager attention where its module has none."""
    raise UserError(f"{type(module).__name__} has no eager attention; such models cannot be run")


def _reads_its_mask(model: PreTrainedModel) -> bool:
    """Whether layers choose among earlier tokens by code of their own, before they attend: sparse attention of DeepSeek-V3.2."""
    return any(name.endswith(".indexer") for name, _ in model.named_modules())


def attends_over_pages(model: PreTrainedModel) -> bool:
    """Whether ``model``, once converted, calls :func:`run_attention`."""
    AttentionByRows().convert(model)
    return model.config.get_text_config(decoder=True)._attn_implementation == NAME


class PagedAttention:
    """Has ``model`` attend over ``pool``: writes a pass's new K and V to their pages, and reads all that each row sees.

    Rows of equal lengths at equal distances are strided views of the pool, computed in one call as `transformers` computes a row alone.
    Others are computed by ``kernel`` over page tables, if there is one that can. Else each is computed for itself: a row whose pages are
    not adjacent from a copy of them. Layers that ``elsewhere`` takes in a pass are its own. The implementation is the one that
    `transformers` has for the model (sdpa, eager).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        pool: KvPool,
        kernel: PagedKernel | None = None,
        elsewhere: Elsewhere | None = None,
    ):
        self._pool, self._kernel, self._elsewhere = pool, kernel, elsewhere
        self._windows, self._kinds = windows(model.config), kinds(model.config)
        AttentionByRows().convert(model)
        own = self._implementation = getattr(model, _OWN)
        self._make_mask = ALL_MASK_ATTENTION_FUNCTIONS[own]
        half = model.dtype in (torch.bfloat16, torch.float16)
        self._flash = device.type == "cuda" and half and own == "sdpa"
        self._rows = RowPlaces()
        self._views: dict[int, LayerViews] = {}
        self._of_kind: dict[type[nn.Module], Attention] = {}
        self._masks: dict[tuple[MaskRequest, int, int, int], torch.Tensor | None] = {}
        self._keepers: dict[int, int] = {}
        """Address of new K -> the layer that wrote it last."""
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, ATTENDS, self.run)

    def begin_pass(self, step: Step, put: Put) -> None:
        """``step`` comes next; ``put`` brings numbers to the device."""
        self.turn_to(self.places_of(step, put))

    def places_of(self, step: Step, put: Put) -> RowPlaces:
        """What :meth:`turn_to` takes for ``step``."""
        page_tokens = self._pool.page_tokens
        groups = groups_of(step, page_tokens)
        slots = slots_of(step, page_tokens, put) if len(groups) > _MOST_COPIES else None
        tabled = self._for_kernel(step, groups) if self._kernel is not None else []
        return RowPlaces(groups, slots, tabled, PageTables.of(tabled, page_tokens, put) if tabled else None)

    def turn_to(self, rows: RowPlaces) -> None:
        """Layers attend with ``rows`` from now on."""
        self._masks.clear()  # a prompt's are large: of one part at a time
        self._rows = rows

    def begin_tables(self, tables: PageTables, slots: torch.Tensor) -> None:
        """A pass comes next whose rows are all in ``tables``, and whose tokens are written to ``slots``: no number of it is the host's."""
        self.turn_to(RowPlaces(slots=slots, tables=tables))

    def _for_kernel(self, step: Step, groups: Sequence[Rect | Loose]) -> list[Loose]:
        """Rows that a kernel over page tables computes sooner than calls of their own: those whose pages are not adjacent, and short ones,
        where they are of several groups or the kernel is sooner ``alone``."""
        short = [g for g in groups if isinstance(g, Loose) or g.tokens <= _SHORT]
        if len(short) == 1 and isinstance(short[0], Rect) and not (self._kernel is not None and self._kernel.alone):
            return []
        firsts = {token for g in short for token in ([g.first] if isinstance(g, Loose) else range(g.first, g.first + g.rows * g.tokens))}
        return [at for at in packed(step) if at.first in firsts]

    def keeps(self, module: AttentionModule) -> bool:
        """Whether it attends with K and V of its own, which are kept, not with those of an earlier layer."""
        return module.layer_idx in self._windows

    def run(
        self,
        module: AttentionModule,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: MaskRequest | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """:meth:`attend`, as `transformers` calls it."""
        return self.attend(module, query, key, value, attention_mask, kwargs), None

    def attend(
        self,
        module: AttentionModule,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        asked: MaskRequest | None,
        more: dict[str, Any],
    ) -> torch.Tensor:
        """One layer of the pass in progress: [1, heads, tokens, dim] each -> [1, tokens, heads, dim]."""
        if not isinstance(asked, MaskRequest):
            raise UserError(f"{type(module).__name__} makes a mask of its own for its attention; such models cannot be run")
        layer, shares = module.layer_idx, module.layer_idx not in self._windows
        if shares:  # K and V of an earlier layer, which it hands on
            layer = self._keepers[key.data_ptr()]
        views = self._views.get(layer) or self._meet(layer, key, value)
        if self._elsewhere is not None:
            queries, new = query[0].transpose(0, 1), None if shares else (key, value)
            there = self._elsewhere.attend(layer, views.shape, queries, new, self._traits(layer, asked, more))
            if there is not None:
                self._keepers.update({} if shares else {key.data_ptr(): layer})
                return there[None]
        place = self._pool.place(layer)
        held = views.pair(place.enter(views.shape))
        if not shares:
            self._keepers[key.data_ptr()] = layer
            self._write(held, key, value)
            place.written()
        out = self._all(module, layer, query, held, views.shape, asked, more)
        place.leave()
        return out

    def _meet(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> LayerViews:
        """The first pass shows how a layer's tokens lie."""
        shape = self._pool.shapes[layer] = TokenShape.of(key, value)
        views = self._views[layer] = LayerViews(shape)
        return views

    def _all(
        self, module: nn.Module, layer: int, query: torch.Tensor, held: Pair, shape: TokenShape, asked: MaskRequest, more: dict[str, Any]
    ) -> torch.Tensor:
        rows, out = self._rows, None
        groups, kernel, tables = rows.groups, self._kernel, rows.tables
        if tables is None and len(groups) == 1:
            return self._one(module, layer, query, groups[0], held, asked, more)
        queries = query[0].transpose(0, 1)
        traits = self._traits(layer, asked, more) if tables is not None else None
        if kernel is not None and tables is not None and traits is not None and kernel.takes(queries, shape):
            out = query.new_empty(len(queries), queries.shape[1], shape.values[1])
            kernel.attend(queries, held, tables, traits, out)
            tabled = {at.first for at in rows.tabled}
            groups = [group for group in groups if group.first not in tabled]
        elif not groups:
            raise RuntimeError(f"layer {layer} attends in a way that page tables do not serve")
        out = query.new_empty(len(queries), queries.shape[1], shape.values[1]) if out is None else out
        for group in groups:
            count = group.rows * group.tokens if isinstance(group, Rect) else len(group.row.tokens)
            end = group.first + count
            out[group.first : end] = self._one(module, layer, query[:, :, group.first : end], group, held, asked, more)[0]
        return out[None]

    def _one(
        self, module: nn.Module, layer: int, query: torch.Tensor, group: Rect | Loose, held: Pair, asked: MaskRequest, more: dict[str, Any]
    ) -> torch.Tensor:
        """A group's queries [1, heads, tokens, dim] -> [1, tokens, heads, dim]."""
        rect, (keys, values) = (group, held) if isinstance(group, Rect) else self._gathered(group, held)
        first = first_seen(rect.start, self._windows[layer])
        queries = query if rect.rows == 1 else query.view(query.shape[1], rect.rows, rect.tokens, query.shape[3]).transpose(0, 1)
        mask = self._mask(asked, rect, first, query.shape[3])
        out = self._alone(module, queries, seen(keys, rect, first), seen(values, rect, first), mask, more)
        return out if rect.rows == 1 else out.reshape(1, rect.rows * rect.tokens, *out.shape[2:])

    def _alone(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        more: dict[str, Any],
    ) -> torch.Tensor:
        """[rows, heads, tokens, dim] each -> [rows, tokens, heads, dim], as without a pool. On a card that is one call without a mask, of
        FlashAttention: of several tokens behind others, too, where `transformers` would take a kernel that knows nothing of causality."""
        tokens, keys = query.shape[2], key.shape[2]
        if self._flash and query.shape[3] <= _MOST_FLASH_DIM and mask is None and more.get("position_bias") is None:
            scale, causal, grouped = more.get("scaling"), 1 < tokens == keys, query.shape[1] != key.shape[1]
            if 1 < tokens < keys:
                return self._rows.behind.attend(query, key, value, scale).transpose(1, 2)
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=grouped).transpose(1, 2)
        return self._own(module)(module, query, key, value, mask, **more)[0]

    def _own(self, module: nn.Module) -> Attention:
        kind = type(module)
        if kind not in self._of_kind:
            eager = getattr(sys.modules[kind.__module__], "eager_attention_forward", _no_eager)
            self._of_kind[kind] = ALL_ATTENTION_FUNCTIONS.get_interface(self._implementation, eager)
        return self._of_kind[kind]

    def _mask(self, asked: MaskRequest, rect: Rect, first: int, dim: int) -> torch.Tensor | None:
        if self._flash and dim <= _MOST_FLASH_DIM and asked.is_causal:
            return None
        key = (asked, rect.tokens, rect.start, first)
        if key not in self._masks:
            self._masks[key] = asked.for_row(self._make_mask, *key[1:])
        return self._masks[key]

    def _traits(self, layer: int, asked: MaskRequest, more: Mapping[str, Any]) -> Traits | None:
        """What a kernel over page tables has to know of a layer; None where it could not compute the same."""
        known = asked.is_causal or (asked.is_window and self._kinds[layer] != "chunked_attention")
        if not known or more.get("position_bias") is not None or more.get("scaling") is None:
            return None
        return Traits(more["scaling"], self._windows[layer], more.get("softcap"), more.get("s_aux"), more.get("alibi_slopes"))

    def _write(self, held: Pair, key: torch.Tensor, value: torch.Tensor) -> None:
        """New states [1, heads, tokens, dim] to their places."""
        groups, slots = self._rows.groups, self._rows.slots
        if slots is not None and self._kernel is not None and self._kernel.write(held, (key, value), slots):
            return
        for states, new in zip(held, (key, value), strict=True):
            if slots is not None:
                states.index_copy_(0, slots, new[0].transpose(0, 1))
                continue
            for group in groups:
                if isinstance(group, Rect):
                    end = group.first + group.rows * group.tokens
                    write(states, group, new if len(groups) == 1 else new[:, :, group.first : end])
                else:
                    for at, begin, count in self._pieces(group, group.row.start):
                        states[at : at + count] = new[0, :, group.first + begin : group.first + begin + count].transpose(0, 1)

    def _gathered(self, loose: Loose, held: Pair) -> tuple[Rect, Pair]:
        """A copy of all that a row sees, in order."""
        pieces = self._pieces(loose, 0)
        keys, values = (torch.cat([states[at : at + count] for at, _, count in pieces]) for states in held)
        return Rect(loose.first, 1, len(loose.row.tokens), loose.row.start, 0, 0), (keys, values)

    def _pieces(self, loose: Loose, first: int) -> list[tuple[int, int, int]]:
        """Tokens ``first`` to the row's end: where each run of them lies in the pool, its first one counted from ``first``, and how
        many."""
        found, begin = [], 0
        for start, end in spans(loose.row.pages, first, loose.row.end, self._pool.page_tokens, 1):
            found.append((start, begin, end - start))
            begin += end - start
        return found
