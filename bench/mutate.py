"""Sound inputs made hostile: bytes that are flipped, cut and doubled, and trees whose leaves become absurd."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

ABSURD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 16, 255, 4095, 4096, 2**15, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63,
    10**12, 10**18, 10**30, 10**400,
    0.0, 0.5, -0.5, 1e-300, 1e-9, 1e9, 1e300, -1e300, float("inf"), float("-inf"), float("nan"),
    "", " ", "abc", "4096", "-1", "1e400", "0x10", "2024-13-45", "null", "true", "???", "${x}", "${hardware.name}", "../x", "/",
    "/dev/zero",     "a\0b", "\ud800", "\u202e", "x" * 5000,
    "*a", "&a", "!!int x", "[", "{", "0-5", "0-999999", "0-1 0-1", "BF16", "F4", "pinned",
    [], [[]], [0], [1, 2], [[1, 2], [3]], [None], {}, {"a": 1}, {"": {}}, [[1] * 50] * 50,
)  # fmt: skip
"""What a leaf becomes."""
TOKENS = (
    b"", b"\0", b"\n", b":", b"- ", b"{", b"}", b"[", b"]", b",", b'"', b"'", b"#", b"&a ", b"*a", b"!!int ",
    b"!!python/name:os.system ", b"%", b"---\n", b"...\n",
    b"? ", b"| ", b"> ", b"<<: ", b"null", b"~", b"0", b"-1", b"9" * 30, b"9" * 6000,
    b"1e400", b".inf", b".nan", b"0x" + b"f" * 5000, b"\xff\xfe", b"\x80", b"\xef\xbb\xbf",
    b"Infinity", b"NaN", b"true", b"\\u0000", b"\\ud800", b"[" * 3000, b"{\"a\":" * 3000, b" " * 5000, b"\t",
)  # fmt: skip
"""What is put among bytes."""


def mutated_bytes(sound: bytes, chance: random.Random) -> bytes:
    """``sound`` after one to four edits of bytes."""
    made = bytearray(sound)
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(made) + 1)
        to = min(len(made), at + chance.choice((1, 1, 4, 16, 64, 1000)))
        kind = chance.randrange(7)
        if kind == 0 and made:
            made[min(at, len(made) - 1)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del made[at:to]
        elif kind == 2:
            made[at:at] = made[at:to] * chance.choice((1, 2, 50))
        elif kind == 3:
            made[at:at] = chance.choice(TOKENS)
        elif kind == 4:
            made[at:to] = chance.choice(TOKENS)
        elif kind == 5:
            made[at:to] = chance.randbytes(to - at)
        else:
            made = made[:at]
    return bytes(made)


def mutated_tree(sound: Any, chance: random.Random) -> Any:
    """``sound``, of mappings, lists and scalars, after one to three edits of its nodes."""
    made = copy.deepcopy(sound)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        places = list(_places(made))
        if not places:
            return made
        holder, key = chance.choice(places)
        kind = chance.randrange(6)
        if kind == 0:
            del holder[key]
        elif kind == 1:
            other, name = chance.choice(places)
            holder[key] = copy.deepcopy(other[name])
        elif kind == 2 and isinstance(holder, dict):
            holder[chance.choice(("", "a", "x" * 300, str(key) + "s", "notes"))] = holder[key]
        elif kind == 2:
            holder.insert(key, copy.deepcopy(holder[key]))
        elif kind == 3 and type(holder[key]) in (int, float):
            holder[key] = _near(holder[key], chance)
        else:
            holder[key] = copy.deepcopy(chance.choice(ABSURD))
    return made


def _near(value: float, chance: random.Random) -> float:
    """A number of the same type, near or far."""
    factor = chance.choice((-1, 0, 2, 3, 7, 10, 1000, 10**6, 10**12))
    if type(value) is int:
        return chance.choice((value + 1, value - 1, value * factor, value // 2, value // 1000))
    return chance.choice((value * factor, value / 10**6, -value, value + 1e-9))


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(node, dict | list):
        for key, value in list(node.items()) if isinstance(node, dict) else list(enumerate(node)):
            yield node, key
            yield from _places(value)
