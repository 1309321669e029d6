"""Servers that others wrote, beside ours: as many clients, the same requests."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.cases import Row
from bench.clients import COMPLETIONS, closed_loop
from bench.serve_plans import ServePlans, settled, whole
from bench.sse import Address, fetch
from penstock.planner.common.measures import parse_bytes

CLIENTS = 16
MODES: Mapping[str, Sequence[str]] = {"continuous batching": ("--continuous-batching",), "a generate each": ()}
"""How transformers serves -> its arguments."""


class Peers:
    """Cases `llama` and `transformers`."""

    def __init__(self, rig: ServePlans):
        self.rig = rig
        self.requests = CLIENTS * int(rig.given.get("peer_requests", "4"))

    def llama(self) -> Iterator[Row]:
        """Both with the same VRAM, as much of llama.cpp's model in it as fits."""
        program, gguf = self.rig.given.get("llama_server"), self.rig.given.get("gguf")
        if not program or not gguf:
            raise SystemExit("cases=llama: give llama_server=PATH and gguf=FILE, the same geometry in the same format")
        cores, layers, bodies = self.rig.hybrid.cores, self._llama_layers(), self.rig.bodies("any", self.requests, seed="llama")
        threads = self.rig.given.get("peer_threads", f"{max(1, cores // 4)},{max(1, cores // 2)},{cores}").split(",")
        room = CLIENTS * (self.rig.prompt + self.rig.new + 32)
        command = [program, "-m", gguf, "-np", str(CLIENTS), "-cb", "-c", str(room), "-ngl", layers, "--host", "127.0.0.1", "--no-webui"]
        theirs = {count: self._rate("llama-server", [*command, "-t", count], bodies) for count in dict.fromkeys(threads)}
        best = max(theirs, key=theirs.__getitem__)
        mine = settled(self.rig.load(*self.rig.server(self.rig.path), CLIENTS, self.requests, seed="llama"), CLIENTS)
        each = ", ".join(f"{count}: {rate:.3g}" for count, rate in theirs.items())
        what = f"{CLIENTS} clients; {best} threads, -ngl {layers}: {each}"
        yield self.rig.row("over llama.cpp's server", what, mine, theirs[best], "tok/s", ">= 1.3" if self.rig.hybrid.card else "")

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

    def _llama_layers(self) -> str:
        """Of the model, that fit into the VRAM beside KV of all rows and a GiB of scratch and context; none without a card."""
        if "ngl" in self.rig.given or not self.rig.hybrid.card:
            return self.rig.given.get("ngl", "0")
        model, kv_tokens = self.rig.served.model, CLIENTS * (self.rig.prompt + self.rig.new)
        layer = model.weight_bytes / model.layers + kv_tokens * model.kv_bytes_per_token / model.layers
        return str(max(0, int(((parse_bytes(self.rig.given.get("vram", "6GiB")) or 0) - (1 << 30)) // layer)))

    def _rate(self, name: str, command: Sequence[str], bodies: Sequence[Mapping[str, Any]]) -> float:
        """Tokens a second of a server that ``command`` starts. SystemExit where it fails, or a reply has not all its tokens."""
        self.rig.machine_alone()
        log, port = self.rig.bench.work / f"{name}.log", free_port()
        with log.open("wb") as out, subprocess.Popen([*command, "--port", str(port)], stdout=out, stderr=out) as process:
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
