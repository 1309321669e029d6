"""A front's memory goes back to the system where large texts were freed."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from tests.cli import ROOT

APART = """
import ctypes, sys
from penstock.runtime.serve.large_apart import keep_large_apart

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
if sys.argv[1] == "apart":
    keep_large_apart()
first = bytearray(4 << 20)
del first  # raises the limit where nobody has set it
before = libc.mallinfo2().hblkhd
second = bytearray(400_000)
print(libc.mallinfo2().hblkhd - before >= 400_000)
"""


def apart(kept: str, **environment: str) -> str:
    command = [sys.executable, "-c", APART, kept]
    ran = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_a_large_block_is_the_systems_again_when_it_is_freed_whatever_was_freed_before() -> None:
    assert apart("apart") == "True"
    assert apart("as it is") == "False"
    assert apart("apart", MALLOC_MMAP_THRESHOLD_=str(8 << 20)) == "False", "a user's own limit stays"
