"""Prefill and decode over a streamed model: the loop that a run times."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from runtime.kv import make_cache


@dataclass(frozen=True)
class Sampling:
    """``temperature`` 0 is greedy; otherwise nucleus sampling with ``top_p`` from ``seed``."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass
class Generation:
    """What one batch produced, with host times in seconds. ``tokens`` end before the stop token."""

    tokens: list[list[int]]
    prefill_s: float
    first_token_s: float
    step_s: list[float]
    logits: list[torch.Tensor] = field(default_factory=list)
    """Last-position logits of each pass on the CPU, [batch, vocab], kept only when asked for."""
    fed: list[torch.Tensor] = field(default_factory=list)
    """Input ids of each pass, beside ``logits``."""

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
            ranked, order = probs.sort(-1, descending=True)
            ranked[ranked.cumsum(-1) - ranked >= self._sampling.top_p] = 0
            probs = torch.zeros_like(probs).scatter_(-1, order, ranked)
        return torch.multinomial(probs, 1, generator=self._generator).squeeze(-1)


class Forward:
    """One pass of the model over new tokens; embedding rows are looked up where the table lies."""

    def __init__(self, model: nn.Module, device: torch.device, begin_pass: Callable[[], None]):
        self._model = model
        self._device = device
        self._begin_pass = begin_pass
        self._embed = model.get_input_embeddings()
        self._embed_device = self._embed.weight.device
        accepted = inspect.signature(model.forward).parameters
        self._extra = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    def __call__(self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor, cache) -> torch.Tensor:
        """ids, positions [batch, tokens]; mask [batch, all tokens so far] or None when nothing is padded -> logits [batch, vocab]."""
        self._begin_pass()
        if self._embed_device == self._device:
            inputs = {"input_ids": ids.to(self._device)}
        else:
            inputs = {"inputs_embeds": self._embed(ids.to(self._embed_device)).to(self._device, non_blocking=True)}
        out = self._model(
            **inputs,
            attention_mask=None if mask is None else mask.to(self._device),
            position_ids=positions.to(self._device),
            past_key_values=cache,
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


@torch.inference_mode()
def generate(
    model: nn.Module,
    device: torch.device,
    begin_pass: Callable[[], None],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    capacity: int,
    chunk_tokens: int,
    sampler: Sampler,
    stop_ids: frozenset[int],
    pad: int,
    finished: Callable[[list[list[int]]], list[bool]] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    keep_logits: bool = False,
) -> Generation:
    """Generate for one batch of prompts (lists of token ids, any lengths).

    ``finished`` may end sequences by their text; ``progress(phase, done, total)`` is told of every pass. Memory: the KV cache of
    ``capacity`` tokens a sequence and one pass's activations.
    """
    ids, mask = pad_left(prompts, pad)
    padded = bool((mask == 0).any())
    batch, length = ids.shape
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = make_cache(model.config, capacity)
    forward = Forward(model, device, begin_pass)
    done = [False] * batch
    result = Generation([[] for _ in range(batch)], 0.0, 0.0, [])

    begun = time.perf_counter()
    for start in range(0, length, chunk_tokens):
        end = min(start + chunk_tokens, length)
        logits = forward(ids[:, start:end], mask[:, :end] if padded else None, positions[:, start:end], cache)
        if progress:
            progress("prefill", end, length)
    token = sampler(logits).cpu()
    result.prefill_s = time.perf_counter() - begun
    _keep(result, keep_logits, logits, ids)
    result.first_token_s = time.perf_counter() - begun - result.prefill_s

    for step in range(max_new_tokens):
        for i, t in enumerate(token.tolist()):
            if not done[i]:
                done[i] = t in stop_ids
                if not done[i]:
                    result.tokens[i].append(t)
        if finished:
            done = [a or b for a, b in zip(done, finished(result.tokens), strict=True)]
        if progress:
            progress("decode", step + 1, max_new_tokens)
        if all(done) or step + 1 == max_new_tokens:
            break
        begun = time.perf_counter()
        fed = torch.where(torch.tensor(done), pad, token)[:, None]
        mask = torch.cat([mask, mask.new_ones(batch, 1)], 1)
        logits = forward(fed, mask if padded else None, mask.sum(-1, keepdim=True) - 1, cache)
        token = sampler(logits).cpu()
        result.step_s.append(time.perf_counter() - begun)
        _keep(result, keep_logits, logits, fed)
    return result


def _keep(result: Generation, keep: bool, logits: torch.Tensor, fed: torch.Tensor) -> None:
    if keep:
        result.logits.append(logits.cpu())
        result.fed.append(fed)
