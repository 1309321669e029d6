"""The ``runtime`` program: execute a plan on a real checkpoint, and make the checkpoints and stores that it reads."""

from __future__ import annotations

import hydra

from penstock.planner.common.command.app import CONFIG, Program, Verb, job
from penstock.runtime.asked.run_schema import (
    BenchConfig,
    ChatConfig,
    FetchConfig,
    KvConfig,
    PackConfig,
    RunConfig,
    SynthConfig,
    VerifyConfig,
)
from penstock.runtime.memory.kernels import keep_few_kernels
from penstock.runtime.serve.serve_schema import ServeConfig


@hydra.main(version_base="1.3", config_path=CONFIG, config_name="run")
@job
def run(cfg: RunConfig) -> None:
    """generate text by a plan, and report predicted against measured"""
    from penstock.runtime.tools.runtime_verbs import run_verb

    run_verb(cfg)


@hydra.main(version_base="1.3", config_path=CONFIG, config_name="chat")
@job
def chat(cfg: ChatConfig) -> None:
    """talk with a model in the terminal, by a plan or by one that is solved first"""
    from penstock.runtime.tools.runtime_verbs import chat_verb

    chat_verb(cfg)


@hydra.main(version_base="1.3", config_path=CONFIG, config_name="serve")
@job
def serve(cfg: ServeConfig) -> None:
    """answer clients of OpenAI's and Anthropic's interfaces, many at once, by a plan or by one that is solved first"""
    from penstock.runtime.serve.serve_verb import serve_verb

    serve_verb(cfg)


@hydra.main(version_base="1.3", config_path=CONFIG, config_name="bench")
@job
def bench(cfg: BenchConfig) -> None:
    """measure a model with its weights in VRAM, in DRAM, and streamed from either or from the SSD"""
    from penstock.runtime.tools.runtime_verbs import bench_verb

    bench_verb(cfg)


@hydra.main(version_base="1.3", config_path=CONFIG, config_name="fetch")
@job
def fetch(cfg: FetchConfig) -> None:
    """download a model from the Hugging Face hub, checked, and going on where an earlier download ended"""
    from penstock.runtime.tools.fetch_verb import fetch_verb

    fetch_verb(cfg)


@hydra.main(version_base="1.3", config_path=CONFIG, config_name="pack")
@job
def pack(cfg: PackConfig) -> None:
    """rewrite a checkpoint as a packed store: units contiguous, aligned and checksummed"""
    from penstock.runtime.tools.runtime_verbs import pack_verb

    pack_verb(cfg)


@hydra.main(version_base="1.3", config_path=CONFIG, config_name="verify")
@job
def verify(cfg: VerifyConfig) -> None:
    """read a packed store and compare every unit with its checksum"""
    from penstock.runtime.tools.runtime_verbs import verify_verb

    verify_verb(cfg)


@hydra.main(version_base="1.3", config_path=CONFIG, config_name="kv")
@job
def kv(cfg: KvConfig) -> int:
    """list, verify or clear a directory of KV pages"""
    from penstock.runtime.tools.kv_verb import kv_verb

    return kv_verb(cfg)


@hydra.main(version_base="1.3", config_path=CONFIG, config_name="synth")
@job
def synth(cfg: SynthConfig) -> None:
    """make a checkpoint of a model's geometry with random weights"""
    from penstock.runtime.tools.runtime_verbs import synth_verb

    synth_verb(cfg)


RUN = ("plan", "checkpoint", "prompt", "prompts", "max_new_tokens", "temperature", "kv.dir", "quiet", "trace", "out")
CHAT = (
    "model",
    "model.checkpoint",
    "plan",
    "hardware",
    "hardware.vram_bytes",
    "system",
    "template",
    "max_new_tokens",
    "temperature",
    "quiet",
)
SERVE = (
    "model",
    "model.checkpoint",
    "plan",
    "hardware",
    "host",
    "port",
    "keys",
    "auth",
    "drain_s",
    "kv.dir",
)
"""The keys that help begins with."""

PROGRAM = Program(
    "runtime",
    "executes a plan on a real checkpoint, measures, and says where the plan was wrong.",
    (
        Verb(
            run,
            RunConfig,
            'runtime run plan=plan.yaml prompt="Once upon a time" max_new_tokens=64',
            reads_wsm=True,
            used=RUN,
            figures={"tokens/s": "decode_tokens_per_s", "predicted/measured": "ratio.decode_tokens_per_s", "bound by": "bottleneck_decode"},
        ),
        Verb(chat, ChatConfig, "runtime chat model=hf model.checkpoint=Llama-3.1-8B-Instruct", instead="plan", used=CHAT),
        Verb(serve, ServeConfig, "runtime serve plan=plan.yaml host=127.0.0.1 port=8000", instead="plan", used=SERVE),
        Verb(
            bench,
            BenchConfig,
            "runtime bench model=hf model.checkpoint=Llama-3.1-8B workload.new_tokens=32 modes=[stream,mixed]",
            reads_wsm=True,
            used=("hardware", "model", "model.checkpoint", "workload.prompt_tokens", "workload.new_tokens", "modes", "rounds", "out"),
        ),
        Verb(fetch, FetchConfig, "runtime fetch Qwen/Qwen3-30B-A3B out=qwen3-30b-a3b", words=("name",)),
        Verb(pack, PackConfig, "runtime pack checkpoint=Llama-3.1-8B out=Llama-3.1-8B.packed"),
        Verb(verify, VerifyConfig, "runtime verify Llama-3.1-8B.packed", words=("store",)),
        Verb(kv, KvConfig, "runtime kv list", words=("action",)),
        Verb(synth, SynthConfig, "runtime synth model=llama8b model.layers=4 out=short-llama", used=("model", "model.layers", "out")),
    ),
)


def main() -> None:
    """Entry point of the ``runtime`` console script."""
    keep_few_kernels()
    PROGRAM.main()
