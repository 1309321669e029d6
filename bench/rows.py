"""Passes of rows over a resident model of an 8B geometry with few layers: what unequal prompts and unequal decode rows cost.

    python bench/rows.py [device=cuda] [layers=8] [repeats=9]

Prints one JSON line: seconds of a pass, medians. `prompts_s` is 1 x 2048 and 15 x 64 tokens, `alone_s` their 3,008 tokens as one prompt.
`equal_s` is a decode step of 96 rows behind 1,024 tokens each, `unequal_s` of 96 rows behind 512 to 1,535. `one_by_one_s` is the same
without the kernel over page tables, `loose_s` with it, in pages that lie anywhere.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel  # noqa: E402

from penstock.runtime.engine.passes.stepper import Stepper  # noqa: E402
from penstock.runtime.kv.attention.page_tables import PagedKernel  # noqa: E402
from penstock.runtime.kv.attention.paged_kernel import open_kernel  # noqa: E402
from penstock.runtime.kv.batch.kv_pool import KvPool  # noqa: E402
from penstock.runtime.kv.batch.kv_windows import kinds  # noqa: E402
from penstock.runtime.model.rows import Row, RowKind, Step  # noqa: E402

PAGE_TOKENS = 64
ROWS = 96
GEOMETRY = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192,
}  # fmt: skip


def model_of(device: torch.device, layers: int, **geometry: int) -> PreTrainedModel:
    """Random, BF16, all of it on ``device``."""
    config = AutoConfig.for_model("llama", num_hidden_layers=layers, **(GEOMETRY | geometry))
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def stepper_of(model: PreTrainedModel, device: torch.device, slots: int, kernel: PagedKernel | None) -> Stepper:
    return Stepper(model, device, KvPool(slots, PAGE_TOKENS, kinds(model.config), device), kernel=kernel)


def rows_of(lengths: Sequence[tuple[int, int]], kind: RowKind, shuffled: bool = False) -> Step:
    """Rows of (start, tokens), each in as many pages as the longest needs."""
    each = max(-(-(start + count) // PAGE_TOKENS) for start, count in lengths)
    pages = list(range(each * len(lengths)))
    if shuffled:
        random.Random(0).shuffle(pages)
    held = [tuple(pages[k * each : (k + 1) * each]) for k in range(len(lengths))]
    return Step(tuple(Row(k, (1 + k,) * count, start, held[k], kind) for k, (start, count) in enumerate(lengths)))


def seconds(stepper: Stepper, step: Step, repeats: int, wait: Callable[[], None]) -> float:
    """Median of a pass, the first two left out."""
    times = []
    for _ in range(repeats + 2):
        wait()
        begun = time.perf_counter()
        stepper.run(step)
        wait()
        times.append(time.perf_counter() - begun)
    return median(times[2:])


def measure(device: torch.device, layers: int, repeats: int, rows: int = ROWS, scale: int = 1, **geometry: int) -> dict[str, float]:
    """All figures; lengths are divided by ``scale``."""
    model, kernel = model_of(device, layers, **geometry), open_kernel(device)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    mixed = rows_of([(0, 2048 // scale)] + [(0, 64 // scale)] * 15, RowKind.prompt)
    whole = rows_of([(0, 3008 // scale)], RowKind.prompt)
    equal = rows_of([(1024 // scale, 1)] * rows, RowKind.decode)
    lengths = [((512 + 1023 * k // max(1, rows - 1)) // scale, 1) for k in range(rows)]
    unequal, loose = rows_of(lengths, RowKind.decode), rows_of(lengths, RowKind.decode, shuffled=True)
    slots = 1 + max(page for step in (mixed, whole, equal, unequal) for row in step.rows for page in row.pages)
    stepper = stepper_of(model, device, slots, kernel)
    found = {
        "prompts_s": seconds(stepper, mixed, repeats, wait),
        "alone_s": seconds(stepper, whole, repeats, wait),
        "equal_s": seconds(stepper, equal, repeats, wait),
        "unequal_s": seconds(stepper, unequal, repeats, wait),
        "loose_s": seconds(stepper, loose, repeats, wait),
    }
    del stepper
    plain = stepper_of(model, device, slots, None)
    found["one_by_one_s"] = seconds(plain, unequal, repeats, wait)
    return found | {"prompts_to_alone": found["prompts_s"] / found["alone_s"], "unequal_to_equal": found["unequal_s"] / found["equal_s"]}


def main() -> None:
    given = dict(word.split("=", 1) for word in sys.argv[1:])
    device = torch.device(given.get("device", "cuda"))
    layers, repeats = int(given.get("layers", 8)), int(given.get("repeats", 9))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(json.dumps({"device": name, "torch": torch.__version__, "layers": layers} | measure(device, layers, repeats)))


if __name__ == "__main__":
    main()
