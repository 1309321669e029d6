"""A reply as Anthropic's message object, and as the events that build it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from penstock.runtime.serve.dialects.call_ids import call_id, fresh_id
from penstock.runtime.serve.dialects.reply_reader import Called, Part, Reasoned

Event = dict[str, Any]
PING: Event = {"type": "ping"}


class AnthropicReply:
    """One reply. Each method gives the events that it makes; ``message`` is what they have built so far."""

    def __init__(self, model: str):
        self.message: dict[str, Any] = {
            "id": fresh_id("msg"),
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "usage": {},
        }
        self._open = False
        """Whether the last block grows."""

    def begin(self, usage: Mapping[str, Any]) -> Iterator[Event]:
        """Before all else."""
        yield {"type": "message_start", "message": self.message | {"content": [], "usage": dict(usage)}}
        yield PING

    def add(self, parts: Iterable[Part]) -> Iterator[Event]:
        """What one piece of the reply brings."""
        for part in parts:
            if isinstance(part, Called):
                yield from self._call(part)
                continue
            kind = "thinking" if isinstance(part, Reasoned) else "text"
            if not self._open or self.message["content"][-1]["type"] != kind:
                yield from self._close()
                yield from self._begin({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {"citations": None}))
            self.message["content"][-1][kind] += part.text
            yield self._delta({"type": f"{kind}_delta", kind: part.text})

    def end(self, reason: str, stop: str | None, usage: Mapping[str, Any]) -> Iterator[Event]:
        """``reason`` is Anthropic's, ``stop`` the sequence that ended it."""
        yield from self._close()
        self.message |= {"stop_reason": reason, "stop_sequence": stop, "usage": dict(usage)}
        yield {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": stop}, "usage": dict(usage)}
        yield {"type": "message_stop"}

    @property
    def reasons(self) -> bool:
        """Whether what grows is reasoning."""
        return self._open and self.message["content"][-1]["type"] == "thinking"

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        self.message["content"].append(block)
        self._open = True
        yield {"type": "content_block_start", "index": self._at, "content_block": dict(block)}

    def _close(self) -> Iterator[Event]:
        if not self._open:
            return
        if self.reasons:
            # Clients expect one; nothing is signed here, and none is asked for when a block comes back.
            yield self._delta({"type": "signature_delta", "signature": ""})
        self._open = False
        yield {"type": "content_block_stop", "index": self._at}

    def _call(self, part: Called) -> Iterator[Event]:
        yield from self._close()
        yield from self._begin({"type": "tool_use", "id": call_id("toolu"), "name": part.name, "input": {}, "caller": {"type": "direct"}})
        yield self._delta({"type": "input_json_delta", "partial_json": part.arguments})
        self.message["content"][-1]["input"] = json.loads(part.arguments)
        yield from self._close()

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._at, "delta": delta}

    @property
    def _at(self) -> int:
        return len(self.message["content"]) - 1


def anthropic_usage(prompt_tokens: int, cached_tokens: int, completion_tokens: int, reasoning_tokens: int) -> dict[str, Any]:
    """As Anthropic writes it: input tokens are those that were not cached."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "cache_creation": None,
        "output_tokens": completion_tokens,
        "output_tokens_details": {"thinking_tokens": reasoning_tokens},
        "server_tool_use": None,
        "inference_geo": None,
        "service_tier": "standard",
    }
