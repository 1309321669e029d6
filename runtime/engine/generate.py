"""Prefill and decode over a model: the loop that a run times."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from penstock.runtime.kv.batch.contiguous import ContiguousLayer, KvBuffers, Pair
from penstock.runtime.kv.pages.prefix import Prefix


@dataclass(frozen=True)
class Sampling:
    """``temperature`` 0 is greedy; otherwise nucleus sampling with ``top_p`` from ``seed``."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Batch:
    """Prompts (token ids, any lengths) that are decoded together, and the room that they have."""

    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    capacity: int
    """Tokens of KV for each sequence."""
    chunk_tokens: int
    """Prompt tokens a sequence in one prefill pass."""
    stop_ids: frozenset[int] = frozenset()
    pad: int = 0
    limits: Sequence[int] | None = None
    """New tokens of each sequence where not all have ``max_new_tokens``, which none exceeds."""
    keep_replies: Sequence[bool] | None = None
    """Sequences that a later prompt may go on from, so that the KV of what is said are worth keeping; None: no one's."""


@dataclass
class Generation:
    """What one batch produced, with host times in seconds. ``tokens`` end before the stop token."""

    tokens: list[list[int]]
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    step_s: list[float] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    """Last-position logits of each pass on the CPU, [batch, vocab], kept only when asked for."""
    fed: list[torch.Tensor] = field(default_factory=list)
    """Input ids [batch] of each decode pass, beside ``logits`` but for the prefill's."""

    @property
    def decode_s(self) -> float:
        return sum(self.step_s)


class Sampler:
    """Picks the next token of each sequence on the device that computed the logits."""

    def __init__(self, sampling: Sampling, device: torch.device):
        self._sampling = sampling
        self._generator = torch.Generator(device).manual_seed(sampling.seed)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """[batch, vocab] -> [batch]."""
        if self._sampling.temperature == 0:
            return logits.argmax(-1)
        probs = torch.softmax(logits.float() / self._sampling.temperature, -1)
        if self._sampling.top_p < 1:
            ranked, order = probs.sort(dim=-1, descending=True, stable=True)
            ranked[ranked.cumsum(-1) - ranked >= self._sampling.top_p] = 0
            probs = torch.zeros_like(probs).scatter_(-1, order, ranked)
        return torch.multinomial(probs, 1, generator=self._generator).squeeze(-1)

    def warm_up(self, logits: torch.Tensor) -> None:
        """Load the kernels that choosing from ``logits`` takes; what is drawn later does not depend on it."""
        state = self._generator.get_state()
        self(logits)
        self._generator.set_state(state)


class Sequences:
    """One batch on its way through ``model``: left-padded ids, their mask and positions, and the KV cache.

    Costs in each pass that pass's activations, and without ``buffers`` of an earlier batch the KV cache of ``batch.capacity`` tokens a
    sequence. ``begin_pass`` is told before every pass over the weights. Between passes everything stays on ``device``: a small copy
    to it would queue behind the weights' large ones.

    With ``prefix`` the prompts' beginnings may come from VRAM, DRAM or disk. Then ``buffers`` were used for as many sequences before, and
    every layer of ``model`` keeps keys and values.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        batch: Batch,
        begin_pass: Callable[[], None],
        buffers: KvBuffers | None = None,
        prefix: Prefix | None = None,
    ):
        self._model = model
        self._batch = batch
        self._begin_pass = begin_pass
        # an index, not a count: the product of a slice of the prompt with the LM head would copy the head once a sequence
        last = torch.tensor([-1], device=device)
        self._extra = {"logits_to_keep": last} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        ids, mask = pad_left(batch.prompts, batch.pad)
        self._padded = bool((mask == 0).any())
        self._ids, self._mask = ids.to(device), mask.to(device)
        self._positions = (self._mask.cumsum(-1) - 1).clamp(min=0)
        self._buffers = buffers or KvBuffers(model.config, batch.capacity)
        self._cache = self._buffers.fresh()
        self._prefix = prefix

    def prefill(self, progress: Callable[[int, int], None] | None = None) -> torch.Tensor:
        """All prompts, or what of them is not restored, ``chunk_tokens`` a pass -> logits of the last position, [batch, vocab].

        A card computes while what was restored is still being checked; where some of it is no good, everything from there on is computed
        once more.
        """
        start = self._prefix.restore(self._batch.prompts, self._pairs) if self._prefix else 0
        logits = self._compute(start, progress)
        if self._prefix:
            sound = self._prefix.confirm()
            if sound < start:
                logits = self._compute(sound, progress)
            self._prefix.keep(self._batch.prompts)
        self._positions = self._positions[:, -1:].clone()
        return logits

    def _compute(self, start: int, progress: Callable[[int, int], None] | None) -> torch.Tensor:
        """The prompts from column ``start`` on, over what the cache holds of those before -> logits of the last position."""
        length = self._ids.shape[1]
        self._pretend(start)
        for first in range(start, length, self._batch.chunk_tokens):
            end = min(first + self._batch.chunk_tokens, length)
            logits = self._forward(self._ids[:, first:end], self._mask[:, :end], self._positions[:, first:end])
            if progress:
                progress(end, length)
        return logits

    @cached_property
    def _pairs(self) -> list[Pair]:
        """K and V of all layers: the same list as long as this lives, so that the prefix cache need not look at it at every token."""
        return self._buffers.pairs(len(self._batch.prompts))

    def put_by(self) -> None:
        """Copy some of the prompts' KV pages on their way to the disk, as many as can be written beside what comes next."""
        if self._prefix:
            self._prefix.advance(self._pairs)

    def put_rest_by(self) -> None:
        """Copy out what ``put_by`` has not come to."""
        if self._prefix:
            self._prefix.finish(self._pairs)

    def put_by_replies(self, replies: Sequence[Sequence[int]]) -> None:
        """At the end: keep the KV of ``replies`` as well, where the batch says so. The last token of each was never fed, so has none."""
        if self._prefix and self._batch.keep_replies:
            rows = zip(self._batch.prompts, replies, self._batch.keep_replies, strict=True)
            self._prefix.keep([[*prompt, *reply[:-1]] if keep else prompt for prompt, reply, keep in rows])

    def step(self, fed: torch.Tensor) -> torch.Tensor:
        """One token a sequence, [batch] on the device -> logits [batch, vocab]."""
        if self._padded:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(fed), 1)], 1)
        self._positions += 1
        return self._forward(fed[:, None], self._mask, self._positions)

    def jump_to_end(self) -> None:
        """Pretend that all but the last token of the capacity were decoded: the next step is the largest that can come."""
        last = self._batch.capacity - 1
        self._pretend(last)
        self._positions.fill_(last - 1)
        if self._padded:
            self._mask = self._mask.new_ones(len(self._mask), last)

    def _pretend(self, length: int) -> None:
        for layer in self._cache.layers:
            if isinstance(layer, ContiguousLayer):
                layer.pretend(length)

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self._begin_pass()
        out = self._model(
            input_ids=ids,
            attention_mask=mask if self._padded else None,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            **self._extra,
        )
        return out.logits[:, -1]


def pad_left(prompts: Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [batch, longest], real tokens at the right."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def generate(
    sequences: Sequences,
    batch: Batch,
    sampler: Sampler,
    finished: Callable[[list[list[int]]], list[bool]] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    keep_logits: bool = False,
) -> Generation:
    """Generate up to its limit for each prompt of ``batch``; see :func:`generating`."""
    *_, made = generating(sequences, batch, sampler, finished, progress, keep_logits)
    return made


@torch.inference_mode()
def generating(
    sequences: Sequences,
    batch: Batch,
    sampler: Sampler,
    finished: Callable[[list[list[int]]], list[bool]] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    keep_logits: bool = False,
) -> Generator[Generation, None, None]:
    """Generate up to its limit for each prompt of ``batch``; the same object, as it is after each pass that chose tokens. It may be left
    between two passes.

    ``finished`` may end sequences by what they say; ``progress(phase, done, total)`` is told of every pass. A finished sequence is
    fed padding until the others are done, as transformers does.
    """
    result = Generation([[] for _ in batch.prompts])
    limits = batch.limits or [batch.max_new_tokens] * len(batch.prompts)
    done = [False] * len(batch.prompts)
    begun = time.perf_counter()
    logits = sequences.prefill((lambda d, n: progress("prefill", d, n)) if progress else None)
    chosen = sampler(logits)
    token = chosen.cpu()
    result.prefill_s = time.perf_counter() - begun
    if keep_logits:
        result.logits.append(logits.cpu())
    for step in range(batch.max_new_tokens):
        done = [d or t in batch.stop_ids for d, t in zip(done, token.tolist(), strict=True)]
        for tokens, over, t in zip(result.tokens, done, token.tolist(), strict=True):
            if not over:
                tokens.append(t)
        done = [d or len(tokens) >= limit for d, tokens, limit in zip(done, result.tokens, limits, strict=True)]
        if finished:
            done = [a or b for a, b in zip(done, finished(result.tokens), strict=True)]
        if progress:
            progress("decode", step + 1, batch.max_new_tokens)
        if step == 0:
            result.first_token_s = time.perf_counter() - begun - result.prefill_s
        yield result
        sequences.put_by()
        if all(done):
            break
        begun = time.perf_counter()
        if any(done):
            chosen = chosen.masked_fill(torch.tensor(done, device=chosen.device), batch.pad)
        fed = chosen
        logits = sequences.step(fed)
        chosen = sampler(logits)
        token = chosen.cpu()
        result.step_s.append(time.perf_counter() - begun)
        if keep_logits:
            result.logits.append(logits.cpu())
            result.fed.append(fed)
    sequences.put_by_replies(result.tokens)
    sequences.put_rest_by()
