"""``python -m penstock.runtime`` is ``runtime``: what a launcher such as torchrun starts."""

from __future__ import annotations

import sys

from penstock.scripts import runtime

sys.argv[0] = "runtime"
runtime()
