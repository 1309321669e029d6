"""How a pass is cut up for a kernel over page tables, and so what that is compiled for. Imports no Triton."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.runtime.kv.attention.page_tables import PageTables

_LEAST_KEYS = 256
"""Of a split, at least: with fewer, merging costs more than the splits save."""
_LEAST = 16
"""Lines and elements of a product, at least."""


@dataclass(frozen=True)
class KernelShape:
    """A line is a token of a row and one of the query heads that share a K head."""

    wide: int
    """Elements of a head's K, as products take them; a power of 2, as all below but ``blocks`` and ``splits``."""
    value_wide: int
    lines: int
    """Of one program."""
    keys: int
    """Of one product."""
    blocks: int
    """Programs for the lines of the longest row and one K head."""
    splits: int
    """Parts that each row's keys are cut into, where rows and heads are fewer than the card's processors."""

    @classmethod
    def of(cls, tables: PageTables, heads: int, group: int, dims: tuple[int, int], window: int | None, processors: int) -> KernelShape:
        """Of ``heads`` K heads with ``group`` query heads each. ``dims``: of K and of V. ``window``: tokens that a token sees."""
        wide, value_wide = (max(_LEAST, _power(dim)) for dim in dims)
        widest, lines = max(wide, value_wide), tables.most_tokens * group
        each = _lines(lines, widest)
        blocks = -(-lines // each)
        seen = min(tables.most_keys, (window or tables.most_keys) + tables.most_tokens)
        splits = max(1, min(2 * processors // (blocks * len(tables.counts) * heads), seen // _LEAST_KEYS))
        return cls(wide, value_wide, each, max(32, _most_lines(widest)), blocks, splits)

    def partial_sums(self, rows: int, tokens: int, query_heads: int) -> int:
        """Sums that splits leave to be merged, of ``rows`` with ``tokens`` at most; 0 where no row's keys are cut. Never more than lines of
        one program * 2 * processors: the longer the rows, the fewer the splits."""
        return 0 if self.whole else rows * tokens * query_heads * self.splits

    @property
    def whole(self) -> bool:
        """Whether no row's keys are cut."""
        return self.splits == 1


def telling_tokens(group: int, dims: tuple[int, int]) -> tuple[int, ...]:
    """Of a row: the least of each number of lines that a kernel is compiled for."""
    widest = max(_LEAST, *map(_power, dims))
    found = {_lines(tokens * group, widest): tokens for tokens in (64, 32, 16, 8, 4, 2, 1)}
    return tuple(found.values())


def _most_lines(widest: int) -> int:
    """Whose operands fit the processor's own memory."""
    return 64 if widest <= 128 else 32 if widest <= 256 else _LEAST


def _lines(lines: int, widest: int) -> int:
    return max(_LEAST, min(_most_lines(widest), _power(lines)))


def _power(number: int) -> int:
    """Of 2, the next one."""
    return 1 << (number - 1).bit_length()
