"""Every place of an engine, filled on other threads while passes are rehearsed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.planner.common.interrupt import uninterrupted
from penstock.runtime.engine.sides.card_side import CardSide
from penstock.runtime.engine.sides.host_side import HostSide
from penstock.runtime.memory.device import CopyDevice
from penstock.runtime.moving.filler import Arrival, Fill, Filler


class Loading:
    """Of ``host`` and, where there is one, ``card``, which ``copier`` brings bytes to."""

    def __init__(self, host: HostSide, card: CardSide | None, copier: CopyDevice | None):
        self._host, self._card, self._copier = host, card, copier
        self._filler: Filler | None = None

    def begin(self, experts: Sequence[Fill]) -> None:
        """Start; ``experts`` are to be filled beside what stays on the card."""
        self._host.begin_reading()
        if self._card is not None and self._copier is not None:
            fills = [Fill(f.layout, x.segments, dst) for f, x, dst in self._card.fixed] + [*experts]
            with uninterrupted():
                self._filler = Filler(self._host.cached, self._host.bounces, self._copier, fills)
                self._filler.start()

    def finish(self, progress: Callable[[str, int, int], None]) -> None:
        """Return when every place is filled; the cache's first layers have arrived, unless asked not to wait."""
        host, filler = self._host, self._filler
        total = sum(nbytes for _, nbytes in host.reads) + (filler.total_bytes if filler else 0)
        done = 0

        def await_(arrival: Arrival) -> None:
            while not arrival.within(0.1):
                tell()

        def tell() -> None:
            progress("load", min(done + (filler.filled_bytes if filler else 0), total), total)

        for arrival, nbytes in host.reads:
            await_(arrival)
            done += nbytes
            tell()
        if filler is not None:
            await_(filler.over)
            tell()
        for f, at in host.fixed:
            f.settle(f.layout.tensors, host.arena.slice(at, f.layout.nbytes))
        for f, layout, buffer in self._card.fixed if self._card else ():
            f.settle(layout.tensors, buffer)
        host.dram.cache.wait_preloaded(lambda arrived, layers: progress("preload", arrived, layers), host.options.warmup_layers)

    def arrived(self) -> dict[str, tuple[float, int]]:
        """What has so far, each with its busy seconds and bytes."""
        meters = {"page_cache": self._host.cached.meter, "ssd": self._host.pool.meter}
        found = {name: (meter.busy_seconds, meter.bytes) for name, meter in meters.items()}
        return found if self._filler is None else found | {"h2d": (self._filler.seconds, self._filler.filled_bytes)}

    def close(self) -> None:
        """Stop filling. Safe to call twice."""
        if self._filler is not None:
            self._filler.close()
