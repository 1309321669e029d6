"""Which scheme a config names: the one list of methods that are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from penstock.planner.contract.stored.awq_stored import AwqStored
from penstock.planner.contract.stored.compressed_stored import CompressedStored
from penstock.planner.contract.stored.fp8_stored import Fp8Stored
from penstock.planner.contract.stored.gguf_stored import GgufStored
from penstock.planner.contract.stored.gptq_stored import GptqStored
from penstock.planner.contract.stored.lossless_stored import METHOD, LosslessStored
from penstock.planner.contract.stored.mixed_stored import MixedStored
from penstock.planner.contract.stored.mxfp4_stored import Mxfp4Stored
from penstock.planner.contract.stored.nvfp4_stored import Nvfp4Stored
from penstock.planner.contract.stored.scheme import Scheme

SCHEMES: Mapping[str, Callable[[Mapping[str, Any], str], Scheme | None]] = MappingProxyType(
    {
        "fp8": Fp8Stored.of_fp8,
        "fbgemm_fp8": Fp8Stored.of_fbgemm,
        METHOD: LosslessStored.of_packed,
        "modelopt": Nvfp4Stored.of_modelopt,
        "mxfp4": Mxfp4Stored.of_mxfp4,
        "gptq": GptqStored.of,
        "awq": AwqStored.of,
        "auto-round": AwqStored.of_auto_round,
        "gguf": GgufStored.of_gguf,
    }
)
"""quant_method -> what reads the rest of its quantization_config; None for a variant that is not known."""
COMPRESSED: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any], str], Scheme | None]] = MappingProxyType(
    {
        "float-quantized": Fp8Stored.of_compressed,
        "mxfp4-pack-quantized": Mxfp4Stored.of_compressed,
        "nvfp4-pack-quantized": Nvfp4Stored.of_compressed,
        "pack-quantized": CompressedStored.of,
        "int-quantized": CompressedStored.of,
    }
)
"""``format`` of compressed-tensors -> what reads a group's ``weights`` and the whole quantization_config."""

READ = (
    "fp8 in blocks of 128 x 128 or with one scale, fbgemm_fp8, mxfp4, modelopt's NVFP4, gptq and auto-round of 4 and 8 bits, awq of 4, and "
    "compressed-tensors: " + ", ".join(COMPRESSED)
)
"""Methods that are read, for messages."""


def scheme_of(said: Mapping[str, Any], where: str) -> Scheme | None:
    """The scheme of the quantization_config ``said``; None for a method or variant that is not run."""
    method = said.get("quant_method")
    if method == "compressed-tensors":
        return _compressed(said, where)
    read = SCHEMES.get(method) if isinstance(method, str) else None
    return None if read is None else read(said, where)


def _compressed(said: Mapping[str, Any], where: str) -> Scheme | None:
    groups = said.get("config_groups")
    found: list[tuple[Scheme, tuple[str, ...]]] = []
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if not isinstance(group, Mapping) or not isinstance(weights := group.get("weights"), Mapping):
            return None
        form = group.get("format") or said.get("format")
        read, targets = COMPRESSED.get(str(form)), group.get("targets")
        scheme = None if read is None else read(weights, {**said, "format": form}, where)
        if scheme is None:
            return None
        found.append((scheme, tuple(map(str, targets)) if isinstance(targets, list) else ()))
    return found[0][0] if len(found) == 1 else MixedStored.of(found) if found else None
