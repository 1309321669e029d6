"""Tokens one by one, as logprobs tell them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from penstock.runtime.asked.prompts import Vocabulary
from penstock.runtime.serve.wire.messages import TopLogprobs

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
"""What SentencePiece writes for a space."""


def byte_letters() -> dict[str, int]:
    """The letter of each byte in byte-level vocabularies, as GPT-2 has them: printable ones stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


class TokenTexts:
    """The text and the bytes of single tokens."""

    def __init__(self, vocabulary: Vocabulary):
        self._tokenizer = vocabulary.tokenizer
        self._known: dict[int, bytes] = {}

    def raw(self, token: int) -> bytes:
        """What ``token`` adds to a text; for a special one its name."""
        if token not in self._known:
            self._known[token] = self._read(token)
        return self._known[token]

    def text(self, token: int) -> str:
        """The same as text. What is no whole character reads ``bytes:\\xe2\\x9c``, as OpenAI writes it, so different tokens differ."""
        raw = self.raw(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def logprobs(self, tokens: Sequence[int], told: Sequence[TopLogprobs]) -> list[dict[str, Any]]:
        """Of ``tokens``, as OpenAI's conversations write them."""
        return [
            self._one(token, logprob) | {"top_logprobs": [self._one(*other) for other in zip(top, values, strict=True)]}
            for token, (logprob, top, values) in zip(tokens, told, strict=True)
        ]

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": logprob, "bytes": list(self.raw(token))}

    def _read(self, token: int) -> bytes:
        if self._tokenizer is None:
            return f" {token}".encode()
        name = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):
            return f"<{token}>".encode()
        if token in self._tokenizer.added_tokens_decoder:
            return name.encode()
        if self._byte_level:
            return bytes(self._letters.get(letter, ord("?")) for letter in name)
        if (byte := _BYTE.fullmatch(name)) is not None:
            return bytes([int(byte[1], 16)])
        return name.replace(_SPACE, " ").encode()

    @cached_property
    def _byte_level(self) -> bool:
        return "ByteLevel" in str(getattr(getattr(self._tokenizer, "backend_tokenizer", None), "decoder", ""))

    @cached_property
    def _letters(self) -> dict[str, int]:
        return byte_letters()
