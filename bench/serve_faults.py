"""A server on its bad days: each case counts what went wrong, and none may.

    python bench/serve_faults.py checkpoint=DIR work=bench-work out=serve-faults.json cases=engine,front engine=200 front=50
    python bench/serve_faults.py checkpoint=DIR cases=storm requests=10000
    python bench/serve_faults.py checkpoint=DIR cases=disk,clock,never_reads,silent,headers,smuggled,template,characters

`engine`: SIGKILLs of the engine under load, with `kv.dir`; replies end in an error event or are right, then and afterwards. `hang`:
SIGSTOPs, found after `hang_s`. `front`: SIGKILLs of the front; the engine ends within 5 s. `disk`: the directory of pages takes no more
bytes. `clock`: the wall clock jumps by days. `never_reads`: clients that read nothing of long replies. `silent`: 1,000 connections that say
nothing. `headers`: of 1 MB. `smuggled`: requests inside bodies, behind headers that may be read in two ways. `template`: a chat template
that raises. `characters`: replies cut within emoji and CJK. `storm`: `requests` of 64 clients, of whom some go away, read slowly or send
what is no request (bench/serve_storm.py).

`checkpoint` is a trained one with a byte-level tokenizer: replies are compared, so no token of them may be a tie. Runs on the CPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from random import Random
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cases import Row, chosen, run_cases  # noqa: E402
from bench.clients import CHAT, COMPLETIONS, model_name  # noqa: E402
from bench.hybrid import profile_of  # noqa: E402
from bench.keys import given_of  # noqa: E402
from bench.known import Known, known_replies, words  # noqa: E402
from bench.link import Bench, machine  # noqa: E402
from bench.serve_rig import Server  # noqa: E402
from bench.serve_storm import Storm, Weather  # noqa: E402
from bench.smuggled import said_to, smuggling  # noqa: E402
from bench.sse import Address, Reply, ask  # noqa: E402
from penstock.planner.common.errors import UserError  # noqa: E402

KEYS = ("checkpoint", "work", "out", "cases", "engine", "hang", "front", "requests", "clients", "seed", "new")
CASES = ("engine", "hang", "front", "disk", "clock", "never_reads", "silent", "headers", "smuggled", "template", "characters", "storm")
CLIENTS = 8
GONE_S = 5.0
"""Within which an engine ends whose front has gone."""
SETTLED_S = 3.0
HANG_S = 5.0
ANY_GBPS = 100
FLAT = 0.02
FROM = 2000
"""The request from which on memory is flat, of 10,000."""
HEAD = "\n".join(words(f"head {k}", 16) for k in range(12)) + "\n"
"""Long enough for pages to be kept of it."""
RAISES = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}{{ m.content }}{% endfor %}"
JUMPING = """
import random, time
real, draw = time.time, random.Random(1)
def jumping():
    return real() + draw.uniform(-86400 * 400, 86400 * 400)
time.time = jumping
time.time_ns = lambda: int(jumping() * 1e9)
"""
"""As sitecustomize.py: each look at the wall clock is off by up to 400 days, this way or that."""
WHALES = "\U0001f40b鯨\U0001f469\u200d\U0001f680漢字é"


class Faults:
    def __init__(self, bench: Bench, given: Mapping[str, str]):
        self.bench, self.given = bench, given
        self.draw = Random(given.get("seed", "0"))

    # ---- servers

    @cached_property
    def checkpoint(self) -> Path:
        """A copy with a template that raises where a system speaks."""
        path = self.bench.work / "served"
        if not path.exists():
            shutil.copytree(Path(self.given["checkpoint"]).expanduser(), path, copy_function=shutil.copy)
            (path / "chat_template.jinja").write_text(RAISES)
        return path

    @cached_property
    def plan(self) -> Path:
        path = self.bench.work / "faults.yaml"
        if not path.exists():
            asked = {"clients": 16, "prompt_tokens": 256, "new_tokens": 64, "queue": 256, "kept_tokens": 8192}
            keys = ["hardware=local", "model=hf", f"model.checkpoint={self.checkpoint}", "workload=serve", f"out={path}"]
            self.bench.call("planner", "solve", *keys, *(f"workload.{key}={value}" for key, value in asked.items()))
        return path

    @contextmanager
    def server(self, name: str, *keys: str, env: Mapping[str, str] | None = None) -> Iterator[Server]:
        with Server(self.bench.work / f"{name}.log", f"plan={self.plan}", *keys, env={**self.bench.env, **(env or {})}) as server:
            yield server

    def known(self, server: Server, count: int = 12) -> tuple[str, list[Known]]:
        name = asyncio.run(model_name(server.address))
        return name, asyncio.run(known_replies(server.address, name, count, int(self.given.get("new", "12")), HEAD))

    def judged(self, server: Server, name: str, known: Sequence[Known]) -> list[str]:
        """What is wrong when each is asked once more, one after the other: now all must be answered."""

        async def all_of_them() -> list[str]:
            found = []
            for one in known:
                reply = await ask(server.address, COMPLETIONS, one.body(name))
                if wrong := one.wrong(reply) or (None if reply.answered else f"not answered: {reply.status} {reply.error}"):
                    found.append(wrong)
            return found

        return asyncio.run(all_of_them())

    # ---- rows

    def row(self, case: str, what: str, wrong: Sequence[str], tries: int) -> Row:
        for one in wrong[:8]:
            print(f"  {case}: {one[:300]}", file=sys.stderr, flush=True)
        return Row(case, what, len(wrong), tries, "", len(wrong), "= 0", None, 0, 0)

    # ---- cases

    def engine(self) -> Iterator[Row]:
        yield self._ended("the engine is killed", "engine", signal.SIGKILL, int(self.given.get("engine", "200")))

    def hang(self) -> Iterator[Row]:
        yield self._ended("the engine stands still", "hang", signal.SIGSTOP, int(self.given.get("hang", "10")), f"hang_s={HANG_S:g}")

    def _ended(self, case: str, name: str, by: signal.Signals, times: int, *keys: str) -> Row:
        pages, wrong, counts = self.bench.work / f"pages-{name}", list[str](), {"answered": 0, "error": 0}
        shutil.rmtree(pages, ignore_errors=True)
        with self.server(name, *kept_in(pages), *keys) as server:
            model, known = self.known(server)
            for _ in range(times):
                wrong += asyncio.run(self._under_load(server, model, known, counts, by))
                server.wait_ready(120)
                wrong += self.judged(server, model, known[:4])
        what = f"{by.name} under load, kv.dir; {counts['answered']} answered, {counts['error']} ended in an error"
        return self.row(case, what, wrong, times)

    async def _under_load(self, server: Server, name: str, known: Sequence[Known], counts: dict[str, int], by: signal.Signals) -> list[str]:
        """Clients ask; in the middle the engine gets the signal ``by``. Each reply is right or ends in words -> what is wrong."""
        wrong, over = [], asyncio.Event()

        async def client(k: int) -> None:
            draw = Random(f"client {k} {self.draw.random()}")
            while not over.is_set():
                one = draw.choice(known)
                reply = await ask(server.address, COMPLETIONS, one.body(name, stream=draw.random() < 0.7))
                counts["answered" if reply.answered else "error"] += 1
                if said := one.wrong(reply):
                    wrong.append(said)
                if not reply.answered:
                    return

        clients = [asyncio.create_task(client(k)) for k in range(CLIENTS)]
        await asyncio.sleep(0.1 + self.draw.random())
        for pid in server.children():
            os.kill(pid, by)
        await asyncio.sleep(0.05)
        over.set()
        await asyncio.wait_for(asyncio.gather(*clients), 120)
        return wrong

    def front(self) -> Iterator[Row]:
        times, wrong, lingered = int(self.given.get("front", "50")), list[str](), list[str]()
        pages = self.bench.work / "pages-front"
        shutil.rmtree(pages, ignore_errors=True)
        name, known = "", list[Known]()
        for _ in range(times):
            with self.server("front", *kept_in(pages)) as server:
                if not known:
                    name, known = self.known(server)
                wrong += self.judged(server, name, known[:4])
                engines = server.children()
                asyncio.run(self._killed_front(server, name, known))
                lingered += [f"engine {pid} lives on" for pid in still_there(engines, GONE_S)]
        with self.server("front", *kept_in(pages)) as server:
            wrong += self.judged(server, name, known)
        yield self.row("the front is killed", "right afterwards, kv.dir", wrong, times)
        yield self.row("the front is killed", f"the engine ends within {GONE_S:g} s", lingered, times)

    async def _killed_front(self, server: Server, name: str, known: Sequence[Known]) -> None:
        asking = [asyncio.create_task(ask(server.address, COMPLETIONS, one.body(name, stream=True))) for one in known[:CLIENTS]]
        await asyncio.sleep(0.02 + 0.3 * self.draw.random())
        server.kill()
        await asyncio.gather(*asking)

    def disk(self) -> Iterator[Row]:
        pages = self.bench.work / "pages-disk"
        shutil.rmtree(pages, ignore_errors=True)
        with self.server("disk", *kept_in(pages)) as server:
            name, known = self.known(server)
            for pid in server.children():
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            wrong = self.judged(server, name, known)
            more = [f"{words(f'disk {k}', 200)}" for k in range(8)]
            bodies = [{"model": name, "prompt": prompt, "max_tokens": 8} for prompt in more]
            wrong += [f"{r.status} {r.error}" for r in self.asked(server, bodies) if not r.answered]
            wrong += self.judged(server, name, known)
        with self.server("disk", *kept_in(pages)) as server:
            wrong += self.judged(server, name, known)
        yield self.row("no byte more on the disk", "kv.dir, files limited while it runs; then started anew", wrong, 3 * len(known) + 8)

    def asked(self, server: Server, bodies: Sequence[Mapping[str, object]], path: str = COMPLETIONS) -> list[Reply]:
        async def together() -> list[Reply]:
            return list(await asyncio.gather(*(ask(server.address, path, body) for body in bodies)))

        return asyncio.run(together())

    def clock(self) -> Iterator[Row]:
        place = self.bench.work / "jumping"
        place.mkdir(exist_ok=True)
        (place / "sitecustomize.py").write_text(JUMPING)
        env = {"PYTHONPATH": f"{place}:{self.bench.env['PYTHONPATH']}"}
        with self.server("clock", env=env) as server:
            name, known = self.known(server)
            wrong = []
            for _ in range(5):
                bodies = [one.body(name, stream=k % 2 == 0) for k, one in enumerate(known)]
                pairs = zip(known, self.asked(server, bodies), strict=True)
                wrong += [said for one, reply in pairs if (said := one.wrong(reply) or (None if reply.answered else str(reply.error)))]
        yield self.row("the wall clock jumps", "each look off by up to 400 days", wrong, 5 * len(known))

    def never_reads(self) -> Iterator[Row]:
        """Long replies that nobody reads; others are answered meanwhile, and all is given back."""
        with self.server("never_reads", "limits.stalled_s=2") as server:
            name, known = self.known(server)
            body = known[0].body(name, stream=True, max_tokens=200, logprobs=5, n=8)
            wrong = asyncio.run(self._unread(server, name, body, known))
        yield self.row("clients that never read", "16 of them, 8 long replies each; others meanwhile", wrong, 16 + len(known))

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
        with self.server("silent", "limits.headers_s=3", "limits.connections_per_address=2000") as server:
            name, known = self.known(server)
            wrong = asyncio.run(self._silence(server.address, name, known))
        yield self.row("1,000 silent connections", "others meanwhile; closed after limits.headers_s", wrong, 1000 + len(known))

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
        with self.server("headers") as server:
            name, known = self.known(server, 4)
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
            wrong += self.judged(server, name, known)
        yield self.row("headers of 1 MB", ", ".join(requests), wrong, len(requests) + len(known))

    def smuggled(self) -> Iterator[Row]:
        with self.server("smuggled") as server:
            name, known = self.known(server, 4)
            wrong = []
            for what, sent in smuggling(name).items():
                statuses = asyncio.run(said_to(server.address, sent))
                if len([status for status in statuses if status < 400]) > 0 or len(statuses) > 1:
                    wrong.append(f"{what}: answered {statuses}")
            wrong += self.judged(server, name, known)
        yield self.row("smuggled requests", ", ".join(smuggling("")), wrong, len(smuggling("")) + len(known))

    def template(self) -> Iterator[Row]:
        with self.server("template") as server:
            name, known = self.known(server, 4)
            fine, bad = ([{"role": role, "content": "x = "}] for role in ("user", "system"))
            bodies = [{"model": name, "messages": messages, "max_tokens": 4} for messages in (fine, bad)]
            good, refused = self.asked(server, bodies, CHAT)
            wrong = [] if good.answered else [f"{good.status} {good.error}"]
            wrong += [] if refused.status == 400 and "no system here" in str(refused.error) else [f"{refused.status} {refused.error}"]
            wrong += self.judged(server, name, known)
        yield self.row("a template that raises", "a 400 that says why", wrong, 2 + len(known))

    def characters(self) -> Iterator[Row]:
        """The grammar forces emoji and CJK; the reply is cut behind each of its tokens."""
        form = {"type": "json_schema", "json_schema": {"name": "w", "schema": {"type": "string", "const": WHALES}}}
        whole = json.dumps(WHALES, ensure_ascii=False)
        with self.server("characters") as server:
            name, _ = self.known(server, 1)
            base = {"model": name, "messages": [{"role": "user", "content": "x"}], "response_format": form, "temperature": 0}
            tokens = range(1, 8 * len(WHALES))
            bodies = [base | {"max_tokens": count, "stream": count % 2 == 0} for count in tokens]
            replies = self.asked(server, bodies, CHAT)
        wrong = [f"{reply.status} {reply.error}" for reply in replies if not reply.answered]
        wrong += [f"{reply.text!r}" for reply in replies if "\ufffd" in reply.text or not is_beginning(reply.text, whole)]
        ends = {reply.text for reply in replies if reply.finish == "length"}
        yield self.row("texts cut inside a character", f"{len(ends)} different ends", wrong, len(replies))

    def storm(self) -> Iterator[Row]:
        requests, clients = int(self.given.get("requests", "10000")), int(self.given.get("clients", "64"))
        with self.server("storm", "limits.connections_per_address=4096") as server:
            name, known = self.known(server)
            pids = [server.pid, *server.children()]
            asyncio.run(Weather(server.address, name, known, 1).blow(2 * clients, clients, lambda: {}, 1 << 30))
            time.sleep(SETTLED_S)
            files = {pid: descriptors(pid) for pid in pids}
            begun = time.perf_counter()
            weather = Weather(server.address, name, known)
            found = asyncio.run(
                weather.blow(requests, clients, lambda: {str(pid): resident_mb(pid) for pid in pids}, max(1, requests // 200))
            )
            seconds = time.perf_counter() - begun
            wrong = self.judged(server, name, known) + asyncio.run(left_under_way(server))
            time.sleep(SETTLED_S)
            left = [f"{what}: {descriptors(pid)} descriptors for {files[pid]}" for what, pid in zip(("front", "engine"), pids, strict=True)
                    if descriptors(pid) > files[pid]]  # fmt: skip
        said = ", ".join(f"{count} {what}" for what, count in found.ended.most_common())
        yield self.row("storm: replies", f"{clients} clients, {seconds:.0f} s; {said}", found.wrong + wrong, requests)
        yield self.row("storm: descriptors left", "of front and engine", left, requests)
        for what, pid in zip(("front", "engine"), pids, strict=True):
            yield memory_row(what, found, str(pid), requests)


def kept_in(pages: Path) -> tuple[str, str]:
    """Keys of a server that restores from ``pages`` whatever its drive's pace."""
    return f"kv.dir={pages}", f"kv.read_gbps={ANY_GBPS}"


def memory_row(what: str, storm: Storm, pid: str, requests: int) -> Row:
    """What a process held at the end over what it held behind the first fifth, medians of a tenth of the samples: a long text that is being
    read is no growth."""
    from_, samples = FROM * requests // 10_000, [(number, look[pid]) for number, look in storm.samples]
    behind = [mb for number, mb in sorted(samples) if number >= from_]
    tenth = max(1, len(behind) // 10)
    first, last = median(behind[:tenth]), median(behind[-tenth:])
    said = f"MB at the end, over those at request {from_}; {max(behind):.0f} at most"
    return Row(f"storm: memory of the {what}", said, last, first, "MB", last / first, f"<= {1 + FLAT}", None, 0, 0)


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def still_there(pids: Sequence[int], within_s: float) -> list[int]:
    """Those that have not ended within so many seconds."""
    end = time.monotonic() + within_s
    while time.monotonic() < end and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.05)
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def left_under_way(server: Server, within_s: float = 20.0) -> list[str]:
    """What is still under way, once nobody asks."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        front = server_figures(await asyncio.to_thread(server.machine))
        if not any(front.values()):
            return []
        await asyncio.sleep(0.2)
    return [f"still under way after {within_s:g} s: {front}"]


def server_figures(machine: Mapping[str, object]) -> dict[str, float]:
    front, vital = machine["front"], machine["vital"]
    assert isinstance(front, dict)
    rows = {name: vital.get(name, 0) for name in ("rows", "waiting")} if isinstance(vital, dict) else {}
    return {"requests": front["requests"], **rows}


def is_beginning(text: str, whole: str) -> bool:
    """Whether ``text``, JSON that may be cut, begins as ``whole`` does; a grammar may write a character as an escape."""
    for cut in range(len(text), max(-1, len(text) - 12), -1):
        try:
            return json.loads(whole).startswith(json.loads(text[:cut].rstrip('"') + '"')) if text[:cut] not in ("", '"') else True
        except ValueError:
            continue
    return False


def main() -> None:
    try:
        given = given_of(sys.argv[1:], KEYS)
        if "checkpoint" not in given:
            raise UserError("checkpoint: missing; give a trained checkpoint's directory, checkpoint=DIR")
    except UserError as error:
        raise SystemExit(str(error)) from None
    bench = Bench(Path(given.get("work", "bench-work")).resolve())
    one = Faults(bench, given)
    methods: dict[str, Callable[[], Iterator[Row]]] = {name: partial(getattr(one, name)) for name in CASES}
    where = {"gpu": None, "checkpoint": Path(given["checkpoint"]).name} | machine(profile_of(bench, "true"))
    run_cases(chosen(given.get("cases", "storm"), methods), where, Path(given["out"]) if "out" in given else None)


if __name__ == "__main__":
    main()
