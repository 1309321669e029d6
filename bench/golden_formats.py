"""Makes tests/runtime/formats/golden/*.safetensors by the tools that publish such checkpoints: what each packs and what each decodes it to.

    python bench/golden_formats.py WHEELS CHECKPOINT

WHEELS: a directory with auto-gptq 0.7.1, auto-round 0.16.1 and autoawq 0.2.9 unpacked; none of them is installed. CHECKPOINT: a trained
Llama (tiny-llama). The matrix is a quarter of its first v_proj, quantised with GPTQ's own algorithm on random inputs.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ROWS = 64


def load(name: str, path: Path, **stubs: Any) -> Any:
    """The module at ``path`` alone, with ``stubs`` for what else its package would import."""
    for stub, members in stubs.items():
        module = types.ModuleType(stub.replace("__", "."))
        module.__dict__.update(members)
        sys.modules[module.__name__] = module
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def by_gptq(wheels: Path, weight: torch.Tensor, bits: int, group: int, order: bool, sym: bool) -> dict[str, torch.Tensor]:
    """Quantised and packed by AutoGPTQ; ``decoded`` from what it computes."""
    sys.modules["quantization"] = package = types.ModuleType("quantization")
    package.__path__ = [str(wheels / "auto_gptq/quantization")]
    algorithm = load("quantization.gptq", wheels / "auto_gptq/quantization/gptq.py")
    linear = torch.nn.Linear(weight.shape[1], len(weight), bias=False)
    linear.weight.data = weight.float()
    torch.cuda.synchronize = lambda *_: None
    gptq = algorithm.GPTQ(linear)
    gptq.quantizer.configure(bits, perchannel=True, sym=sym, mse=False)
    torch.manual_seed(0)
    spread = torch.rand(weight.shape[1]) + 0.1
    gptq.add_batch(torch.randn(1, 512, weight.shape[1]) * spread, None)
    scale, zero, g_idx = gptq.fasterquant(percdamp=0.01, group_size=group, actorder=order)
    module = load("qlinear_cuda", wheels / "auto_gptq/nn_modules/qlinear/qlinear_cuda.py")
    packed = module.QuantLinear(bits, group, weight.shape[1], len(weight), False, weight_dtype=torch.float16)
    linear.half()
    packed.pack(linear, scale.half(), zero.half(), g_idx)
    leaves = {"qweight": packed.qweight, "qzeros": packed.qzeros, "scales": packed.scales, "g_idx": packed.g_idx}
    eye = torch.eye(weight.shape[1], dtype=torch.float16)
    return leaves | {"decoded": packed(eye).t().contiguous()}


def by_auto_round(wheels: Path, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    helpers = load("auto_round.utils.bit_packing", wheels / "auto_round/utils/bit_packing.py")
    stubs: dict[str, Any] = {"auto_round": {}, "auto_round__utils": {"get_packing_device": lambda _: "cpu", "bit_packing": helpers}}
    extension = types.ModuleType("auto_round_extension.torch")
    extension.__path__ = [str(wheels / "auto_round_extension/torch")]
    load("auto_round_extension.torch.qlinear_torch", wheels / "auto_round_extension/torch/qlinear_torch.py", **stubs)
    sys.modules["auto_round.utils.bit_packing"] = helpers
    module = load("auto_round_zp", wheels / "auto_round_extension/torch/qlinear_torch_zp.py")
    grid = weight.float().view(ROWS, -1, 32)
    zero = (-grid.amin(-1) / (grid.amax(-1) - grid.amin(-1)) * 15).round().clamp(1, 15)
    scale = ((grid.amax(-1) - grid.amin(-1)) / 15).half()
    linear = torch.nn.Linear(weight.shape[1], ROWS, bias=False)
    linear.weight.data = weight.float()
    packed = module.QuantLinear(4, 32, weight.shape[1], ROWS, False)
    packed.device = "cpu"
    packed.pack(linear, scale.float(), zero, None)
    decoded = packed(torch.eye(weight.shape[1], dtype=torch.float32)).t().half().contiguous()
    return {"qweight": packed.qweight, "qzeros": packed.qzeros, "scales": packed.scales, "decoded": decoded}


def by_awq(wheels: Path, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    root = next(wheels.glob("autoawq-*")) / "awq"
    packing = load("awq.utils.packing_utils", root / "utils/packing_utils.py", awq={}, awq__utils={})
    stubs = {"awq__utils__module": {"try_import": lambda _: (None, "")}, "awq__utils__utils": {"get_best_device": lambda: "cpu"}}
    module = load("awq_gemm", root / "modules/linear/gemm.py", **stubs)
    grid = weight.float().view(ROWS, -1, 64)
    scale = ((grid.amax(-1) - grid.amin(-1)) / 15).half()
    zero = (-grid.amin(-1) / scale.float()).round().clamp(0, 15)
    linear = torch.nn.Linear(weight.shape[1], ROWS, bias=False)
    linear.weight.data = (
        ((grid / scale[..., None].float() + zero[..., None]).round().clamp(0, 15) - zero[..., None])
        .mul(scale[..., None].float())
        .view(weight.shape)
    )
    packed = module.WQLinear_GEMM.from_linear(linear, 4, 64, scales=scale.t().contiguous().float(), zeros=zero.t().contiguous())
    decoded = packing.dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, 64).t().contiguous()
    return {"qweight": packed.qweight, "qzeros": packed.qzeros, "scales": packed.scales, "decoded": decoded}


def main() -> None:
    wheels, checkpoint = map(Path, sys.argv[1:])
    weight = load_file(checkpoint / "model.safetensors")["model.layers.0.self_attn.v_proj.weight"][:ROWS]
    made = {
        "gptq-4-128": by_gptq(wheels, weight, 4, 128, False, False),
        "gptq-4-64-desc_act": by_gptq(wheels, weight, 4, 64, True, False),
        "gptq-8-row-sym": by_gptq(wheels, weight, 8, -1, False, True),
        "auto_round-4-32": by_auto_round(wheels, weight),
        "awq-4-64": by_awq(wheels, weight),
    }
    for name, tensors in made.items():
        error = (tensors["decoded"].float() - weight.float()).norm() / weight.float().norm()
        print(f"{name}: differs from the trained weights by {error:.3f} of their norm")
    flat = {f"{name}.{leaf}": tensor.contiguous() for name, tensors in made.items() for leaf, tensor in tensors.items()}
    save_file(flat, Path(__file__).parent.parent / "tests/runtime/formats/golden/published.safetensors")


if __name__ == "__main__":
    main()
