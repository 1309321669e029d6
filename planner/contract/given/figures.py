"""The figures of a machine that runs can correct."""

from __future__ import annotations

from enum import StrEnum


class Figure(StrEnum):
    """What is corrected together, since a run cannot tell it apart."""

    ssd = "ssd"
    """Reads of every block and depth, and writes."""
    h2d = "h2d"
    """Copies to the device of every size, also beside copies back."""
    d2h = "d2h"
    dram_copy = "dram_copy"
    page_lock = "page_lock"
    weights = "weights"
    """Compute of a decode step: the rate at which weights are read, and the seconds to issue a layer."""
    products = "products"
    """Compute of a prefill: matrix products and attention."""
