"""What lies about a server goes bad: its disk is full, its clock jumps, its template raises, its replies end inside a character."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Iterator

from bench.cases import Row
from bench.clients import CHAT
from bench.fault_rig import FaultRig, kept_in
from bench.known import words

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


class Grounds:
    """Cases `disk`, `clock`, `template` and `characters`."""

    def __init__(self, rig: FaultRig):
        self.rig = rig

    def disk(self) -> Iterator[Row]:
        pages = self.rig.bench.work / "pages-disk"
        shutil.rmtree(pages, ignore_errors=True)
        with self.rig.server("disk", *kept_in(pages)) as server:
            name, known = self.rig.known(server)
            for pid in server.children():
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            wrong = self.rig.judged(server, name, known)
            more = [f"{words(f'disk {k}', 200)}" for k in range(8)]
            bodies = [{"model": name, "prompt": prompt, "max_tokens": 8} for prompt in more]
            wrong += [f"{r.status} {r.error}" for r in self.rig.asked(server, bodies) if not r.answered]
            wrong += self.rig.judged(server, name, known)
        with self.rig.server("disk", *kept_in(pages)) as server:
            wrong += self.rig.judged(server, name, known)
        yield self.rig.row("no byte more on the disk", "kv.dir, files limited while it runs; then started anew", wrong, 3 * len(known) + 8)

    def clock(self) -> Iterator[Row]:
        place = self.rig.bench.work / "jumping"
        place.mkdir(exist_ok=True)
        (place / "sitecustomize.py").write_text(JUMPING)
        env = {"PYTHONPATH": f"{place}:{self.rig.bench.env['PYTHONPATH']}"}
        with self.rig.server("clock", env=env) as server:
            name, known = self.rig.known(server)
            wrong = []
            for _ in range(5):
                bodies = [one.body(name, stream=k % 2 == 0) for k, one in enumerate(known)]
                pairs = zip(known, self.rig.asked(server, bodies), strict=True)
                wrong += [said for one, reply in pairs if (said := one.wrong(reply) or (None if reply.answered else str(reply.error)))]
        yield self.rig.row("the wall clock jumps", "each look off by up to 400 days", wrong, 5 * len(known))

    def template(self) -> Iterator[Row]:
        with self.rig.server("template") as server:
            name, known = self.rig.known(server, 4)
            fine, bad = ([{"role": role, "content": "x = "}] for role in ("user", "system"))
            bodies = [{"model": name, "messages": messages, "max_tokens": 4} for messages in (fine, bad)]
            good, refused = self.rig.asked(server, bodies, CHAT)
            wrong = [] if good.answered else [f"{good.status} {good.error}"]
            wrong += [] if refused.status == 400 and "no system here" in str(refused.error) else [f"{refused.status} {refused.error}"]
            wrong += self.rig.judged(server, name, known)
        yield self.rig.row("a template that raises", "a 400 that says why", wrong, 2 + len(known))

    def characters(self) -> Iterator[Row]:
        """The grammar forces emoji and CJK; the reply is cut behind each of its tokens."""
        form = {"type": "json_schema", "json_schema": {"name": "w", "schema": {"type": "string", "const": WHALES}}}
        whole = json.dumps(WHALES, ensure_ascii=False)
        with self.rig.server("characters") as server:
            name, _ = self.rig.known(server, 1)
            base = {"model": name, "messages": [{"role": "user", "content": "x"}], "response_format": form, "temperature": 0}
            tokens = range(1, 8 * len(WHALES))
            bodies = [base | {"max_tokens": count, "stream": count % 2 == 0} for count in tokens]
            replies = self.rig.asked(server, bodies, CHAT)
        wrong = [f"{reply.status} {reply.error}" for reply in replies if not reply.answered]
        wrong += [f"{reply.text!r}" for reply in replies if "\ufffd" in reply.text or not is_beginning(reply.text, whole)]
        ends = {reply.text for reply in replies if reply.finish == "length"}
        yield self.rig.row("texts cut inside a character", f"{len(ends)} different ends", wrong, len(replies))


def is_beginning(text: str, whole: str) -> bool:
    """Whether ``text``, JSON that may be cut, begins as ``whole`` does; a grammar may write a character as an escape."""
    for cut in range(len(text), max(-1, len(text) - 12), -1):
        try:
            return json.loads(whole).startswith(json.loads(text[:cut].rstrip('"') + '"')) if text[:cut] not in ("", '"') else True
        except ValueError:
            continue
    return False
