"""What front and motor say. ``said`` makes a JSON object of a message, ``heard`` a message of that object. Both ends are of one version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

Reason = Literal["stop", "length", "abort", "error"]
TopLogprobs = tuple[float, list[int], list[float]]
"""Of one token that was chosen: its own logprob, the likeliest tokens, their logprobs."""


@dataclass(frozen=True)
class Open:
    """Front to motor, first of all: load this."""

    plan: str
    """Path of the plan file."""
    checkpoint: str | None = None
    """In place of the plan's."""
    adapter: str | None = None
    kv: dict[str, Any] = field(default_factory=dict)
    """Keys of ``ReuseConfig``."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Keys of ``EngineConfig``."""
    queue: int | None = None
    """Requests that wait at most, in place of the plan's."""
    speculate: str | None = None
    """Who drafts; None: as the plan has it."""
    draft: str | None = None
    """Checkpoint of the model that drafts; None: the plan's, where it has one."""
    grammars: bool = True
    """Whether ``Submit.grammar`` may come: the checkpoint's tokenizer is then read by the motor, too."""


@dataclass(frozen=True)
class Sampled:
    """How a request's tokens are chosen. None: as the checkpoint's generation config says, else transformers' default."""

    temperature: float | None = None
    """0 is greedy."""
    top_k: int | None = None
    """0 keeps all."""
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    """None: one that nobody knows."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Token id -> added to its logit."""


@dataclass(frozen=True)
class Submit:
    """Front to motor: answer ``prompt``, ``n`` times."""

    id: int
    """The front's number of the request; never used twice."""
    prompt: list[int]
    new_tokens: int
    """At most; 0 asks for ``prompt_logprobs`` alone."""
    sampling: Sampled = Sampled()
    stop_ids: list[int] = field(default_factory=list)
    """Token ids that end a reply, which they are no part of."""
    min_tokens: int = 0
    """Before so many tokens no stop id is chosen."""
    ignore_eos: bool = False
    """``stop_ids`` are said like other tokens and end nothing."""
    logprobs: int | None = None
    """So many likeliest tokens beside each token that was chosen; 0: its own logprob alone; None: none."""
    prompt_logprobs: int | None = None
    """The same of each of the prompt's tokens."""
    grammar: str | None = None
    """llguidance's grammar as JSON; what is said keeps to it."""
    salt: str = ""
    """Requests of one salt share KV pages; no others do. The front makes it of API key and ``cache_salt``."""
    n: int = 1


@dataclass(frozen=True)
class Cancel:
    """Front to motor: nobody waits for this any more."""

    id: int
    index: int | None = None
    """Of the n replies; None: all."""


@dataclass(frozen=True)
class Drain:
    """Front to motor: take nothing new, finish what lives, then say :class:`Stopped` and end."""


@dataclass(frozen=True)
class Loading:
    """Motor to front, until :class:`Ready`."""

    phase: str
    done: int
    total: int


@dataclass(frozen=True)
class EngineInfo:
    """What a motor serves."""

    model: str
    checkpoint: str
    vocab: int
    capacity_tokens: int
    """Tokens that a prompt and its reply have together, at most."""
    limits: dict[str, int]
    """``ServeLimits`` by field."""
    predicted: dict[str, Any]
    """What the plan says of seconds, tokens/s and bytes."""
    longest_pass_s: float
    """Of one that carries all it can, by the plan."""
    version: str


@dataclass(frozen=True)
class Ready:
    """Motor to front: requests may come."""

    info: EngineInfo


@dataclass(frozen=True)
class Failed:
    """Motor to front, before it ends: it cannot serve. ``remedied`` by the user alone, so that trying again is of no use."""

    message: str
    remedied: bool


@dataclass(frozen=True)
class Began:
    """Motor to front: a request's prompt is being computed. Once, also where it is given up and computed again later."""

    id: int
    prompt_tokens: int
    cached_tokens: int
    """Of these, tokens that were shared or restored."""


@dataclass(frozen=True)
class PromptLogprobs:
    """Motor to front: of some tokens of a prompt, in order, from the second on; the first one has none."""

    id: int
    rows: list[tuple[int, float, tuple[list[int], list[float]]]]
    """(token, logprob, (likeliest tokens, their logprobs))"""


class Chosen(NamedTuple):
    """What reply ``reply`` of request ``id`` goes on with, of one pass. Stop tokens are not among them."""

    id: int
    reply: int
    """Of the request's n, from 0 on."""
    tokens: list[int]
    logprobs: list[TopLogprobs] | None = None
    at: float | None = None
    """When they were known, by ``time.monotonic``, which all processes of a host share."""


@dataclass(frozen=True)
class Pass:
    """Motor to front: what one pass gave. One message for all replies: a message costs the front 20 us."""

    chosen: list[Chosen]


@dataclass(frozen=True)
class Over:
    """Motor to front: reply ``index`` is over."""

    id: int
    index: int
    reason: Reason
    stop_id: int | None = None
    """What ended it."""
    message: str | None = None
    """Of an error."""
    logprobs: TopLogprobs | None = None
    """Of ``stop_id``, where they were asked for."""


@dataclass(frozen=True)
class Refused:
    """Motor to front: a request is not taken, none of its replies."""

    id: int
    kind: str
    """``queue_full``, ``too_long``, ``bad_grammar``, ``bad_sampling``, ``bad_prompt`` or ``draining``."""
    message: str


@dataclass(frozen=True)
class Vital:
    """Motor to front, every second or every pass, whichever is rarer; see ``motor/vitals.py`` for the keys."""

    stats: dict[str, Any]


@dataclass(frozen=True)
class Stopped:
    """Motor to front, last of all."""

    report: dict[str, Any]
    """Predicted beside measured, over its whole life."""


Message = (
    Open | Submit | Cancel | Drain | Loading | Ready | Failed | Began | PromptLogprobs | Pass | Over | Refused | Vital | Stopped
)  # fmt: skip
KINDS: Mapping[str, type[Any]] = MappingProxyType({
    cls.__name__: cls
    for cls in (Open, Submit, Cancel, Drain, Loading, Ready, Failed, Began, PromptLogprobs, Pass, Over, Refused, Vital, Stopped)
})  # fmt: skip


def said(message: Message) -> dict[str, Any]:
    """``message`` as a JSON object; its lists are not copied."""
    found = {"said": type(message).__name__} | vars(message)
    return found | {name: vars(found[name]) for name in ("sampling", "info") if name in found}


def together(words: Iterable[Message | Chosen]) -> list[Message]:
    """The same as messages: all that was chosen in one, where the first of it was said, each reply's tokens together."""
    found: list[Message] = []
    chosen: dict[tuple[int, int], Chosen] = {}
    told: list[Chosen] = []
    for word in words:
        if not isinstance(word, Chosen):
            found.append(word)
            continue
        if not chosen:
            found.append(Pass(told))
        before = chosen.get(word[:2])
        chosen[word[:2]] = word if before is None else _more(before, word)
    told += chosen.values()
    return found


def _more(before: Chosen, word: Chosen) -> Chosen:
    logprobs = None if before.logprobs is None or word.logprobs is None else before.logprobs + word.logprobs
    return before._replace(tokens=before.tokens + word.tokens, logprobs=logprobs)


def heard(data: Mapping[str, Any]) -> Any:
    """The message that ``said`` made ``data`` of. ValueError for anything else."""
    rest = dict(data)
    cls = KINDS.get(rest.pop("said", ""), _none)
    for name, make in _INNER.items():
        if name in rest:
            rest[name] = make(rest[name])
    try:
        return cls(**rest)
    except TypeError as error:
        raise ValueError(f"not a message: {str(data)[:80]}") from error


def _none(**fields: Any) -> Any:
    raise TypeError("no such message")


def _sampled(data: Mapping[str, Any]) -> Sampled:
    bias = {int(token): float(added) for token, added in data.get("logit_bias", {}).items()}
    return Sampled(**dict(data) | {"logit_bias": bias})


_INNER: Mapping[str, Callable[[Any], Any]] = MappingProxyType({
    "sampling": _sampled, "info": lambda data: EngineInfo(**data), "chosen": lambda rows: [Chosen(*row) for row in rows],
})  # fmt: skip
"""Fields that are messages' parts of their own."""
