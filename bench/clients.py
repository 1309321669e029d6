"""Clients of an OpenAI-compatible server: so many at once, each on a connection that it keeps, or arrivals at random.

    python bench/clients.py url=http://127.0.0.1:8000 clients=8 requests=64 prompt_tokens=512 new_tokens=128   # closed loop
    python bench/clients.py url=http://127.0.0.1:8000 rate=1.5 requests=200 out=poisson.json                   # Poisson

Other keys: `path` (/v1/completions, or /v1/chat/completions with words for token ids), `prompts` (a file, one prompt a line), `model`,
`key`, `seed`, `vocab`, `dispersed` (prompts from half to one and a half times their length). Prints a line a figure and ends in JSON.

A reply's figures, as guidellm defines them (`bench/peers/guidellm_beside.py` holds both together):

    TTFT = first event with text - before the request was sent, and the connection opened where there is none
    time between tokens = (last event - first event) / (tokens - 1)
    tokens/s = tokens of whole replies / (end of the last - begin of the first)

`steady_tokens_s` counts a closed loop's tokens only while every client has a request: from the moment each has its first token until the
first finds no further one.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.keys import given_of  # noqa: E402
from bench.sse import Address, Kept, Reply, ask, fetch  # noqa: E402
from penstock.planner.common.errors import UserError  # noqa: E402

KEYS = (
    "url", "clients", "rate", "requests", "prompt_tokens", "new_tokens", "path", "prompts", "model", "key", "seed", "vocab", "dispersed",
    "out",
)  # fmt: skip
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FIRST_ID = 100
"""Below it lie special tokens, of most vocabularies."""
Body = Mapping[str, Any]


@dataclass(frozen=True)
class Spread:
    """Of one figure over all replies."""

    mean: float
    p50: float
    p90: float
    p99: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        ordered = sorted(values) or [0.0]
        return Spread(sum(ordered) / len(ordered), *(percentile(ordered, share) for share in (0.5, 0.9, 0.99)))


def percentile(ordered: Sequence[float], share: float) -> float:
    """Between the two nearest values, by the distance from each."""
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


@dataclass(frozen=True)
class Figures:
    """Of a load. Seconds, of replies that came to their end without an error."""

    requests: int
    failed: int
    seconds: float
    tokens: int
    tokens_s: float
    steady_tokens_s: float | None
    ttft_s: Spread
    between_s: Spread
    gap_s: Spread
    """From one event to the next, of all replies together."""
    whole_s: Spread
    errors: tuple[str, ...] = ()

    @staticmethod
    def of(replies: Sequence[Reply], clients: int | None = None) -> Figures:
        good = [reply for reply in replies if reply.answered and reply.times_s]
        bad = [reply for reply in replies if not (reply.answered and reply.times_s)]
        seconds = max((r.ended_s for r in good), default=0.0) - min((r.begun_s for r in good), default=0.0)
        tokens = sum(reply.tokens for reply in good)
        gaps = [b - a for reply in good for a, b in zip(reply.times_s, reply.times_s[1:], strict=False)]
        said = tuple(sorted({str(reply.error or reply.status) for reply in bad}))[:5]
        return Figures(
            len(replies), len(bad), seconds, tokens, tokens / seconds if seconds else 0.0, steady(good, clients) if clients else None,
            Spread.of([r.ttft_s for r in good]), Spread.of([r.between_s for r in good if r.tokens > 1]), Spread.of(gaps),
            Spread.of([r.ended_s - r.begun_s for r in good]), said,
        )  # fmt: skip


def steady(replies: Sequence[Reply], clients: int) -> float | None:
    """Tokens a second while all ``clients`` have a request; None where that is never so. An event counts for its share of the tokens."""
    if len(replies) < 2 * clients:
        return None
    since = max(reply.times_s[0] for reply in sorted(replies, key=lambda r: r.begun_s)[:clients])
    until = sorted(reply.ended_s for reply in replies)[-clients]
    inside = sum(reply.tokens * sum(since < t <= until for t in reply.times_s) / len(reply.times_s) for reply in replies)
    return inside / (until - since) if until > since else None


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """Seconds from the start at which each request arrives; the same for the same ``seed``, so that a simulation plays the very ones."""
    draw, at, arrivals = random.Random(f"arrivals {seed}"), 0.0, []
    for _ in range(count):
        at += draw.expovariate(rate)
        arrivals.append(at)
    return arrivals


def token_prompt(tokens: int, vocab: int, seed: str) -> list[int]:
    """Random ids, no two prompts alike."""
    draw = random.Random(seed)
    return [draw.randrange(min(FIRST_ID, vocab - 1), vocab) for _ in range(tokens)]


def body_of(path: str, prompt: object, new_tokens: int, model: str, **more: object) -> dict[str, Any]:
    """A streamed request for exactly ``new_tokens`` tokens, greedy."""
    said = {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
    asked = {"model": model, **said, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    return asked | {"stream_options": {"include_usage": True}} | more


async def closed_loop(address: Address, path: str, bodies: Sequence[Body], clients: int) -> list[Reply]:
    """``clients`` at once, each with its next request as soon as it has the reply to the last, on the same connection."""
    todo, replies = iter(bodies), list[Reply]()

    async def one() -> None:
        kept = Kept()
        for body in todo:
            replies.append(await ask(address, path, body, kept=kept))
        kept.close()

    await asyncio.gather(*(one() for _ in range(clients)))
    return replies


async def arriving(address: Address, path: str, bodies: Sequence[Body], arrivals_s: Sequence[float]) -> list[Reply]:
    """Each at its time, whatever became of those before it. A reply's TTFT counts from that time on."""
    start = time.perf_counter()

    async def one(body: Body, due_s: float) -> Reply:
        await asyncio.sleep(start + due_s - time.perf_counter())
        reply = await ask(address, path, body)
        reply.begun_s = start + due_s
        return reply

    return list(await asyncio.gather(*map(one, bodies, arrivals_s)))


async def model_name(address: Address) -> str:
    """The first that the server names."""
    _, content = await fetch(address, "/v1/models")
    return str(json.loads(content)["data"][0]["id"])


def show(figures: Figures) -> str:
    """A line for each figure."""
    lines = [f"{figures.requests} requests, {figures.failed} failed, {figures.tokens} tokens in {figures.seconds:.2f} s"]
    rest = "" if figures.steady_tokens_s is None else f", {figures.steady_tokens_s:.2f} while all clients ask"
    lines.append(f"tokens/s  {figures.tokens_s:.2f}{rest}")
    for name, spread in (("TTFT", figures.ttft_s), ("between", figures.between_s), ("gap", figures.gap_s), ("whole", figures.whole_s)):
        lines.append(f"{name:8} " + "  ".join(f"{key} {value * 1e3:9.2f} ms" for key, value in asdict(spread).items()))
    return "\n".join(lines + [f"error     {error}" for error in figures.errors])


def bodies_of(given: Mapping[str, str], path: str, model: str) -> list[dict[str, Any]]:
    """The requests that a command asks for."""
    count, new, seed = int(given.get("requests", "64")), int(given.get("new_tokens", "128")), given.get("seed", "0")
    if "prompts" in given:
        lines = [line for line in Path(given["prompts"]).read_text(encoding="utf-8").splitlines() if line]
        return [body_of(path, lines[k % len(lines)], new, model) for k in range(count)]
    tokens, vocab, draw = int(given.get("prompt_tokens", "512")), int(given.get("vocab", "1000")), random.Random(seed)
    lengths = [draw.randint(tokens // 2, tokens * 3 // 2) if given.get("dispersed") == "true" else tokens for _ in range(count)]
    prompts: list[object] = [token_prompt(length, vocab, f"{seed} {k}") for k, length in enumerate(lengths)]
    if path == CHAT:
        prompts = [" ".join(map(str, ids)) for ids in prompts if isinstance(ids, list)]
    return [body_of(path, prompt, new, model) for prompt in prompts]


async def run(given: Mapping[str, str]) -> Figures:
    address, path = Address.of(given.get("url", "http://127.0.0.1:8000"), given.get("key")), given.get("path", COMPLETIONS)
    bodies = bodies_of(given, path, given.get("model") or await model_name(address))
    if "rate" in given:
        return Figures.of(await arriving(address, path, bodies, poisson(float(given["rate"]), len(bodies), int(given.get("seed", "0")))))
    clients = int(given.get("clients", "1"))
    return Figures.of(await closed_loop(address, path, bodies, clients), clients)


def main() -> None:
    try:
        given = given_of(sys.argv[1:], KEYS)
        figures = asyncio.run(run(given))
    except (UserError, OSError) as error:
        raise SystemExit(str(error)) from None
    print(show(figures))
    print(json.dumps(asdict(figures)))
    if "out" in given:
        Path(given["out"]).write_text(json.dumps(asdict(figures), indent=1) + "\n")


if __name__ == "__main__":
    main()
