"""Tiny checkpoints whose layers' matrices are coded as published ones are, tensor by tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
LINEAR = re.compile(r"layers\.\d+\.(?:self_attn|mlp|block_sparse_moe)\.(?:.*\.)?(?:\w+_proj|kv_a_proj_with_mqa|w[123])\.weight$")
Coder = Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
"""A matrix -> leaf -> tensor."""
FP8_BLOCKS = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


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
