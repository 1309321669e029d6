"""Log probabilities by the model's own logits, before anything of sampling: of tokens that were chosen, and of a prompt's own."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.sizes import OVERHEADS, activation_bytes
from penstock.runtime.serve.wire.messages import TopLogprobs

DRAWING_BYTES = 56
"""Of each logit of a row that is drawn: scores, softmax and their sum in float32, and a sort of them with its int64 indices, twice."""
LEAST = -9999.0
"""In place of minus infinity, which JSON has no word for."""


def likeliest(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> list[TopLogprobs]:
    """Of each row of ``logits`` [rows, vocab]: the logprob of its one of ``tokens`` [rows], and the ``count`` likeliest tokens with theirs.
    Costs 8 bytes a logit meanwhile."""
    scores = logits.float().log_softmax(-1).nan_to_num_(nan=LEAST, neginf=LEAST)
    own = scores.gather(1, tokens[:, None])
    top, ids = scores.topk(min(count, scores.shape[1]))
    values, names = torch.cat([own, top], 1).tolist(), ids.tolist()
    return [(of[0], named, of[1:]) for of, named in zip(values, names, strict=True)]


def in_blocks(logits: torch.Tensor, tokens: torch.Tensor, count: int, block_rows: int) -> list[TopLogprobs]:
    """``likeliest`` in blocks of ``block_rows``."""
    return [
        each for some, own in zip(logits.split(block_rows), tokens.split(block_rows), strict=True) for each in likeliest(some, own, count)
    ]


def wanted_rows(plan: Plan, pass_tokens: int) -> int:
    """Logits that a pass over ``pass_tokens`` may give at once: as many as fit where the layers' activations lay, beside the hidden states
    of the pass, what the LM head makes of one of its blocks, and a block of rows in float32. At least those of the rows that decode."""
    model, decided = plan.model, plan.decisions
    dtype = model.compute_dtype.nbytes
    room = activation_bytes(model, plan.workload, decided.batch, decided.prefill_chunk_tokens)
    hidden = 3 * pass_tokens * model.hidden * dtype
    block = 2 * block_rows(plan) * model.vocab * OVERHEADS.float32_bytes
    each = model.vocab * dtype + -(-model.vocab // max(1, decided.weights.head_blocks)) * dtype
    return max(decided.batch, (room - hidden - block) // each)


def block_rows(plan: Plan) -> int:
    """Rows of logits that are taken to float32 at once: two copies of them are what the plan counts for its rows."""
    return max(1, plan.decisions.batch // 2)


def drawn_rows(plan: Plan) -> int:
    """Rows that are drawn from all of the vocabulary at once: as many as fit in half of where the layers' activations lay, beside all
    logits. The other half is for holes."""
    model, decided = plan.model, plan.decisions
    room = activation_bytes(model, plan.workload, decided.batch, decided.prefill_chunk_tokens)
    logits = decided.batch * model.vocab * (model.compute_dtype.nbytes + OVERHEADS.float32_bytes)
    return max(1, (room - logits) // 2 // (DRAWING_BYTES * model.vocab))


def cut_step(counts: Sequence[tuple[int, int]], most: int, whole: Collection[int] = ()) -> list[list[tuple[int, int, int]]]:
    """A step whose rows have (tokens, wanted), cut into passes that each want ``most`` at most: per pass, (row, tokens, wanted).

    Rows that want one logit or none, and those in ``whole``, come first, all in the first pass. The tokens of the others are cut where a
    pass is full.
    """
    passes: list[list[tuple[int, int, int]]] = [[(i, *row) for i, row in enumerate(counts) if row[1] <= 1 or i in whole]]
    room = most - sum(wanted for _, _, wanted in passes[0])
    for i, (tokens, wanted) in enumerate(counts):
        if wanted <= 1 or i in whole:
            continue
        before = tokens - wanted
        while wanted:
            if room < 1:
                passes.append([])
                room = most
            some = min(wanted, room)
            passes[-1].append((i, before + some, some))
            before, wanted, room = 0, wanted - some, room - some
    return passes
