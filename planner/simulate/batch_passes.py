"""The passes of the batch in progress, those that were not acted out among them."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.planner.simulate.simulated_work import Passes


class BatchPasses:
    """``over`` counts the passes that are over."""

    def __init__(self) -> None:
        self.runs: Sequence[Passes] = ()
        self.over = self._skipped = 0

    def begin(self, runs: Sequence[Passes]) -> None:
        """Those of another batch come next."""
        self.runs, self.over, self._skipped = runs, 0, 0

    def skip(self, passes: int) -> None:
        """So many are over that were not acted out."""
        self.over += passes
        self._skipped += passes

    @property
    def acted(self) -> int:
        """Of those that are over, how many were acted out."""
        return self.over - self._skipped

    @property
    def prompts(self) -> int:
        """How many there are before the first decode step."""
        return sum(run.count for run in self.runs if run.each.prefill)

    def tokens(self, acted: int) -> tuple[float, float]:
        """Of a pass, by its number among those that were acted out: tokens whose KV a layer outside the device brings in, and those whose
        KV goes out."""
        at = acted + self._skipped
        for run in self.runs:
            if at < run.count:
                return run.each.kv_read, run.each.kv_new
            at -= run.count
        return 0.0, 0.0
