"""Which kernels a device has."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from penstock.runtime.formats.kernels.e2m1_triton import E2m1Kernels
    from penstock.runtime.formats.kernels.fp8_triton import Fp8Kernels
    from penstock.runtime.formats.kernels.gate_triton import ClampedGate
    from penstock.runtime.formats.kernels.gguf_triton import GgufKernels
    from penstock.runtime.formats.kernels.int4_triton import WholeKernels
    from penstock.runtime.formats.kernels.layer_triton import LayerKernels
    from penstock.runtime.formats.kernels.lossless_triton import LosslessKernels
    from penstock.runtime.formats.kernels.plain_triton import PlainKernels


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether Triton is there and ``device`` is a card."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


@cache
def e2m1_kernels(device: torch.device) -> E2m1Kernels | None:
    """Of numbers of 4 bits; None without a card or Triton."""
    if not has_kernels(device):
        return None
    from penstock.runtime.formats.kernels.e2m1_triton import E2m1Kernels

    return E2m1Kernels()


@cache
def clamped_gate(device: torch.device, alpha: float, limit: float) -> ClampedGate | None:
    """gpt-oss's gate; None without a card or Triton."""
    if not has_kernels(device):
        return None
    from penstock.runtime.formats.kernels.gate_triton import ClampedGate

    return ClampedGate(alpha, limit)


@cache
def fp8_kernels(device: torch.device) -> Fp8Kernels | None:
    """Of FP8; None without a card or Triton."""
    if not has_kernels(device):
        return None
    from penstock.runtime.formats.kernels.fp8_triton import Fp8Kernels

    return Fp8Kernels(hardware=torch.cuda.get_device_capability(device) >= (8, 9))


@cache
def gguf_kernels(device: torch.device) -> GgufKernels | None:
    """Of blocks of GGUF files; None without a card or Triton."""
    if not has_kernels(device):
        return None
    from penstock.runtime.formats.kernels.gguf_triton import GgufKernels

    return GgufKernels()


@cache
def whole_kernels(device: torch.device) -> WholeKernels | None:
    """Of whole numbers in 32-bit words; None without a card or Triton."""
    if not has_kernels(device):
        return None
    from penstock.runtime.formats.kernels.int4_triton import WholeKernels

    tiles = torch.cuda.get_device_capability(device) >= (8, 0)
    return WholeKernels(torch.cuda.get_device_properties(device).multi_processor_count, tiles)


@cache
def layer_kernels(device: torch.device) -> LayerKernels | None:
    """Of what lies between a layer's products; None without a card or Triton."""
    if not has_kernels(device):
        return None
    from penstock.runtime.formats.kernels.layer_triton import LayerKernels

    return LayerKernels()


@cache
def lossless_kernels(device: torch.device) -> LosslessKernels | None:
    """Of the lossless form of BF16; None without a card or Triton."""
    if not has_kernels(device):
        return None
    from penstock.runtime.formats.kernels.lossless_triton import LosslessKernels

    return LosslessKernels()


@cache
def plain_kernels(device: torch.device) -> PlainKernels | None:
    """Of matrices as a model computes with them; None without a card or Triton."""
    if not has_kernels(device):
        return None
    from penstock.runtime.formats.kernels.plain_triton import PlainKernels

    return PlainKernels()
