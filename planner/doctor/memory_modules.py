"""Memory modules as the firmware lists them: which channels they fill, and how fast they are clocked.

The table is SMBIOS's (DSP0134), of which a memory device is type 17. Only root may read it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.planner.common.host_memory import memory_facts
from penstock.planner.common.measures import show_bytes
from penstock.planner.doctor.finding import Finding, Verdict

MEMORY_DEVICE, END = 17, 127
MIB = 2**20
LARGE = 0x7FFF
"""In the field of 16 bits: the size stands in that of 32."""
KIB_UNIT = 0x8000
NAME = "memory modules"
CHANNEL = re.compile(r".*?CH(AN(NEL)?)?[\s_-]*([A-Z]|\d+)(?![A-Z])", re.IGNORECASE)
"""As in `P0 CHANNEL A` and `Controller1-ChannelB-DIMM0`."""
LAST_NUMBER = re.compile(r"[\s_-]*(DIMM)?[\s_-]*\d+$", re.IGNORECASE)
"""As in `DIMM_A1`."""


@dataclass(frozen=True)
class Module:
    """A slot and what is in it; 0 bytes where nothing is. Speeds in MT/s, 0 where the firmware does not say."""

    locator: str
    bank: str
    nbytes: int
    rated: int
    clocked: int

    @property
    def channel(self) -> str:
        """What the firmware calls it, or the slot's name without the number of the module on its channel."""
        named = next((found.group() for text in (self.locator, self.bank) if (found := CHANNEL.match(text))), None)
        return LAST_NUMBER.sub("", self.locator) if named is None else named


def module_findings(root: Path = Path("/")) -> Iterator[Finding]:
    """One finding: all channels filled alike and clocked as rated, or what is not so."""
    path = root / "sys/firmware/dmi/tables/DMI"
    if memory_facts(root).virtual:
        yield Finding(NAME, "a virtual machine does not say", Verdict.unknown)
        return
    try:
        modules = list(read_modules(path.read_bytes()))
    except PermissionError:
        yield Finding(NAME, "told to root alone", Verdict.unknown, "sudo dmidecode -t memory: each channel that is empty costs its rate")
        return
    except (OSError, struct.error, IndexError):
        modules = []
    filled = [m for m in modules if m.nbytes]
    yield _judged(modules, filled) if filled else Finding(NAME, "the firmware does not say", Verdict.unknown)


def _judged(modules: list[Module], filled: list[Module]) -> Finding:
    channels = {m.channel for m in modules}
    per_channel = {c: sum(m.nbytes for m in filled if m.channel == c) for c in channels}
    used = [c for c, nbytes in per_channel.items() if nbytes]
    speed = min((m.clocked for m in filled if m.clocked), default=0)
    rated = min((m.rated for m in filled if m.rated), default=0)
    found = f"{len(filled)} of {show_bytes(min(m.nbytes for m in filled))}" + (f", {speed} MT/s" if speed else "")
    if len(channels) > 1 and len(used) < len(channels):
        change = "put a module into each channel: the CPU reads all of them at once"
        return Finding(NAME, f"{found}, in {len(used)} of {len(channels)} channels", Verdict.fair, change)
    if len({per_channel[c] for c in used}) > 1:
        change = "fill all channels alike: what is beyond the smallest is read from fewer of them"
        return Finding(NAME, f"{found} and more, channels differ", Verdict.fair, change)
    if speed and rated > speed:
        change = f"choose the modules' profile in the BIOS (XMP, EXPO): they are rated {rated} MT/s"
        return Finding(NAME, found, Verdict.fair, change)
    return Finding(NAME, found, Verdict.good)


def read_modules(table: bytes) -> Iterator[Module]:
    """Of all type 17 structures. struct.error or IndexError where the table is cut."""
    at = 0
    while at + 4 <= len(table):
        kind, length = table[at], table[at + 1]
        end = table.index(b"\0\0", at + length) + 2 if b"\0\0" in table[at + length :] else len(table)
        if kind == END or length < 4:
            return
        if kind == MEMORY_DEVICE:
            yield _module(table[at : at + length], table[at + length : end].split(b"\0"))
        at = end


def _module(fields: bytes, strings: list[bytes]) -> Module:
    (size,) = struct.unpack_from("<H", fields, 0x0C)
    nbytes = (size & LARGE) * (1024 if size & KIB_UNIT else MIB) if size not in (0, LARGE, 0xFFFF) else 0
    if size == LARGE:
        nbytes = struct.unpack_from("<I", fields, 0x1C)[0] * MIB
    rated = struct.unpack_from("<H", fields, 0x15)[0] if len(fields) > 0x16 else 0
    clocked = struct.unpack_from("<H", fields, 0x20)[0] if len(fields) > 0x21 else 0

    def text(index: int) -> str:
        return strings[index - 1].decode("ascii", "replace").strip() if 0 < index <= len(strings) else ""

    return Module(text(fields[0x10]), text(fields[0x11]), nbytes, rated, clocked)
