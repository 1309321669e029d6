"""What a machine's CPU multiplies by beside a card."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.formats import Dtype, Format


@dataclass(frozen=True)
class HostRates:
    """The CPU's products of few rows while a card computes the rest: threads of the pool, rates, and what a hand-over costs."""

    threads: int
    """Pinned threads that multiply; the other cores serve readers, copies and the interpreter."""
    products: Mapping[str, Curve]
    """Format -> GB/s of stored bytes over the rows of the pass, while the link is idle. A format that is missing has no such product."""
    hop_s: float
    """Seconds from the card to the CPU and back, of one unit, beside the product."""
    beside_h2d: float
    """The share of ``products`` that is left while copies to the card take the link's whole time."""
    h2d_beside: float
    """The share of the link's rate that is left while the CPU multiplies."""
    attention_gbps: float = 0.0
    """GB/s of K and V that attention of one token a sequence reads where they lie in DRAM, while the link is idle; 0: not known, so the
    card attends to all."""
    attention_hop_s: float = 0.0
    """Seconds from the card to the CPU and back where the interpreter hands over. It does so with a layer's attention, since steps with KV
    outside VRAM are launched kernel by kernel, and with a unit where several ranks launch their steps or the SSD is read in each pass."""
    format_threads: Mapping[str, int] = field(default_factory=dict)
    """Format -> threads that multiply by it, where more pay than :attr:`threads`: arithmetic binds it and not the bus."""
    ahead_bytes: int = 0
    """That each thread reads ahead of the next unit's rows, into its core's cache, while the card computes."""
    f16_products: Mapping[str, Curve] = field(default_factory=dict)
    """:attr:`products` with inputs in F16 in place of BF16. An F16 row by stored numbers costs about what two BF16 rows do."""
    attention_beside_h2d: float = 0.0
    """:attr:`beside_h2d` of attention; 0: not known."""
    h2d_beside_attention: float = 0.0
    """:attr:`h2d_beside` while the CPU attends; 0: not known."""

    @property
    def attending(self) -> HostRates:
        """The rates of a step in which the CPU attends: what it and the link leave each other then; where that is not known, what products
        and the link do."""
        left = self.attention_beside_h2d or self.beside_h2d, self.h2d_beside_attention or self.h2d_beside
        return replace(self, beside_h2d=left[0], h2d_beside=left[1])

    def computing(self, dtype: Dtype) -> HostRates:
        """The rates of a model that computes in ``dtype``; without products where none were timed, and in F32."""
        if dtype is Dtype.bfloat16:
            return self
        return replace(self, products=self.f16_products if dtype is Dtype.float16 else {})

    def curve(self, stored: Format) -> Curve | None:
        """Rates of ``stored``, or of the first format of its family, whose name begins alike; None where there is none."""
        name = self._timed(stored)
        return None if name is None else self.products[name]

    def _timed(self, stored: Format) -> str | None:
        family = stored.name.partition("-")[0]
        alike = (name for name in self.products if name.partition("-")[0] == family)
        return stored.name if stored.name in self.products else next(alike, None)

    def threads_of(self, stored: Iterable[Format]) -> int:
        """Threads of a pool that multiplies by these formats: as many as one of them wants."""
        return max((self.format_threads.get(self._timed(one) or "", self.threads) for one in stored), default=self.threads)

    @property
    def peak_gbps(self) -> float:
        """Of the fastest format."""
        return max((curve.peak for curve in self.products.values()), default=0.0)

    def peak_of(self, stored: Iterable[Format]) -> float:
        """The same of the fastest of these; 0 where none has a product."""
        return max((curve.peak for one in stored if (curve := self.curve(one))), default=0.0)

    def most_rows(self, stored: Format) -> int:
        """The most rows whose product was timed; 0 where the format has none."""
        curve = self.curve(stored)
        return curve.points[-1][0] if curve else 0
