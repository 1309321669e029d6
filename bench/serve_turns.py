"""Second turns of long conversations, beside rows that decode meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from statistics import median

from bench.cases import Row
from bench.clients import COMPLETIONS, body_of, closed_loop, token_prompt
from bench.serve_plans import ServePlans, whole
from bench.sse import Address, Reply, ask
from penstock.planner.contract.plan.planfile import read_plan

TURNS, TURN_TOKENS, TURN_NEW, TAIL_TOKENS = 16, 4096, 32, 64


class Turns:
    def __init__(self, rig: ServePlans):
        self.rig = rig

    def turns(self) -> Iterator[Row]:
        """Each second turn is alone with rows that decode meanwhile, so that its own restore is seen."""
        tokens = min(TURN_TOKENS, self.rig.prompt * 8)
        kept = TURNS * (tokens + TURN_NEW)
        path = self.rig.plan("turns", 4, tokens + TAIL_TOKENS, self.rig.new, f"workload.kept_tokens={kept}")
        plan, vocab = read_plan(path), self.rig.served.model.vocab
        firsts = [token_prompt(tokens, vocab, f"turn {k}") for k in range(TURNS)]
        link = self.rig.link_gbps(plan) or self.rig.served.hardware.dram_copy_gbps
        server, name = self.rig.server(path)
        asked = [body_of(COMPLETIONS, prompt, TURN_NEW, name) for prompt in firsts]
        whole(asyncio.run(closed_loop(server.address, COMPLETIONS, asked, 2)), server)
        alone, beside, seconds = asyncio.run(self._second_turns(server.address, name, firsts))
        pass_s = median(reply.between_s for reply in alone)
        restored = median(reply.cached_tokens for reply in seconds)
        limit = restored * plan.model.kv_bytes_per_token / link / 1e9 + 1.5 * pass_s
        what = f"{restored:.0f} of {tokens + TAIL_TOKENS} tokens restored, median of {TURNS}"
        yield self.rig.row("second turn, TTFT", what, median(r.ttft_s for r in seconds), limit, "s", "<= 1.15")
        yield self.rig.row(
            "other rows' steps meanwhile", "over steps before", median(reply.between_s for reply in beside), pass_s, "s", "<= 1.05"
        )

    async def _second_turns(self, address: Address, name: str, firsts: Sequence[list[int]]) -> tuple[list[Reply], list[Reply], list[Reply]]:
        """Rows that decode alone, those that decode beside the second turns, and these."""
        vocab = self.rig.served.model.vocab

        async def row(seed: str) -> Reply:
            return await ask(address, COMPLETIONS, body_of(COMPLETIONS, token_prompt(self.rig.prompt, vocab, seed), self.rig.new, name))

        alone = [await row(f"alone {k}") for k in range(3)]
        beside, seconds = list[Reply](), list[Reply]()
        other = asyncio.create_task(row("beside 0"))
        for k, first in enumerate(firsts):
            body = body_of(COMPLETIONS, first + token_prompt(TAIL_TOKENS, vocab, f"tail {k}"), 4, name)
            seconds.append(await ask(address, COMPLETIONS, body))
            if other.done():
                beside.append(other.result())
                other = asyncio.create_task(row(f"beside {k + 1}"))
        return alone, [*beside, await other], seconds
