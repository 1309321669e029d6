"""A resident decode step issued launch by launch, and as one CUDA graph: whether graphs are worth their constraints.

    python bench/graphs.py [layers=8] [batches=1,8,96] [steps=64]

Prints one JSON line: for each batch, seconds of a step (medians) and what they would be with 32 layers, kernels launched in a step, and
whether both ways choose the same tokens. A graph's step takes no numbers from the host: ids, positions, page tables and lengths lie in
static buffers that kernels advance, so attention goes by page tables (Triton). Needs a card.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

from bench.rows import model_of, rows_of, stepper_of  # noqa: E402
from penstock.runtime.engine.passes.stepper import Stepper  # noqa: E402
from penstock.runtime.kv.attention.page_tables import PageTables, slots_of  # noqa: E402
from penstock.runtime.kv.attention.paged_kernel import open_kernel  # noqa: E402
from penstock.runtime.kv.attention.row_groups import packed  # noqa: E402
from penstock.runtime.model.rows import RowKind, Step  # noqa: E402

START = 1024
WHOLE_LAYERS = 32


class StaticStep:
    """A decode step whose every number lies on the card: :meth:`compute` can be captured, and leaves the numbers of the next one."""

    def __init__(self, stepper: Stepper, step: Step):
        self._stepper, attention = stepper, stepper.attention
        self._ids, self._positions, self._wanted = (numbers.clone() for numbers in stepper.begin(step))
        put = lambda numbers: torch.tensor(numbers, device=stepper.device)  # noqa: E731
        page_tokens = stepper.pool.page_tokens
        self._tables, self._slots = PageTables.of(packed(step), page_tokens, put), slots_of(step, page_tokens, put)
        attention.begin_tables(self._tables, self._slots)

    def compute(self) -> torch.Tensor:
        """The tokens [rows] that are fed next."""
        chosen = self._stepper.compute(self._ids, self._positions, self._wanted).argmax(-1)
        self._ids.copy_(chosen)
        for numbers in (self._positions, self._tables.starts, self._tables.ends, self._slots):
            numbers.add_(1)
        return self._ids


def launched(run: Callable[[], object]) -> int:
    """Kernels of one ``run``."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    return sum(event.count for event in seen.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA)


def timed(run: Callable[[], object], steps: int) -> float:
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return median(times)


@torch.inference_mode()
def measure(model: PreTrainedModel, device: torch.device, rows: int, steps: int) -> dict[str, object]:
    # a page boundary is never crossed: START is a multiple of a page's tokens, and fewer steps follow
    step = rows_of([(START, 1)] * rows, RowKind.decode)
    slots = 1 + max(page for row in step.rows for page in row.pages)
    stepper = stepper_of(model, device, slots, open_kernel(device))
    stepper.run(step)
    usual_s, kernels = timed(lambda: stepper.run(step), steps), launched(lambda: stepper.run(step))
    for buffer in stepper.pool.buffers().values():
        buffer.zero_()
    said = []
    issued = StaticStep(stepper, step)
    for _ in range(8):
        said.append(issued.compute().tolist())
    for buffer in stepper.pool.buffers().values():
        buffer.zero_()
    static, graph = StaticStep(stepper, step), torch.cuda.CUDAGraph()
    aside = torch.cuda.Stream()
    before = [numbers.clone() for numbers in (static._ids, static._positions, static._tables.starts, static._tables.ends, static._slots)]
    with torch.cuda.stream(aside):
        static.compute()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        static.compute()
    for numbers, first in zip(
        (static._ids, static._positions, static._tables.starts, static._tables.ends, static._slots), before, strict=True
    ):
        numbers.copy_(first)
    for buffer in stepper.pool.buffers().values():
        buffer.zero_()
    replayed = []
    for _ in range(8):
        graph.replay()
        replayed.append(static._ids.tolist())
    graph_s = timed(graph.replay, min(steps, stepper.pool.page_tokens - 16))
    return {"rows": rows, "launches_s": usual_s, "graph_s": graph_s, "kernels": kernels, "same_tokens": said == replayed}


def main() -> None:
    given = dict(word.split("=", 1) for word in sys.argv[1:])
    layers, steps, device = int(given.get("layers", 8)), int(given.get("steps", 40)), torch.device("cuda")
    model, few = model_of(device, layers), model_of(device, layers // 2)
    found = []
    for rows in map(int, given.get("batches", "1,8,96").split(",")):
        all_, half = measure(model, device, rows, steps), measure(few, device, rows, steps)
        more = {}
        for name in ("launches_s", "graph_s"):  # a layer's share by the difference; head and embedding once
            layer_s = (all_[name] - half[name]) / (layers - layers // 2)
            more[f"{name}_of_{WHOLE_LAYERS}_layers"] = all_[name] + (WHOLE_LAYERS - layers) * layer_s
        found.append(all_ | more)
    print(json.dumps({"device": torch.cuda.get_device_name(device), "torch": torch.__version__, "layers": layers, "batches": found}))


if __name__ == "__main__":
    main()
