"""Second turns of long conversations, beside rows that decode meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from statistics import fmean, median

from bench.cases import Row
from bench.clients import COMPLETIONS, body_of, closed_loop, token_prompt
from bench.serve_loads import pass_rows, passes_of
from bench.serve_plans import ServePlans, whole
from bench.serve_rig import Server
from bench.sse import Address, Reply, ask
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import read_plan
from penstock.planner.contract.serving.arrivals import Arrivals, Lengths
from penstock.planner.contract.serving.pass_prices import PassPrices
from penstock.planner.contract.serving.serving_forecast import simulate_serving

TURNS, TURN_TOKENS, TURN_NEW, TAIL_TOKENS = 16, 4096, 2, 64
PASSES = 3
"""Of a second turn: the one that it is asked in, and one a token."""
CLIENTS = 4
"""That the plan is for, and that ask first turns at once."""
ALONE = 16
"""Tokens of the row that decodes alone, before second turns come."""
TOLD_S = 2.1
"""An idle engine tells its figures this often."""
OTHER_ROWS = 6
"""Those that warm the server up, that one, and a few beside second turns: what is kept of them pushes out no turn's."""


class Turns:
    def __init__(self, rig: ServePlans):
        self.rig = rig

    def turns(self) -> Iterator[Row]:
        """Each second turn is alone with a row that decodes meanwhile, so that its own restore is seen. Nobody asks in time with passes:
        one that is asked when a reply ends has just missed a pass, and waits for two. So their moments are spread evenly over a pass."""
        tokens = min(TURN_TOKENS, self.rig.prompt * 8)
        kept = TURNS * (tokens + TURN_NEW) + OTHER_ROWS * (self.rig.prompt + self.rig.new)
        path = self.rig.plan("turns", CLIENTS, tokens + TAIL_TOKENS, self.rig.new, f"workload.kept_tokens={kept}")
        plan, vocab = read_plan(path), self.rig.served.model.vocab
        firsts = [token_prompt(tokens, vocab, f"turn {k}") for k in range(TURNS)]
        link = self.rig.link_gbps or self.rig.served.hardware.dram_copy_gbps
        server, name = self.rig.server(path)
        asked = [body_of(COMPLETIONS, prompt, TURN_NEW, name) for prompt in firsts]
        self.rig.say(f"turns: {TURNS} first turns of {tokens} tokens, then second ones", expected_s(plan, tokens, self.rig.prompt))
        whole(asyncio.run(closed_loop(server.address, COMPLETIONS, asked, CLIENTS)), server)
        before = self._passes(server)
        alone_s, beside_s, seconds = asyncio.run(self._second_turns(server.address, name, firsts))
        after = self._passes(server)
        whole(seconds, server)
        restored = median(reply.cached_tokens for reply in seconds)
        restoring_s = restored * plan.model.kv_bytes_per_token / link / 1e9
        limit = restoring_s + 1.5 * alone_s
        ttfts = sorted(reply.ttft_s for reply in seconds)
        what = f"{restored:.0f} of {tokens + TAIL_TOKENS} tokens restored, median of {TURNS} from {ttfts[0]:.3f} to {ttfts[-1]:.3f} s"
        yield self.rig.row("second turn, TTFT", what, median(ttfts), limit, "s", "<= 1.15")
        bound = 1 + restoring_s / (PASSES * alone_s)
        what = f"mean, over steps before; one of {PASSES} passes restores: {bound:.3f} at least"
        yield self.rig.row("other rows' steps meanwhile", what, beside_s, alone_s, "s", "<= 1.05")
        yield from pass_rows(self.rig, passes_of(before, after))

    def _passes(self, server: Server) -> dict[str, float]:
        """The server's figures, as new as they are."""
        time.sleep(TOLD_S)
        return server.metrics()

    async def _second_turns(self, address: Address, name: str, firsts: Sequence[list[int]]) -> tuple[float, float, list[Reply]]:
        """Mean seconds between tokens of a row alone, of one beside second turns; and these."""
        vocab = self.rig.served.model.vocab
        beside, seconds = list[Reply](), list[Reply]()

        async def row(seed: str, new: int, reply: Reply) -> Reply:
            body = body_of(COMPLETIONS, token_prompt(self.rig.prompt, vocab, seed), new, name)
            return await ask(address, COMPLETIONS, body, reply=reply)

        async def others() -> None:
            """Rows one after the other."""
            while True:
                beside.append(Reply(time.perf_counter()))
                await row(f"beside {len(beside)}", self.rig.new, beside[-1])

        alone = await row("alone", ALONE, Reply(time.perf_counter()))
        going = asyncio.create_task(others())
        for k, first in enumerate(firsts):
            await asyncio.sleep(alone.between_s * (k + 0.5) / len(firsts))
            body = body_of(COMPLETIONS, first + token_prompt(TAIL_TOKENS, vocab, f"tail {k}"), TURN_NEW, name)
            seconds.append(await ask(address, COMPLETIONS, body))
        going.cancel()
        if failed := next((reply.error for reply in (alone, *beside) if reply.error), None):
            raise SystemExit(f"a row beside second turns failed: {failed}")
        return alone.between_s, mean_gap([reply.times_s for reply in beside], seconds[0].begun_s, seconds[-1].ended_s), seconds


def mean_gap(rows: Sequence[Sequence[float]], since_s: float, until_s: float) -> float:
    """Between one token and the next of a row, of those that came within the time."""
    gaps = [b - a for times in rows for a, b in zip(times, times[1:], strict=False) if since_s <= a and b <= until_s]
    if not gaps:
        raise SystemExit("no row decoded beside the second turns: new= is too few")
    return fmean(gaps)


def expected_s(plan: Plan, tokens: int, prompt: int) -> float:
    """By the plan: first turns, a row alone, and second turns of three passes each beside the last token."""
    prices = PassPrices(plan)
    firsts = simulate_serving(plan, Arrivals(Lengths(tokens, TURN_NEW), TURNS, clients=CLIENTS), prices=prices).seconds
    return firsts + (ALONE + TURNS * (TURN_NEW + 2)) * prices.decode_s(1, prompt)
