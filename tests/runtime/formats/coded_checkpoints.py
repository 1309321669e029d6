"""Tiny checkpoints whose layers' matrices are coded as published ones are, tensor by tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from penstock.runtime.engine.passes.generate import Batch
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.engine.session import Session

WEIGHTS = "model.safetensors"
LINEAR = re.compile(r"layers\.\d+\.(?:self_attn|mlp|block_sparse_moe)\.(?:.*\.)?(?:\w+_proj|kv_a_proj_with_mqa|w[123])\.weight$")
Coder = Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
"""A matrix -> leaf -> tensor."""
FP8_BLOCKS = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


def logits_of(session: Session, batch: Batch) -> list[torch.Tensor]:
    """Of every pass of ``batch``, greedy, once ``session`` is loaded."""
    session.load(batch)
    return list(session.generate(batch, Sampler(Sampling(), torch.device("cpu")), keep_logits=True).logits)


def same(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    """Every bit of them."""
    return len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def coded(directory: Path, coder: Coder, said: Mapping[str, Any], only: re.Pattern[str] = LINEAR) -> Path:
    """``directory`` with each matrix whose name ``only`` finds as ``coder`` stores it, and ``said`` as its quantization_config."""
    tensors = load_file(directory / WEIGHTS)
    for name in [name for name, tensor in tensors.items() if only.search(name) and tensor.dim() == 2]:
        matrix, base = tensors.pop(name), name.removesuffix("weight")
        tensors |= {f"{base}{leaf}": part.contiguous() for leaf, part in coder(matrix).items()}
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    return say(directory, quantization_config=dict(said))


def say(directory: Path, **keys: Any) -> Path:
    """``directory`` with ``keys`` in its config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return directory


def edit(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """``directory`` after ``change`` of its tensors."""
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / WEIGHTS, metadata={"format": "pt"})
    return directory


def compressed(form: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": inputs, "output_activations": None, "format": form}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def fp8_blocks(matrix: torch.Tensor, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A scale for each 128 x 128, the last ones smaller."""
    rows, columns = matrix.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128)
    padded[:rows, :columns] = matrix.float()
    blocks = padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
    scale = (blocks.abs().amax((1, 3)) / 448).to(dtype)
    held = (blocks / scale.float()[:, None, :, None]).clamp(-448, 448).view_as(padded)[:rows, :columns]
    return {"weight": held.to(torch.float8_e4m3fn), "weight_scale_inv": scale}


def fp8_rows(matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    """A scale for each row, in the matrix's own dtype."""
    scale = (matrix.float().abs().amax(1, keepdim=True) / 448).to(matrix.dtype)
    return {"weight": (matrix.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn), "weight_scale": scale}


def fp8_tensor(matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    """One scale, and one for inputs that nobody needs."""
    scale = matrix.float().abs().amax() / 448
    held = (matrix.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": held, "weight_scale": scale.reshape(1), "input_scale": torch.ones(1)}


class Whole(NamedTuple):
    """A matrix rounded to whole numbers."""

    numbers: torch.Tensor
    """[rows, columns], from 0."""
    zero: torch.Tensor
    """[rows, groups]."""
    scale: torch.Tensor
    """[rows, groups]."""

    def decoded(self) -> torch.Tensor:
        """In the scale's dtype."""
        grid = self.numbers.view(len(self.zero), self.zero.shape[1], -1) - self.zero[..., None]
        return (grid.to(self.scale.dtype) * self.scale[..., None]).view(self.numbers.shape)


def whole(matrix: torch.Tensor, bits: int, group: int, dtype: torch.dtype, symmetric: bool = False) -> Whole:
    """``matrix`` rounded to the nearest of ``bits`` in groups of columns, 0 for whole rows."""
    grid, most = matrix.float().view(len(matrix), -1, group or matrix.shape[1]), 2**bits - 1
    low, high = grid.amin(-1).clamp(max=0), grid.amax(-1).clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scale = ((high - low) / most).clamp(min=1e-6).to(dtype)
    zero = torch.full_like(scale, 2 ** (bits - 1)) if symmetric else (-low / scale.float()).round().clamp(0, most)
    numbers = (grid / scale.float()[..., None] + zero.float()[..., None]).round().clamp(0, most).view(matrix.shape)
    return Whole(numbers.long(), zero.long(), scale)


def in_words(numbers: torch.Tensor, bits: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """[..., n] -> I32 [..., n * bits / 32]: the number ``order[i]`` of each word's comes i-th from its lowest bits."""
    per = 32 // bits
    grid = numbers.unflatten(-1, (-1, per))[..., list(order or range(per))]
    held = (grid << torch.arange(per) * bits).sum(-1)
    return torch.where(held >= 2**31, held - 2**32, held).to(torch.int32)


def packed(of: Whole, bits: int, symmetric: bool = True) -> dict[str, torch.Tensor]:
    """As compressed-tensors' pack-quantized."""
    parts = {"weight_packed": in_words(of.numbers, bits), "weight_scale": of.scale, "weight_shape": torch.tensor(of.numbers.shape)}
    return parts if symmetric else parts | {"weight_zero_point": in_words(of.zero.t(), bits).t()}


def gptq(of: Whole, bits: int) -> dict[str, torch.Tensor]:
    """As GPTQ's first version, whose zero points are stored less one; columns in groups one after the other."""
    group = of.numbers.shape[1] // of.zero.shape[1]
    return {
        "qweight": in_words(of.numbers, bits).t(),
        "qzeros": in_words((of.zero.t() - 1) % 2**bits, bits),
        "scales": of.scale.t(),
        "g_idx": (torch.arange(of.numbers.shape[1]) // group).to(torch.int32),
    }


def awq(of: Whole) -> dict[str, torch.Tensor]:
    """In the order of AWQ's GEMM."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": in_words(of.numbers.t(), 4, order), "qzeros": in_words(of.zero.t(), 4, order), "scales": of.scale.t()}
