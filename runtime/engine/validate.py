"""Whether a run did what was promised: the rules held, the numbers are the unstreamed model's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import ALIGN
from penstock.planner.contract.checkpoint.checkpoint_files import gguf_config, read_checkpoint, stored_matrices
from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.policy.layer_slots import CacheStats
from penstock.runtime.engine.passes.generate import Batch, Generation
from penstock.runtime.engine.passes.stepper import Stepper
from penstock.runtime.kv.batch.kv_pool import KvPool
from penstock.runtime.kv.batch.kv_windows import kinds
from penstock.runtime.model.binding import bind, move_buffers, parameters
from penstock.runtime.model.decoded_experts import decode_experts
from penstock.runtime.model.foreign_experts import shape_as_made
from penstock.runtime.model.rows import RowKind, Step
from penstock.runtime.model.skeleton import compute_dtype, open_skeleton, read_config, text_class
from penstock.runtime.reading.reader import ReadPool
from penstock.runtime.recorded.agreement import bf16_rounding, relative_error
from penstock.runtime.store.base import UnitLayout
from penstock.runtime.store.expert_modules import expert_parameters, layers_with_experts
from penstock.runtime.store.manifest import MANIFEST, read_manifest
from penstock.runtime.store.parameters import model_slots, tied_names


@dataclass(frozen=True)
class LogitsCheck:
    """Streamed against unstreamed logits over every pass of one batch."""

    passes: int
    identical: bool
    """Bit for bit."""
    max_abs_error: float
    max_abs_logit: float
    relative_l2: float
    """Largest over passes of |streamed - unstreamed| / |unstreamed|, Euclidean norms."""
    rounding: float
    """What BF16 rounding explains: one step at each of a layer's two residual additions, adding up like a random walk. Kernels on a GPU
    add in an order that changes between runs: the unstreamed model differs from itself by as much."""
    same_argmax: float
    """Share of wanted logits whose most likely token agrees."""
    within_rounding: bool


def broken_at_run_time(plan: Plan, stats: CacheStats, peak_dram: int, peak_vram: int) -> list[str]:
    """Rules that hold only if the engine obeyed: HWM never passed, nothing evicted in the window, budgets kept."""
    broken = []
    hwm = plan.decisions.weights.dram.hwm_layers
    if stats.peak_layers > hwm:
        broken.append(f"the DRAM cache held {stats.peak_layers} layers, hwm_layers={hwm}")
    if stats.evictions_in_window:
        broken.append(f"{stats.evictions_in_window} layers were evicted inside the prefetch window")
    if peak_dram > plan.hardware.dram_bytes:
        broken.append(f"DRAM peaked at {peak_dram} bytes, hardware.dram_bytes={plan.hardware.dram_bytes}")
    if peak_vram > plan.hardware.vram_bytes:
        broken.append(f"VRAM peaked at {peak_vram} bytes, hardware.vram_bytes={plan.hardware.vram_bytes}")
    return broken


def load_unstreamed(checkpoint: Path, device: torch.device) -> PreTrainedModel:
    """The whole model on ``device``: by transformers from a checkpoint, unit by unit from a packed store or where matrices are coded.
    Routed experts that are coded are decoded."""
    if not (checkpoint / MANIFEST).exists() and gguf_config(checkpoint) is None and not stored_matrices(checkpoint):
        config = read_config(checkpoint)
        dtype = compute_dtype(checkpoint, config)
        whole: nn.Module = text_class(config).from_pretrained(checkpoint, config=config, dtype=dtype, trust_remote_code=False)
        whole = whole.to(device).eval()
        assert isinstance(whole, PreTrainedModel)
        return whole
    skeleton = open_skeleton(checkpoint)
    model, store, layers = skeleton.model, skeleton.store, skeleton.layers
    dtypes, tied = {name: tensor.dtype for name, tensor in model.state_dict().items()}, tied_names(model)
    places: list[tuple[nn.Module, UnitLayout]] = [(model, layout) for layout in store.others().values()]
    places += [(layers[unit.layer], store.unit(unit)) for unit in model_slots(model).units if unit.kind != "expert"]
    with ReadPool(4, 4 << 20) as pool:
        for module, layout in places:
            bind(module, parameters(layout.tensors, _read(pool, layout).to(device)))
        for name in store.others():
            _cast(model, name, dtypes[name])
        for layer, experts in layers_with_experts(layers):
            joint = {name: torch.empty(p.shape, dtype=p.dtype, device=device) for name, p in expert_parameters(experts).items()}
            for e in range(experts.num_experts):
                layout = store.unit(Unit("expert", layer, e))
                for name, part in parameters(layout.tensors, _read(pool, layout)).items():
                    joint[name][e] = part
            bind(experts, {name: nn.Parameter(p, requires_grad=False) for name, p in joint.items()})
            decode_experts(experts)
        shape_as_made(model)
    for name, source in tied.items():
        bind(model, {name: model.get_parameter(source)})
    move_buffers(model, device)
    return model


def original_of(plan: Plan, store: Path) -> Path | None:
    """The checkpoint that the packed ``store`` was made of, where ``plan`` names it and it is there, unchanged. None for a checkpoint."""
    named = plan.model.checkpoint
    if named is None or not (store / MANIFEST).exists() or (Path(named) / MANIFEST).exists() or not Path(named).is_dir():
        return None
    try:
        return Path(named) if read_checkpoint(Path(named)).digest == read_manifest(store).digest else None
    except UserError:
        return None


def _cast(model: nn.Module, name: str, dtype: torch.dtype) -> None:
    bound = model.get_parameter(name)
    if bound.dtype != dtype:
        bind(model, {name: nn.Parameter(bound.to(dtype), requires_grad=False)})


def _read(pool: ReadPool, layout: UnitLayout) -> torch.Tensor:
    whole = torch.empty(layout.nbytes + ALIGN, dtype=torch.uint8)
    buffer = whole[-whole.data_ptr() % ALIGN :][: layout.nbytes]
    pool.read_now(layout.extents, buffer.numpy().data)
    return buffer


def compare_logits(
    model: PreTrainedModel, device: torch.device, batch: Batch, got: Generation, page_tokens: int, progress: Callable[[int, int], None]
) -> LogitsCheck:
    """Compute with the unstreamed ``model`` what the streamed one computed, pass by pass, and compare the logits. What was restored there
    is computed here. Takes KV for as many pages as the streamed passes used."""
    pages = 1 + max(page for each in got.passes for row in each.step.rows for page in row.pages)
    stepper = Stepper(model, device, KvPool(pages, page_tokens, kinds(model.config), device))
    computed = [0] * len(batch.prompts)
    identical, error, largest, agree, relative = True, 0.0, 0.0, 0, 0.0
    for k, each in enumerate(got.passes):
        for row in each.step.rows:
            known = computed[row.sequence]
            if known < row.start:
                missing = tuple(batch.prompts[row.sequence][known : row.start])
                stepper.run(Step((replace(row, tokens=missing, start=known, kind=RowKind.prompt, wanted=0),)))
            computed[row.sequence] = row.end
        want, logits = stepper.run(each.step).cpu(), each.logits
        if not len(logits):
            continue
        identical &= torch.equal(want, logits)
        difference = want.float() - logits.float()
        error = max(error, difference.abs().max().item())
        relative = max(relative, relative_error(logits, want))
        largest = max(largest, want.float().abs().max().item())
        agree += int((want.argmax(-1) == logits.argmax(-1)).sum())
        progress(k + 1, len(got.passes))
    rounding = bf16_rounding(model.config.get_text_config().num_hidden_layers)
    same = agree / sum(each.step.wanted for each in got.passes)
    return LogitsCheck(len(got.passes), identical, error, largest, relative, rounding, same, relative <= rounding)
