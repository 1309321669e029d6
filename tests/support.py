"""Small machines, plans and checkpoints that tests of both wings use."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.planner.contract.decided.decisions import (
    CachePolicy,
    Decisions,
    DramWeights,
    ExpertSlots,
    H2dCopies,
    KvPages,
    ResidentUnits,
    SsdReads,
    Tier,
    VramWeights,
    WeightDecisions,
)
from penstock.planner.contract.experts.expert_slots import fewest_slots
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.hardware import Gpu, HardwareProfile, SsdPoint
from penstock.planner.contract.given.workload import Objective, Workload
from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.memory.bare_copies import DriverCalls
from penstock.runtime.memory.pieces import Segment

GPU = Gpu(
    name="a card",
    context_bytes=0,
    dense_tflops=100.0,
    attention_tflops=50.0,
    memory_gbps=500.0,
    h2d=Curve(((1 << 20, 20.0), (64 << 20, 25.0))),
    d2h=Curve(((1 << 20, 20.0), (64 << 20, 25.0))),
    h2d_pageable_gbps=5.0,
    h2d_with_d2h_gbps=20.0,
)


def machine(gpu: bool = False, **changes: object) -> HardwareProfile:
    """A plausible machine; ``changes`` replace its fields."""
    profile = HardwareProfile(
        name="test",
        vram_bytes=8 << 30 if gpu else 0,
        dram_bytes=16 << 30,
        ssd_bytes=256 << 30,
        ssd_read=(SsdPoint(1 << 20, 4, 2.0), SsdPoint(4 << 20, 4, 3.0)),
        ssd_write_gbps=1.0,
        dram_copy_gbps=10.0,
        dram_bus_gbps=80.0,
        pin_s_per_gb=0.2,
        cpu_cores=2,
        cpu_matvec_gbps=15.0,
        cpu_dense_tflops=0.2,
        layer_launch_s=2e-4,
        gpu=GPU if gpu else None,
    )
    return replace(profile, **changes)


def workload(**changes: object) -> Workload:
    """Batch 1, 16 tokens in, 8 out."""
    base = Workload("test", 1, 16, 8, 1, 0, Objective.latency, 0, 0, False)
    return replace(base, **changes)


def decisions(
    resident: tuple[int, int, int] = (0, 0, 0),
    slots: int = 4,
    vram_distance: int = 2,
    cap: int = 1,
    hwm: int = 4,
    distance: int = 3,
    policy: CachePolicy = CachePolicy.pinned,
    embedding: Tier = Tier.dram,
    head_blocks: int = 1,
    batch: int = 1,
    pages: int = 64,
    gpu: bool = False,
    prefill_chunk_tokens: int = 1 << 20,
    experts: ExpertSlots | None = None,
    ffn_slots: int = 0,
) -> Decisions:
    """Decisions written down by hand, for runs whose plan is not the point."""
    return Decisions(
        weights=WeightDecisions(
            policy=policy,
            embedding=embedding,
            head_blocks=head_blocks,
            vram=VramWeights(ResidentUnits(*resident), slots if gpu else 0, vram_distance if gpu else 0, ffn_slots),
            dram=DramWeights(cap, hwm, distance, cap if policy is CachePolicy.pinned else 0),
            ssd=SsdReads(1 << 18, 2, 1 << 20),
            h2d=H2dCopies(1 << 16, 2),
        ),
        kv=KvPages(16, pages if gpu else 0, 0 if gpu else pages, 0),
        experts=experts,
        batch=batch,
        prefill_chunk_tokens=prefill_chunk_tokens,
    )


def plan_for(checkpoint: Path, made: Decisions, gpu: bool = False, work: Workload | None = None) -> Plan:
    """A plan for a checkpoint with decisions made by hand, their KV pages those of each layer. Experts get slots for some of them where
    nothing is said."""
    hardware, model, work = machine(gpu), spec_from_checkpoint(checkpoint), work or workload()
    if model.experts and made.experts is None:
        some = min(model.experts.units, fewest_slots(model.experts) + 2)
        made = replace(made, experts=ExpertSlots(some if gpu else 0, max(some, model.experts.units // 2), chunk_bytes=1 << 16))
    pages = {f"{tier}_pages": made.kv.of(tier) * model.layers for tier in Tier}
    made = replace(made, kv=replace(made.kv, **pages))
    return Plan(hardware, model, work, made, predict(hardware, model, work, made))


def save_tiny(
    directory: Path,
    model_type: str = "llama",
    tied: bool = False,
    layers: int = 6,
    seed: int = 0,
    shard: str = "50GB",
    **more: object,
) -> Path:
    """A random BF16 checkpoint of a few hundred kB, saved by transformers; returns ``directory``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": tied,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    moe = {
        "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True},
    }
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **(sizes | moe.get(model_type, {}) | more))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, std=0.05) if "norm" not in name else torch.nn.init.normal_(p, mean=1.0, std=0.05)
    model.save_pretrained(directory, max_shard_size=shard)
    return directory


def add_further_head(checkpoint: Path, seed: int = 7, still: bool = False) -> Path:
    """``checkpoint`` with a head behind its last layer that predicts further tokens, as DeepSeek-V3 and GLM-4.5 store one; random.

    With ``still`` neither the layers nor the head add anything to a token's embedding, so each token has one that follows it, which the
    head knows."""
    import json

    from safetensors.torch import load_file, save_file

    config = json.loads((checkpoint / "config.json").read_text())
    layers, stored, draw = config["num_hidden_layers"], load_file(checkpoint / "model.safetensors"), torch.Generator().manual_seed(seed)

    def like(name: str, shape: Iterable[int]) -> torch.Tensor:
        return (torch.randn(*shape, generator=draw) * 0.05 + ("norm" in name)).to(torch.bfloat16)

    own, last, width = f"model.layers.{layers}.", f"model.layers.{layers - 1}.", config["hidden_size"]
    more = {own + name.removeprefix(last): like(name, t.shape).to(t.dtype) for name, t in stored.items() if name.startswith(last)}
    more |= {f"{own}{name}.weight": like(name, [width]) for name in ("enorm", "hnorm", "shared_head.norm")}
    more[f"{own}eh_proj.weight"] = like("eh_proj", [width, 2 * width])
    more[f"{own}embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
    more[f"{own}shared_head.head.weight"] = stored["lm_head.weight"].clone()
    if still:
        for name, tensor in (stored | more).items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
            elif name.endswith(("enorm.weight", "shared_head.norm.weight")) or name == "model.norm.weight":
                tensor.fill_(1.0)
        more[f"{own}eh_proj.weight"] = torch.eye(width, 2 * width, dtype=torch.bfloat16)
    save_file(stored | more, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return checkpoint


class HostLane:
    """Copies at once."""

    def copy(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for dst, src in copies:
            dst.copy_(src)

    def event(self) -> float:
        return time.perf_counter()

    def waits(self, event: float) -> None:
        pass


class HostCopier:
    """A copy device whose VRAM is host memory: copies happen at once, so a wrong order shows as wrong bytes."""

    copiers = threading.local()

    def twin(self) -> HostCopier:
        return self

    def lane(self) -> HostLane:
        return HostLane()

    def launch(self, kernel: Callable[[], None]) -> None:
        kernel()

    def holds(self, tensor: torch.Tensor) -> bool:
        return True

    @contextmanager
    def copying(self) -> Iterator[None]:
        self.copiers.inside = True
        yield
        self.copiers.inside = False

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        assert getattr(self.copiers, "inside", False), "a copy outside copying() would go to the compute stream"
        dst.copy_(src)

    def copy_parts(self, into: torch.Tensor, source: torch.Tensor, segments: Iterable[Segment]) -> None:
        with self.copying():
            for s in segments:
                self.copy(into[s.dst : s.dst + s.nbytes], source[s.src : s.src + s.nbytes])

    def driver_calls(self) -> DriverCalls | None:
        """Only Python queues copies here."""
        return None

    def in_one_piece(self, begin: int, nbytes: int) -> bool:
        return True

    def event_ahead(self) -> tuple[float, int]:
        raise NotImplementedError

    def copy_event(self) -> float:
        return time.perf_counter()

    def compute_event(self) -> float:
        return time.perf_counter()

    def idle_point(self) -> float:
        return time.perf_counter()

    def copy_waits(self, event: float) -> None:
        pass

    def compute_waits(self, event: float) -> None:
        pass

    def compute_waits_for(self, flag: torch.Tensor, value: int) -> None:
        while int(flag[0]) < value:
            time.sleep(1e-5)

    def compute_writes(self, flag: torch.Tensor, value: int) -> None:
        flag[0] = value

    def host_waits(self, event: float) -> None:
        pass

    def alias(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def done(self, event: float) -> bool:
        return True

    def note_done(self, events: Iterable[float]) -> None:
        pass

    def time_of(self, event: float) -> float:
        return event


ENTER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
RECORD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
WAIT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
WORD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
"""The driver's calls, as threads without Python make them."""


class CarryingCopier(HostCopier):
    """The same, whose copies readers queue, too; ``carried`` counts those. With ``words`` kernels wait for what has not been read: here
    whoever launches them does, ``unread`` times."""

    def __init__(self, words: bool = False) -> None:
        self.carried = self.unread = 0
        plain = ENTER(lambda context: 0), COPY(self._carried), RECORD(lambda event, stream: 0), WAIT(lambda stream, event, flags: 0)
        self._calls = *plain, WORD(self._written), WORD(self._reached)
        self._word = ctypes.c_uint32(0)
        self._words = words

    def driver_calls(self) -> DriverCalls | None:
        enter, copy, record, wait, write, until = (ctypes.cast(call, ctypes.c_void_p).value or 0 for call in self._calls)
        return DriverCalls(enter, 0, copy, record, 0, wait, 0, write, until, ctypes.addressof(self._word) if self._words else 0)

    def _written(self, stream: int, word: int, value: int, flags: int) -> int:
        ctypes.c_uint32.from_address(word).value = value
        return 0

    def _reached(self, kernels: int, word: int, value: int, flags: int) -> int:
        self.unread += 1
        while self._word.value < value:
            time.sleep(1e-5)
        return 0

    def event_ahead(self) -> tuple[float, int]:
        return time.perf_counter(), 0

    def _carried(self, to: int, source: int, nbytes: int, stream: int) -> int:
        ctypes.memmove(to, source, nbytes)
        self.carried += 1
        return 0


def with_tokenizer(checkpoint: Path, template: str | None = None) -> Path:
    """``checkpoint`` with a tokenizer that has a token for each byte; ``template`` is its chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: k for k, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template).save_pretrained(checkpoint)
    return checkpoint
