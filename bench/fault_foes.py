"""Clients that mean no good: they read nothing, say nothing, send headers without end, or two requests as one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence

from bench.cases import Row
from bench.clients import COMPLETIONS
from bench.fault_rig import FaultRig, left_under_way
from bench.known import Known
from bench.serve_rig import Server
from bench.smuggled import said_to, smuggling
from bench.sse import Address, ask


class Foes:
    """Cases `never_reads`, `silent`, `headers` and `smuggled`."""

    def __init__(self, rig: FaultRig):
        self.rig = rig

    def never_reads(self) -> Iterator[Row]:
        """Long replies that nobody reads; others are answered meanwhile, and all is given back."""
        with self.rig.server("never_reads", "limits.stalled_s=2") as server:
            name, known = self.rig.known(server)
            body = known[0].body(name, stream=True, max_tokens=200, logprobs=5, n=8)
            wrong = asyncio.run(self._unread(server, name, body, known))
        yield self.rig.row("clients that never read", "16 of them, 8 long replies each; others meanwhile", wrong, 16 + len(known))

    async def _unread(self, server: Server, name: str, body: Mapping[str, object], known: Sequence[Known]) -> list[str]:
        content, held = json.dumps(body).encode(), []
        for _ in range(16):
            reader, writer = await asyncio.open_connection(server.address.host, server.address.port, limit=1)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(server.address.head("POST", COMPLETIONS, content) + content)
            held.append(writer)
        wrong = []
        for one in known:
            reply = await asyncio.wait_for(ask(server.address, COMPLETIONS, one.body(name)), 120)
            if not reply.answered or one.wrong(reply):
                wrong.append(str(one.wrong(reply) or reply.error))
        for writer in held:
            writer.transport.abort()
        return wrong + await left_under_way(server)

    def silent(self) -> Iterator[Row]:
        with self.rig.server("silent", "limits.headers_s=3", "limits.connections_per_address=2000") as server:
            name, known = self.rig.known(server)
            wrong = asyncio.run(self._silence(server.address, name, known))
        yield self.rig.row("1,000 silent connections", "others meanwhile; closed after limits.headers_s", wrong, 1000 + len(known))

    async def _silence(self, address: Address, name: str, known: Sequence[Known]) -> list[str]:
        pairs = [await asyncio.open_connection(address.host, address.port) for _ in range(1000)]
        wrong = []
        for one in known:
            reply = await asyncio.wait_for(ask(address, COMPLETIONS, one.body(name)), 60)
            if not reply.answered or one.wrong(reply):
                wrong.append(str(one.wrong(reply) or reply.error))

        async def ends(reader: asyncio.StreamReader) -> str | None:
            try:
                await asyncio.wait_for(reader.read(), 30)
            except TimeoutError:
                return "a silent connection is still open after 30 s"
            except OSError:
                pass
            return None

        wrong += [said for said in await asyncio.gather(*(ends(reader) for reader, _ in pairs)) if said]
        for _, writer in pairs:
            writer.close()
        return wrong

    def headers(self) -> Iterator[Row]:
        with self.rig.server("headers") as server:
            name, known = self.rig.known(server, 4)
            long = b"GET /health HTTP/1.1\r\nHost: x\r\n"
            requests = {
                "one of 1 MB": long + b"X: " + b"a" * (1 << 20) + b"\r\n\r\n",
                "many": long + b"".join(b"X-%d: %s\r\n" % (k, b"b" * 100) for k in range(10_000)) + b"\r\n",
                "a path of 1 MB": b"GET /" + b"c" * (1 << 20) + b" HTTP/1.1\r\nHost: x\r\n\r\n",
                "no end": long + b"X: " + b"d" * (1 << 20),
            }
            wrong = []
            for what, sent in requests.items():
                statuses = asyncio.run(said_to(server.address, sent))
                wrong += [f"{what}: answered {statuses}"] if any(status < 400 for status in statuses) else []
            wrong += self.rig.judged(server, name, known)
        yield self.rig.row("headers of 1 MB", ", ".join(requests), wrong, len(requests) + len(known))

    def smuggled(self) -> Iterator[Row]:
        with self.rig.server("smuggled") as server:
            name, known = self.rig.known(server, 4)
            wrong = []
            for what, sent in smuggling(name).items():
                statuses = asyncio.run(said_to(server.address, sent))
                if len([status for status in statuses if status < 400]) > 0 or len(statuses) > 1:
                    wrong.append(f"{what}: answered {statuses}")
            wrong += self.rig.judged(server, name, known)
        yield self.rig.row("smuggled requests", ", ".join(smuggling("")), wrong, len(smuggling("")) + len(known))
