"""Servers that others wrote, beside ours: as many clients, the same requests."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.cases import Row
from bench.clients import COMPLETIONS, closed_loop
from bench.gguf_synth import dense_gguf
from bench.llama_layers import Split
from bench.llama_programs import LlamaPrograms, environment
from bench.llama_side import Best, LlamaSide
from bench.serve_plans import ServePlans, settled, whole
from bench.sse import Address, fetch
from penstock.planner.common.measures import parse_bytes

CLIENTS = 16
PASS, LOADED = 512, "none"
"""Tokens of a pass of llama.cpp's server; how it loads: into page-locked memory, which long passes copy fast."""
LLAMA = (
    "-np", str(CLIENTS), "-cb", "-fa", "on", "-ub", str(PASS), "-lm", LOADED, "-fit", "off", "--cache-ram", "0", "--no-webui",
    "--host", "127.0.0.1",
)  # fmt: skip
"""Nothing is fitted by itself, and no prompt is kept when its request has ended: none comes again."""
NOT_KEPT = {"cache_prompt": False}
"""The two that warm it up come again."""
MODES: Mapping[str, Sequence[str]] = {"continuous batching": ("--continuous-batching",), "a generate each": ()}
"""How transformers serves -> its arguments."""


class Peers:
    """Cases `llama` and `transformers`."""

    def __init__(self, rig: ServePlans):
        self.rig = rig
        self.requests = CLIENTS * int(rig.given.get("peer_requests", "4"))

    def llama(self) -> Iterator[Row]:
        """Both with the same VRAM, as much of llama.cpp's model in it as fits, by what its server took."""
        if "llama" not in self.rig.given or self.rig.given.get("form", "bf16") != "bf16":
            raise SystemExit("cases=llama: give the directory of llama.cpp's programs, llama=DIR; it serves BF16")
        programs = LlamaPrograms(Path(self.rig.given["llama"]), self.rig.hybrid.card)
        program = programs.program("llama-server")
        cores, bodies = self.rig.hybrid.cores, self.rig.bodies("any", self.requests, seed="llama")
        usual = f"{max(1, cores // 2)},{max(1, cores * 3 // 4)},{cores}"
        threads = [int(count) for count in self.rig.given.get("peer_threads", usual).split(",")]
        room = CLIENTS * (self.rig.prompt + self.rig.new + 32)
        config = json.loads((self.rig.checkpoint / "config.json").read_text())
        budget = parse_bytes(self.rig.given.get("vram", "6GiB")) if self.rig.hybrid.card else None
        side = LlamaSide(programs, dense_gguf(config), self.rig.bench.work / "llama-server.gguf", budget, threads)

        def run(split: Split, counts: Sequence[int], asked: Sequence[dict[str, Any]]) -> tuple[dict[int, Best], int]:
            found = {}
            for count in counts:
                command = [str(program), "-m", str(side.file), *split.flags, *LLAMA, "-c", str(room)]
                with programs.used() as used:
                    rate = self._rate(
                        "llama-server", [*command, "-t", str(count)], [body | NOT_KEPT for body in asked], environment(program)
                    )
                found[count] = Best(rate, count, LOADED, split, used.most_bytes)
                print(f"    llama-server {found[count]}: {rate:.4g} tok/s", flush=True)
            return found, max(one.vram_bytes for one in found.values())

        with side.written():
            trial, whole_run = partial(run, counts=threads[-1:], asked=bodies[:2]), partial(run, counts=threads, asked=bodies)
            best = max(side.within(side.layers(room), PASS, trial, whole_run).values(), key=lambda one: one.tokens_s)
        mine = settled(self.rig.load(*self.rig.server(self.rig.path), CLIENTS, self.requests, seed="llama"), CLIENTS)
        what = f"{CLIENTS} clients, {self.requests} requests; {best}"
        yield self.rig.row("over llama.cpp's server", what, mine, best.tokens_s, "tok/s", ">= 1.3" if self.rig.hybrid.card else "")

    def transformers(self) -> Iterator[Row]:
        """Prompts are text, which is all that it takes."""
        server, name = self.rig.server(self.rig.path)
        bodies = [{"model": name, "prompt": text, "max_tokens": self.rig.new, "temperature": 0, "stream": True} for text in self._texts]
        asked = [body | {"ignore_eos": True, "stream_options": {"include_usage": True}} for body in bodies]
        mine = settled(whole(asyncio.run(closed_loop(server.address, COMPLETIONS, asked, CLIENTS)), server), CLIENTS)
        exact = json.dumps({"max_new_tokens": self.rig.new, "min_new_tokens": self.rig.new, "do_sample": False})
        model = str(self.rig.checkpoint)
        theirs = [body | {"model": model, "generation_config": exact} for body in bodies]
        command = [str(Path(sys.executable).with_name("transformers")), "serve", model, "--host", "127.0.0.1"]
        for mode, arguments in MODES.items():
            rate = self._rate("transformers-serve", [*command, *arguments], theirs)
            what = f"{CLIENTS} clients, {self.requests} requests of {self.rig.new} tokens; {mode}"
            yield self.rig.row(f"over transformers serve {version('transformers')}", what, mine, rate, "tok/s", "")

    @cached_property
    def _texts(self) -> list[str]:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.rig.checkpoint)
        return [tokenizer.decode(body["prompt"]) for body in self.rig.bodies("any", self.requests, seed="transformers")]

    def _rate(self, name: str, command: Sequence[str], bodies: Sequence[Mapping[str, Any]], env: Mapping[str, str] | None = None) -> float:
        """Tokens a second of a server that ``command`` starts. SystemExit where it fails, or a reply has not all its tokens."""
        self.rig.machine_alone()
        log, port = self.rig.bench.work / f"{name}.log", free_port()
        with log.open("wb") as out, subprocess.Popen([*command, "--port", str(port)], stdout=out, stderr=out, env=env) as process:
            try:
                address = Address("127.0.0.1", port)
                asyncio.run(answered(address, process, log))
                asyncio.run(closed_loop(address, COMPLETIONS, bodies[:2], 2))
                replies = asyncio.run(closed_loop(address, COMPLETIONS, bodies, CLIENTS))
            finally:
                process.kill()
        if failed := [reply.error or f"status {reply.status}" for reply in replies if reply.error or reply.status != 200]:
            raise SystemExit(f"{name}: {failed[0]}")  # transformers ends a stream without [DONE], so that none of its replies is whole
        if short := [reply.tokens for reply in replies if reply.tokens != self.rig.new]:
            raise SystemExit(f"{name}: {len(short)} of {len(replies)} replies have {short[0]} tokens or so, not {self.rig.new}")
        return settled(replies, CLIENTS)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def answered(address: Address, process: subprocess.Popen[bytes], log: Path, within_s: int = 240) -> None:
    """Until a server that is not ours takes requests."""
    for _ in range(within_s * 5):
        if process.poll() is not None:
            raise SystemExit(f"it ended: {log.read_text(errors='replace')[-800:]}")
        try:
            if (await fetch(address, "/health"))[0] == 200:
                return
        except (OSError, EOFError):
            pass
        await asyncio.sleep(0.2)
    raise SystemExit(f"not ready after {within_s} s: {log.read_text(errors='replace')[-800:]}")
