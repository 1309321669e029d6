"""A conversation's KV: one sequence that lives through all of its turns, so that only what is new is computed."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing

from penstock.runtime.asked.order import capacity_tokens
from penstock.runtime.engine.passes.generate import Batch, Generation, Progress
from penstock.runtime.engine.passes.sampling import Sampler
from penstock.runtime.engine.session import Session
from penstock.runtime.kv.batch.kv_sequence import KvSequence


class Talk:
    """Holds pages of ``session``'s pool until :meth:`end`. Nothing else computes with the session meanwhile."""

    def __init__(self, session: Session):
        self._session, self._stepper = session, session.engine.stepper
        self._sequence = KvSequence.of(0, [])
        self.kept_tokens = 0
        """Of the last prompt, tokens that an earlier turn had computed."""

    @property
    def capacity_tokens(self) -> int:
        """Tokens that a prompt and its reply may have together."""
        return capacity_tokens(self._session.plan)

    @property
    def used_tokens(self) -> int:
        """Tokens of the conversation so far."""
        return len(self._sequence.tokens)

    def reply(
        self, prompt: Sequence[int], new_tokens: int, sampler: Sampler, stop_ids: frozenset[int], progress: Progress
    ) -> Generator[Generation, None, None]:
        """What is said to ``prompt``, which is the conversation so far, after each pass that chose a token. It may be left between two
        passes, also by what ``progress`` raises; what was computed is kept."""
        self._turn_to(prompt)
        plan = self._session.plan
        chunk = min(plan.decisions.prefill_chunk_tokens, plan.workload.prompt_tokens)
        batch = Batch([prompt], new_tokens, chunk, stop_ids, keep_replies=[True])
        with closing(self._session.generating(batch, sampler, progress=progress, living=[self._sequence])) as made:
            said = False
            try:
                for result in made:
                    said = True
                    yield result
            finally:
                if not said and self._session.prefix is not None:
                    self.end()  # what was restored may not be checked yet

    def end(self) -> None:
        """Forget it: the pages are given back."""
        self._stepper.forget(self._sequence.number)
        self._sequence.release(self._stepper.pool.pages)
        self._sequence.tokens = []

    def _turn_to(self, prompt: Sequence[int]) -> None:
        """What is computed of ``prompt`` stays. Where an earlier turn is told otherwise now, pages from there on are given back: others
        may hold them as they are."""
        own, pool = self._sequence, self._stepper.pool.pages
        same = next((k for k, (a, b) in enumerate(zip(own.tokens, prompt, strict=False)) if a != b), min(len(own.tokens), len(prompt)))
        kept = min(own.cached, same, len(prompt) - 1)
        if kept < own.cached:
            kept = kept // pool.page_tokens * pool.page_tokens if self._stepper.goes_back else 0
            if not kept:
                self.end()
            pool.release(own.pages[kept // pool.page_tokens :])
            del own.pages[kept // pool.page_tokens :]
        own.tokens, own.prompt_tokens, own.cached = list(prompt), len(prompt), kept
        self.kept_tokens = kept
