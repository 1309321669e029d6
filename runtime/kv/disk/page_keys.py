"""Names of KV pages: a page is named by everything that its contents depend on.

Keys are xxh3 of 128 bits. Among 10**12 pages two different prefixes share a key with probability 10**-15. The hash is not cryptographic:
who chooses prompts freely could build two prefixes of one key. So users who must not see each other's prompts need separate directories.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

KEY_BYTES = 16
FORMAT = 2
"""Version of keys and records; pages of another version are never found."""
ROOT = bytes(KEY_BYTES)
"""Parent of a sequence's first page."""


def namespace(model: Mapping[str, Any], weights: str, dtype: str, page_tokens: int, layout: str) -> bytes:
    """16 bytes that differ whenever pages must not be mixed.

    ``model`` is the model's configuration: anything that JSON holds, in any order of keys. ``weights`` is the digest of the weights'
    manifest or index. ``dtype`` is that of the KV. ``layout`` names the order of bytes in a layer's block. TypeError if ``model`` is no
    JSON.
    """
    parts = [FORMAT, model, weights, dtype, page_tokens, layout]
    return xxhash.xxh3_128_digest(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode())


def salted(namespace: bytes, salt: str) -> bytes:
    """The namespace within ``namespace`` of those who share ``salt``; nobody can tell it who does not know that. The namespace itself
    without one."""
    return hashlib.blake2b(salt.encode(), key=namespace, digest_size=KEY_BYTES).digest() if salt else namespace


def page_keys(namespace: bytes, tokens: Sequence[int] | np.ndarray, page_tokens: int) -> list[bytes]:
    """Keys of the full pages of a sequence. Each key hashes the namespace, the key before it and its own tokens as little-endian int64. So
    a key stands for the whole prefix up to its page's end.

    Costs about 1 microsecond a page for an integer array. A list of Python integers is converted first: 3 microseconds per 64 tokens.
    """
    ids = np.asarray(tokens)
    if ids.size and ids.dtype.kind not in "iu":
        raise TypeError(f"tokens are {ids.dtype}, integers are needed")
    raw = np.ascontiguousarray(ids, dtype="<i8").data.cast("B")
    stride = page_tokens * 8
    keys, parent = [], ROOT
    for start in range(0, len(ids) // page_tokens * stride, stride):
        state = xxhash.xxh3_128(namespace)
        state.update(parent)
        state.update(raw[start : start + stride])
        parent = state.digest()
        keys.append(parent)
    return keys
