"""Tokens one by one, as logprobs tell them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

from tokenizers.decoders import ByteLevel

from penstock.runtime.asked.prompts import Vocabulary
from penstock.runtime.serve.wire.messages import TopLogprobs

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
"""What SentencePiece writes for a space."""
_KNOWN_ALONE = 1 << 12
"""Tokens whose texts are kept: 1 MB. Replies seldom have others."""


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
        self.alone = lru_cache(_KNOWN_ALONE)(self._text_alone)
        """What a token adds to any text that ends with a whole character; None where others have a say in that, or it is none."""

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

    def _text_alone(self, token: int) -> str | None:
        tokenizer = self._tokenizer
        if tokenizer is None or not self._by_bytes or token in tokenizer.added_tokens_decoder:
            return None
        name = tokenizer.convert_ids_to_tokens(token)
        if not name or any(letter not in self._letters for letter in name):
            return None
        try:
            return bytes(map(self._letters.__getitem__, name)).decode()
        except UnicodeDecodeError:
            return None

    @cached_property
    def _by_bytes(self) -> bool:
        """Whether a text is the bytes of its tokens, one after the other, and nothing else."""
        return isinstance(getattr(getattr(self._tokenizer, "backend_tokenizer", None), "decoder", None), ByteLevel) and not getattr(
            self._tokenizer, "clean_up_tokenization_spaces", False
        )

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
