"""What deciding about experts costs a layer, on random routings: a policy's observation, worth and foresight, and a tier's whole visit.

    python bench/policy_time.py

Microseconds a layer, medians over tokens: by itself, everything warm, and after the OPERATIONS small tensor operations that compute a layer
in between, which take the caches that a run takes. What was routed has been read by then. `tier` is a cache with slots for half of the
experts under `mix`: what a layer finds and misses, what it keeps, what to fetch ahead; `tier, routers` is one under `lookahead`, with the
scores of all layers that a run asks. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from penstock.planner.contract.decided.decisions import ExpertPolicyName
from penstock.planner.contract.experts.expert_cache import ExpertCache, Routing
from penstock.planner.contract.experts.expert_caches import LIKELY
from penstock.planner.contract.experts.policies import ExpertPolicy, FarSight, make_expert_policy
from penstock.planner.contract.experts.policies.far import reach
from penstock.planner.contract.experts.prefetch import Prefetch

SHAPES = {"mixtral8x7b": (32, 8, 2), "qwen3-30b-a3b": (48, 128, 8)}
"""Model -> MoE layers, experts, top_k."""

TOKENS, OPERATIONS = 100, 80


def policy_visits(policy: ExpertPolicy) -> Callable[[int, Routing], None]:
    """Foresight, observation and worth."""

    def visit(layer: int, routing: Routing) -> None:
        policy.foresee(layer)
        policy.observe(layer, routing.experts, None if routing.ahead is None else routing.ahead[0])
        policy.worth(layer)

    return visit


def tier_visits(policy: ExpertPolicy, layers: int, count: int, top_k: int, far: FarSight | None) -> Callable[[int, Routing], None]:
    """All that a tier decides, in the engine's order."""
    cache = ExpertCache(
        dict.fromkeys(range(layers), count // 2), layers * count // 2 + top_k + 1, count, policy, None, far, Prefetch(1, LIKELY)
    )

    def visit(layer: int, routing: Routing) -> None:
        seen = cache.find(layer, routing.experts)
        for slot in seen.dropped:
            cache.give_back(slot)
        for expert in seen.misses:
            cache.take(layer, expert)
        cache.judge(layer, routing)
        list(cache.coming(layer, len(routing.experts)))
        for expert in (*seen.hits, *seen.misses):
            for slot in cache.settle(layer, expert):
                cache.give_back(slot)

    return visit


def layer_us(visit: Callable[[int, Routing], None], layers: int, count: int, top_k: int, operations: int) -> float:
    random = np.random.default_rng(0)
    scores = random.normal(size=(reach(layers, count), count)).astype(np.float32)
    x, w = torch.randn(1, 64), torch.randn(64, 64)
    took = []
    for _ in range(TOKENS):
        token_s = 0.0
        for layer in range(layers):
            routing = Routing(random.permutation(count)[None, :top_k], False, scores[: layers - 1 - layer] if layer + 1 < layers else None)
            assert len(routing.experts) == top_k
            for _ in range(operations // 4):
                x = torch.nn.functional.silu(torch.nn.functional.rms_norm(x @ w, (64,))) + x.roll(1, 1)
            start = time.perf_counter()
            visit(layer, routing)
            token_s += time.perf_counter() - start
        took.append(token_s / layers * 1e6)
    return float(np.median(took))


def rows(layers: int, count: int, top_k: int) -> Iterator[tuple[str, float, float]]:
    """Name, by itself, beside other work."""
    for name in ExpertPolicyName:
        visits = [policy_visits(make_expert_policy(name, layers, count, top_k)) for _ in range(2)]
        yield name.value, *(layer_us(visit, layers, count, top_k, n) for visit, n in zip(visits, (0, OPERATIONS), strict=True))
    for name, policy, asks in (("tier", ExpertPolicyName.mix, False), ("tier, routers", ExpertPolicyName.lookahead, True)):
        tiers = []
        for _ in range(2):
            far = FarSight(layers, count, top_k, LIKELY) if asks else None
            tiers.append(tier_visits(make_expert_policy(policy, layers, count, top_k), layers, count, top_k, far))
        yield name, *(layer_us(visit, layers, count, top_k, n) for visit, n in zip(tiers, (0, OPERATIONS), strict=True))


def main() -> None:
    torch.set_num_threads(1)
    found = {}
    for model, shape in SHAPES.items():
        print(f"{model}: MoE layers, experts, top_k {shape}")
        found[model] = {}
        for name, alone, beside in rows(*shape):
            found[model][name] = (alone, beside)
            print(f"  {name:<13} {alone:6.1f} us   beside other work {beside:6.1f}", flush=True)
    print(json.dumps(found, separators=(",", ":")))


if __name__ == "__main__":
    main()
