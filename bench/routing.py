"""Routings of a made-up model whose locality is near that of Mixtral-8x7B's decode steps, for `planner replay`.

    python bench/routing.py out=routing.jsonl.xz seed=0 prompts=24

A token's hidden state is the sum of its prompt's topic, its word and a drift from token to token; words follow each other by a sparse
chain; some tokens repeat the one before almost. The state drifts from layer to layer too, and each layer's router takes the largest of
random projections of it plus a bias. With the constants below LRU finds about 37 % of a token's experts with 2 of 8 slots and 61 % with 4,
Belady 55 % and 78 %; on real routings 37.4 and 61.4, 55.7 and 78.3 were found. Beyond these four figures nothing is fitted:
how well a layer can be foreseen follows from LAYER_MEMORY, which no measurement stands behind.
"""

from __future__ import annotations

import gzip
import lzma
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.planner.contract.experts.policies import AheadScores
from penstock.planner.contract.experts.routing import Phase, Routings
from penstock.planner.contract.experts.routing_files import routing_line

TOPIC, WORD, DRIFT = 0.1, 0.4, 0.5
"""Variance of a token's hidden state that comes from each."""

BIAS = 0.2
"""Standard deviation of the routers' biases, beside projections of 1."""

TOKEN_MEMORY, LAYER_MEMORY = 0.7, 0.93
"""Correlation of the drift with that of the token before, and of a layer's hidden state with that of the layer before."""

REPEATED, REPEAT_MEMORY = 0.12, 0.95
"""Share of tokens that repeat the one before, and the correlation of their hidden states with its own."""

WORDS, SUCCESSORS, FOLLOWED = 256, 6, 0.6
"""Words, drawn with Zipf's frequencies; those that may follow each, and how often one of them does."""


@dataclass(frozen=True)
class Size:
    """Of the made-up model and of what it generates."""

    prompts: int = 24
    prompt_tokens: int = 64
    new_tokens: int = 192
    layers: int = 32
    experts: int = 8
    top_k: int = 2
    hidden: int = 24


@dataclass(frozen=True)
class Token:
    """One token's routing: ``experts`` and ``probs`` [layers, top_k], scores of the coming layer [layers - 1, experts]."""

    prompt: int
    phase: Phase
    pos: int
    experts: np.ndarray
    probs: np.ndarray
    ahead: np.ndarray
    centroids: np.ndarray


def made_up(size: Size, seed: int) -> Iterator[Token]:
    """The tokens of all prompts, the same for the same seed. A prompt more is drawn first, for the experts' centroids."""
    random = np.random.default_rng(seed)
    model = _Model(size, random)
    centroids = model.centroids(np.array(list(model.states(random))))
    for prompt in range(size.prompts):
        for pos, states in enumerate(model.states(random)):
            logits = model.logits(states)
            experts = np.argsort(-logits, axis=1)[:, : size.top_k]
            probs = np.take_along_axis(_softmax(logits), experts, 1)
            ahead = _softmax(np.einsum("led,ld->le", model.routers[1:], states[:-1]) + model.biases[1:])
            near = np.einsum("led,ld->le", centroids[1:], states[:-1] / np.linalg.norm(states[:-1], axis=1, keepdims=True))
            phase = Phase.prefill if pos < size.prompt_tokens else Phase.decode
            yield Token(prompt, phase, pos, experts, probs, ahead, near)


def made_up_routings(size: Size, seed: int) -> Routings:
    """The same as arrays."""
    tokens = list(made_up(size, seed))
    scores = {AheadScores.router: [t.ahead for t in tokens], AheadScores.centroids: [t.centroids for t in tokens]}
    return Routings(
        np.array([t.experts for t in tokens], np.int16),
        np.array([t.prompt for t in tokens]),
        np.array([t.phase is Phase.decode for t in tokens]),
        size.experts,
        {kind: np.array(rows, np.float32) for kind, rows in scores.items()},
    )


class _Model:
    def __init__(self, size: Size, random: np.random.Generator):
        self.size = size
        self.routers = random.normal(size=(size.layers, size.experts, size.hidden)) / np.sqrt(size.hidden)
        self.biases = BIAS * random.normal(size=(size.layers, size.experts))
        self.words = random.normal(size=(WORDS, size.hidden))
        self.common = 1 / np.arange(1, WORDS + 1) / np.sum(1 / np.arange(1, WORDS + 1))
        self.follow = np.array([random.choice(WORDS, SUCCESSORS, replace=False, p=self.common) for _ in range(WORDS)])

    def logits(self, states: np.ndarray) -> np.ndarray:
        return np.einsum("led,ld->le", self.routers, states) + self.biases

    def states(self, random: np.random.Generator) -> Iterator[np.ndarray]:
        """[layers, hidden] of each token of one prompt and what follows it."""
        size = self.size
        topic, drift = random.normal(size=(2, size.hidden))
        word = random.choice(WORDS, p=self.common)
        before: np.ndarray | None = None
        for _ in range(size.prompt_tokens + size.new_tokens):
            word = random.choice(self.follow[word]) if random.random() < FOLLOWED else random.choice(WORDS, p=self.common)
            drift = _mixed(drift, random.normal(size=size.hidden), TOKEN_MEMORY)
            state = np.sqrt(TOPIC) * topic + np.sqrt(WORD) * self.words[word] + np.sqrt(DRIFT) * drift
            states = np.empty((size.layers, size.hidden))
            for layer in range(size.layers):
                states[layer] = state
                state = _mixed(state, random.normal(size=size.hidden), LAYER_MEMORY)
            if before is not None and random.random() < REPEATED:
                states = _mixed(before, states, REPEAT_MEMORY)
            before = states
            yield states

    def centroids(self, states: np.ndarray) -> np.ndarray:
        """[layers, experts, hidden]: directions of the mean of ``states`` [tokens, layers, hidden] that went to each expert."""
        used = np.zeros((len(states), self.size.layers, self.size.experts))
        chosen = np.argsort(-np.array([self.logits(s) for s in states]), axis=2)[..., : self.size.top_k]
        np.put_along_axis(used, chosen, 1, 2)
        sums = np.einsum("tle,tld->led", used, states)
        return sums / np.maximum(np.linalg.norm(sums, axis=2, keepdims=True), 1e-9)


def _mixed(old: np.ndarray, new: np.ndarray, correlation: float) -> np.ndarray:
    return correlation * old + np.sqrt(1 - correlation**2) * new


def _softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def main(arguments: list[str]) -> None:
    given: dict[str, Any] = dict(argument.split("=", 1) for argument in arguments)
    path, seed = Path(given.pop("out")), int(given.pop("seed", 0))
    size = Size(**{name: int(value) for name, value in given.items()})
    openers: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
    with openers.get(path.suffix, open)(path, "wt", encoding="utf-8") as file:
        for token in made_up(size, seed):
            print(routing_line(token.prompt, token.phase, token.pos, token.experts, token.probs, token.ahead, token.centroids), file=file)


if __name__ == "__main__":
    main(sys.argv[1:])
