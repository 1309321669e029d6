"""diffusers' group offloading, on a language model: leaf level, leaf level with the rest of the budget filled, block level.

On a GPU the next group is copied on a stream of its own from page-locked memory while the current one computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from bench.peers.peer import Job, Measured
from bench.peers.timing import measure_model, weights_room_bytes


def measure(job: Job) -> Measured:
    return measure_model(job, load)


def load(job: Job, device: torch.device) -> nn.Module:
    """The whole model in DRAM with hooks on it.

    ``diffusers_leaf`` offloads every leaf. ``diffusers_filled`` keeps the embedding, the head and as many layers as the budget holds on
    the card. ``diffusers_block`` offloads decoder layers one by one and keeps the embedding and the head on the card: outside of
    the blocks this library moves them both ways, in pageable memory, for each token.
    """
    from diffusers.hooks import apply_group_offloading

    model = AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=torch.bfloat16)
    streams = {"use_stream": True, "record_stream": True} if device.type == "cuda" else {}
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    resident = {"diffusers_leaf": [], "diffusers_block": ends, "diffusers_filled": [*ends, *_fitting(job, model, device)]}[job.system]
    with left_out(model, resident):
        if job.system == "diffusers_block":
            apply_group_offloading(model.model, device, offload_type="block_level", num_blocks_per_group=1, **streams)
        else:
            apply_group_offloading(model, device, offload_type="leaf_level", **streams)
    for module in resident:
        module.to(device)
    return model


def _fitting(job: Job, model: nn.Module, device: torch.device) -> Sequence[nn.Module]:
    """The first decoder layers that fit beside the embedding, the head and the two largest leaves of a layer on their way."""
    layers = model.model.layers
    if device.type != "cuda":
        return []
    ends = {p: p.nbytes for m in (model.get_input_embeddings(), model.get_output_embeddings()) for p in m.parameters()}
    sizes = [sum(p.nbytes for p in layer.parameters()) for layer in layers]
    moving = 2 * max(p.nbytes for p in layers[0].parameters())
    count = int((weights_room_bytes(job, model.config) - sum(ends.values()) - moving) // max(sizes))
    return list(layers[: max(0, min(count, len(layers) - 1))])


@contextmanager
def left_out(model: nn.Module, modules: Sequence[nn.Module]) -> Iterator[None]:
    """While this lasts, ``modules`` are not found inside ``model``; their places keep their names and order."""
    wanted = {id(m) for m in modules}
    places = [(parent, name, m) for parent in model.modules() for name, m in parent.named_children() if id(m) in wanted]
    for parent, name, _ in places:
        parent._modules[name] = nn.Identity()
    try:
        yield
    finally:
        for parent, name, module in places:
            parent._modules[name] = module
