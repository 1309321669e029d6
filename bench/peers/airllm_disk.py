"""AirLLM: one file a layer on disk; each is read, page-locked and copied when its turn comes, the next read meanwhile."""

from __future__ import annotations

import torch
from torch import nn

from bench.peers.peer import Job, Measured
from bench.peers.timing import measure_model


def measure(job: Job) -> Measured:
    """The checkpoint is split into its files first: a second copy on disk, in no figure."""
    from airllm.utils import split_and_save_layers

    split_and_save_layers(job.checkpoint, layer_shards_saving_path=job.scratch)
    return measure_model(job, load)


def load(job: Job, device: torch.device) -> nn.Module:
    from airllm import AirLLMBaseModel

    class WithoutTokenizer(AirLLMBaseModel):
        """Token ids go in and come out."""

        def get_tokenizer(self, hf_token=None):
            return None

    name = f"cuda:{device.index}" if device.type == "cuda" else "cpu"
    return WithoutTokenizer(job.checkpoint, device=name, dtype=torch.bfloat16, layer_shards_saving_path=job.scratch).model
