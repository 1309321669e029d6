"""What an expert policy's decision costs: one observation, worth and foresight a layer, on random routings.

    python bench/policy_time.py

Microseconds a layer: the median and the fastest tenth of 400 tokens. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import json
import time

import numpy as np

from planner.decisions import ExpertPolicyName
from planner.policy.experts import make_expert_policy

SHAPES = {"mixtral8x7b": (32, 8, 2), "qwen3-30b-a3b": (48, 128, 8)}
"""Model -> MoE layers, experts, top_k."""

TOKENS = 400


def layer_us(name: ExpertPolicyName, layers: int, count: int, top_k: int) -> tuple[float, float]:
    """Median and fastest tenth."""
    random = np.random.default_rng(0)
    routed = [[random.permutation(count)[:top_k].tolist() for _ in range(layers)] for _ in range(TOKENS)]
    scores = random.normal(size=count).astype(np.float32)
    policy, took = make_expert_policy(name, layers, count, top_k), []
    for token in routed:
        start = time.perf_counter()
        for layer, experts in enumerate(token):
            policy.foresee(layer)
            policy.observe(layer, experts, scores)
            policy.worth(layer)
        took.append((time.perf_counter() - start) / layers * 1e6)
    return float(np.median(took)), float(np.percentile(took, 10))


def main() -> None:
    found = {model: {name.value: layer_us(name, *shape) for name in ExpertPolicyName} for model, shape in SHAPES.items()}
    for model, rows in found.items():
        print(f"{model}: MoE layers, experts, top_k {SHAPES[model]}")
        for name, (median, fast) in rows.items():
            print(f"  {name:<12} {median:6.1f} us   fastest tenth {fast:6.1f}")
    print(json.dumps(found, separators=(",", ":")))


if __name__ == "__main__":
    main()
