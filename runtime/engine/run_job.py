"""An order made ready to run: its prompts as token ids, its batches, and the plan re-predicted for exactly this work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from penstock.planner.contract.bills.cost import load_s
from penstock.planner.contract.checkpoint.gguf_checkpoint import weight_files
from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.asked.chat_template import ChatTemplate, find_template
from penstock.runtime.asked.foreseen import for_requests, random_count
from penstock.runtime.asked.order import Order, random_tokens
from penstock.runtime.asked.prompts import Vocabulary, ids_of, random_ids, read_vocabulary
from penstock.runtime.asked.run_schema import RunConfig, Validation
from penstock.runtime.asked.sampling_keys import Sampling, sampling_of
from penstock.runtime.asked.schedule import batches_of, context_tokens
from penstock.runtime.engine.passes.generate import Batch, Generation
from penstock.runtime.memory.budget import Budget
from penstock.runtime.memory.free_memory import Free, refuse_if_short, refuse_to_compare
from penstock.runtime.reading.cached import PageCache

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """``ids`` are those of its own prompt; of a conversation's turn, all of the turns before come first."""

    ids: Ids
    max_new_tokens: int
    conversation: str | None = None


@dataclass(frozen=True)
class Served:
    """One batch and what came of it. ``members`` are the numbers of its requests, ``cut`` the tokens that each one's prompt lost at its
    head to fit."""

    members: tuple[int, ...]
    cut: tuple[int, ...]
    batch: Batch
    made: Generation


@dataclass(frozen=True)
class Job:
    """A plan that was found fit to run, re-predicted for exactly the work that it was given."""

    plan: Plan
    checkpoint: Path
    device: torch.device
    vocabulary: Vocabulary
    sampling: Sampling
    requests: list[Request]
    max_new_tokens: int
    """The most that a request asks for."""
    capacity_tokens: int
    """Tokens of KV for each sequence."""
    notes: tuple[str, ...] = ()
    """How prompts were read."""

    def play(self, run: Callable[[Batch], Generation]) -> Iterator[Served]:
        """Every request once: ``run`` is given one batch after the other, turns with their whole conversation so far."""
        spoken: dict[str, Ids] = {}
        for members in self._schedule():
            requests = [self.requests[k] for k in members]
            contexts = [(() if r.conversation is None else spoken.get(r.conversation, ())) + r.ids for r in requests]
            batch = self._batch(requests, contexts)
            served = Served(members, tuple(max(0, len(c) - self._limit) for c in contexts), batch, run(batch))
            for request, context, reply in zip(requests, contexts, served.made.tokens, strict=True):
                if request.conversation is not None:
                    spoken[request.conversation] = context + tuple(reply)
            yield served

    @property
    def first(self) -> Batch:
        """What :meth:`play` begins with; no batch has more sequences."""
        requests = [self.requests[k] for k in self._schedule()[0]]
        return self._batch(requests, [r.ids for r in requests])

    @property
    def largest(self) -> Batch:
        """As many sequences as ever run together, as long as any may become; of no meaning."""
        first = self.first
        return replace(first, prompts=[(0,) * self.plan.workload.prompt_tokens] * len(first.prompts))

    @property
    def _limit(self) -> int:
        return self.capacity_tokens - self.max_new_tokens

    def _schedule(self) -> list[tuple[int, ...]]:
        return batches_of([r.conversation for r in self.requests], self.plan.decisions.batch)

    def _batch(self, requests: Sequence[Request], contexts: Sequence[Ids]) -> Batch:
        return Batch(
            prompts=[c[-self._limit :] for c in contexts],
            max_new_tokens=max(r.max_new_tokens for r in requests),
            chunk_tokens=self.plan.decisions.prefill_chunk_tokens,
            stop_ids=self.vocabulary.stop_ids,
            limits=[r.max_new_tokens for r in requests],
            keep_replies=[r.conversation is not None for r in requests],
        )


def prepare(cfg: RunConfig, order: Order, device: torch.device, free: Free, imports_s: float | None = None) -> Job:
    """Read the tokenizer and the prompts. ``imports_s``: what imports took, where that is known. UserError when they do not fit, or more
    memory is needed than was free."""
    plan, limit = order.plan, order.prompt_limit
    vocabulary = read_vocabulary(order.checkpoint, plan.model.vocab)
    sampling = sampling_of(cfg, vocabulary.generation)
    template = find_template(vocabulary.tokenizer, cfg.template)
    if order.requests is not None:
        prompts = ids_of(order.requests, vocabulary, template)
        requests = [Request(ids, r.max_new_tokens, r.conversation) for ids, r in zip(prompts, order.requests, strict=True)]
    else:
        prompts = random_ids(random_count(cfg, plan), random_tokens(cfg, plan), vocabulary.size, cfg.seed)
        requests = [Request(ids, order.new_tokens) for ids in prompts]
    if cfg.clip is None:
        _refuse_what_does_not_fit(cfg, order, requests)
    longest = min(limit, max(_contexts(requests, [r.max_new_tokens for r in requests])))
    plan = for_requests(plan, len(requests), longest, order.new_tokens, order.batch)
    refuse_if_short(Budget.of(plan.of_rank(0)), free)
    plan = _as_it_starts(plan, order.checkpoint, imports_s)
    if cfg.validate is Validation.full:
        refuse_to_compare(plan.model, free)
    return Job(
        plan,
        order.checkpoint,
        device,
        vocabulary,
        sampling,
        requests,
        order.new_tokens,
        order.capacity_tokens,
        said_how(order, cfg, template),
    )


def _contexts(requests: Sequence[Request], replies: Sequence[int]) -> list[int]:
    return context_tokens([r.conversation for r in requests], [len(r.ids) for r in requests], replies)


def _refuse_what_does_not_fit(cfg: RunConfig, order: Order, requests: Sequence[Request]) -> None:
    """UserError for a prompt that, with its reply at its longest, exceeds the KV that the plan holds."""
    if order.requests is None:
        return  # refused before any were made
    contexts = _contexts(requests, [r.max_new_tokens for r in requests])
    over = next((k for k, tokens in enumerate(contexts) if tokens > order.prompt_limit), None)
    if over is not None:
        raise order.no_room(cfg.plan, order.requests[over].where, contexts[over], max(contexts))


def said_how(order: Order, cfg: RunConfig, template: ChatTemplate | None) -> tuple[str, ...]:
    """One line on what became of texts that a person says."""
    if cfg.template is False or not any(r.said for r in order.requests or ()):
        return ()
    if template is None:
        return ("the prompt is continued as raw text: the checkpoint has no chat template",)
    return ("the prompt goes through the model's chat template; template=false continues it as raw text",)


def _as_it_starts(plan: Plan, checkpoint: Path, imports_s: float | None) -> Plan:
    """``plan`` with a start predicted for the page cache as it is, and for a machine that imports at this one's pace."""
    with closing(PageCache()) as cache:
        cached = cache.share(weight_files(checkpoint))
    own = [plan.of_rank(rank) for rank in range(plan.ranks.count)]
    again = max(load_s(p.hardware, p.model, p.workload, p.decisions, cached, imports_s) for p in own)
    return replace(plan, prediction=replace(plan.prediction, load_s=again))
