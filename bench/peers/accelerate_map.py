"""accelerate: as many layers on the card as fit, the others in DRAM or on disk, each copied in when its turn comes."""

from __future__ import annotations

import psutil
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from bench.peers.peer import Job, Measured
from bench.peers.timing import measure_model, weights_room_bytes


def measure(job: Job) -> Measured:
    return measure_model(job, load)


def load(job: Job, device: torch.device) -> nn.Module:
    """``device_map="auto"`` with ``max_memory``: DRAM is 0 bytes for the disk variant, which reads the safetensors in place."""
    dram = 0 if job.system == "accelerate_disk" else job.dram_bytes or psutil.virtual_memory().available
    room: dict[int | str, int] = {"cpu": dram}
    if device.type == "cuda":
        room = {0: weights_room_bytes(job, AutoConfig.from_pretrained(job.checkpoint)), **room}
    return AutoModelForCausalLM.from_pretrained(
        job.checkpoint, dtype=torch.bfloat16, device_map="auto", max_memory=room, offload_folder=str(job.scratch)
    )
