"""What multiplying by coded weights costs: decoded into scratch and multiplied, or multiplied as they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.planner.common.measures import GB
from penstock.planner.contract.given.formats import Format
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec, touched_experts
from penstock.planner.contract.given.unit_spec import UnitKind, UnitSpec


@dataclass(frozen=True)
class DerivedRates:
    """For formats that no probe has timed: shares of the rate at which weights are read. A decoder reads b bytes and writes p.

        elements a second = share * rate / (b + p)

    A CPU decodes no more than its cores unpack.
    """

    card_decode: float = 0.8
    """Assumed of kernels that do little beside."""
    card_product: float = 0.7
    """Of stored bytes, assumed: unpacking keeps a product of one row from the memory's whole rate."""
    cpu_decode: float = 1.0
    """Of a CPU: its decoders write and read as products read."""
    core_gelements: float = 1.0
    """1e9 elements a second that a core unpacks in C. Measured with AVX-512, by processor time: 1.2 to 4.8, AWQ 0.6, NVFP4 0.3."""


DERIVED_RATES = DerivedRates()


def decode_gelements(hardware: HardwareProfile, stored: Format) -> float:
    """1e9 elements of ``stored`` that the device which computes decodes in a second: measured, or by :class:`DerivedRates`."""
    timed = _timed(hardware.gpu.decode if hardware.gpu else hardware.cpu_decode, stored)
    if timed:
        return timed
    nbytes = stored.stored_bytes(_WIDE, _WIDE) / _WIDE**2 + stored.plain.nbytes
    if hardware.gpu:
        return DERIVED_RATES.card_decode * hardware.weight_gbps / nbytes
    return min(DERIVED_RATES.cpu_decode * hardware.weight_gbps / nbytes, DERIVED_RATES.core_gelements * hardware.cpu_cores)


def product_gbps(hardware: HardwareProfile, stored: Format) -> float:
    """GB/s of stored bytes that a product of few rows reads where it computes; 0 for a CPU that has no such product."""
    if hardware.gpu is None:
        return _timed(hardware.cpu_products, stored)
    return _timed(hardware.gpu.products, stored) or DERIVED_RATES.card_product * hardware.gpu.memory_gbps


def is_timed(rates: Mapping[str, float], stored: Format) -> bool:
    """Whether a probe has timed ``stored``, or a format of its family."""
    return bool(_timed(rates, stored))


def _timed(rates: Mapping[str, float], stored: Format) -> float:
    """The rate of ``stored``, or of the first format of its family, whose name begins alike; 0 where there is none."""
    family = stored.name.partition("-")[0]
    alike = (rate for name, rate in rates.items() if name.partition("-")[0] == family)
    return rates.get(stored.name) or next(alike, 0.0)


def is_product(hardware: HardwareProfile, stored: Format, rows: float) -> bool:
    """Whether ``rows`` rows are multiplied by the matrix as it is stored."""
    if hardware.gpu is None:
        return rows <= stored.host_rows and product_gbps(hardware, stored) > 0
    return rows <= stored.product_rows


def decode_s(hardware: HardwareProfile, unit: UnitSpec, rows: float) -> float:
    """Seconds to decode ``unit`` for a pass of ``rows`` rows; 0 where nothing is decoded into memory."""
    if not unit.is_coded or is_product(hardware, unit.format, rows):
        return 0.0
    return unit.elements / decode_gelements(hardware, unit.format) / 1e9


def unit_s(hardware: HardwareProfile, unit: UnitSpec, rows: float) -> float:
    """Seconds in which a product of ``rows`` rows reads ``unit`` once, decoding it first where it must."""
    if unit.is_coded and is_product(hardware, unit.format, rows):
        return unit.stored_bytes / product_gbps(hardware, unit.format) / GB
    return decode_s(hardware, unit, rows) + unit.decoded_bytes / hardware.weight_gbps / GB


def model_decode_s(hardware: HardwareProfile, model: ModelSpec, tokens: int) -> float:
    """Seconds of a pass over ``tokens`` tokens in which weights are decoded into memory."""
    return sum(count * decode_s(hardware, unit, rows) for unit, count, rows in _visits(model, tokens))


def beyond_stored_s(hardware: HardwareProfile, model: ModelSpec, tokens: int) -> float:
    """Seconds that a pass takes beyond reading the stored bytes of its weights once; 0 where none is coded."""
    visits = _visits(model, tokens)
    return sum(count * (unit_s(hardware, unit, rows) - unit.stored_bytes / hardware.weight_gbps / GB) for unit, count, rows in visits)


def _visits(model: ModelSpec, tokens: int) -> list[tuple[UnitSpec, float, float]]:
    """(unit, how often a pass visits one like it, rows that each is multiplied by) for all coded units."""
    e = model.experts
    touched = touched_experts(e, tokens) if e else 1.0
    routed = (touched, max(1.0, tokens * e.top_k / touched)) if e else (0.0, 1.0)
    return [
        (unit, layers * (routed[0] if unit.kind is UnitKind.expert else 1), routed[1] if unit.kind is UnitKind.expert else tokens)
        for unit, layers in model.coded.items()
    ]


_WIDE = 4096
"""Rows and columns of a matrix by which a format's bytes an element are taken."""
