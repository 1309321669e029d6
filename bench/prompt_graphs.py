"""A resident prompt launched kernel by kernel, and recorded around attention as a run records it: `hardware.gpu.prompt_piece_s` is the
host's seconds of a recorded layer.

    python bench/prompt_graphs.py work=/dev/shm/penstock out=prompt_graphs.json [model=llama8b layers=16] [tokens=128,512,2048] [passes=12]

For each number of tokens, launched and recorded in turns: wall seconds of a pass over the sum of its kernels' seconds by the profiler, and
the host's seconds until all is launched. `behind=N` puts so many tokens before them. Logits are held to those of the launched pass.

Needs a card.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cases import Row, run_cases  # noqa: E402
from bench.host_products import bare_machine  # noqa: E402
from bench.keys import given_of, read_values  # noqa: E402
from bench.link import Bench  # noqa: E402
from bench.worker import Trial, opened  # noqa: E402
from penstock import solve  # noqa: E402
from penstock.planner.common.errors import UserError  # noqa: E402
from penstock.runtime.engine.session import Session  # noqa: E402
from penstock.runtime.kv.batch.kv_sequence import KvSequence  # noqa: E402
from penstock.runtime.model.rows import RowKind, Step  # noqa: E402
from penstock.runtime.recorded.card_pieces import CardPieces  # noqa: E402
from penstock.runtime.recorded.prompts.prompt_layers import Pieces, PromptLayers  # noqa: E402
from penstock.runtime.store.decoder import decoder_layers  # noqa: E402

KEYS = ("work", "out", "model", "layers", "tokens", "behind", "passes")
NEARLY = 0.02
"""Of the largest logit: matrices of another memory may be multiplied in another order."""


@contextmanager
def prompt_step(session: Session, tokens: int, behind: int) -> Iterator[Step]:
    """A prompt's ``tokens`` behind as many others, whose K and V were computed."""
    pages, sequence = session.engine.kv.pages, KvSequence.of(0, [1 + number % 200 for number in range(behind + tokens)])
    sequence.hold(pages, behind + tokens)
    try:
        if behind:
            session.engine.stepper.run(Step((sequence.row(behind, RowKind.prompt),)))
        sequence.cached = behind
        yield Step((sequence.row(tokens, RowKind.prompt),))
    finally:
        sequence.release(pages)


def timed(run: Callable[[], object], wait: Callable[[], None]) -> tuple[float, float]:
    """Seconds until ``run`` has launched all, and until that is over."""
    wait()
    begun_s = time.perf_counter()
    run()
    launched_s = time.perf_counter() - begun_s
    wait()
    return launched_s, time.perf_counter() - begun_s


def kernels_s(run: Callable[[], object]) -> float:
    """Seconds of all kernels of one ``run``, one after the other."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in seen.key_averages()) / 1e6


def rows(session: Session, pieces: Callable[[], Pieces], tokens: int, behind: int, passes: int) -> Iterator[Row]:
    stepper, layers = session.engine.stepper, decoder_layers(session.engine.model)
    assert stepper.paged is not None
    on_card = stepper.device.type == "cuda"
    wait = torch.cuda.synchronize if on_card else lambda: None
    times: dict[str, list[tuple[float, float]]] = {"launched": [], "recorded": []}
    with prompt_step(session, tokens, behind) as step:
        run = partial(stepper.run, step)
        wanted = run()
        recorded = PromptLayers(layers, stepper.paged, pieces())
        recorded.record(run)
        if recorded.refused is not None:
            raise SystemExit(f"{tokens} tokens: {recorded.refused}")
        for number in range(passes + 2):
            for name, coming in (("launched", Step(())), ("recorded", step)):
                recorded.begin_pass(coming)
                took = timed(run, wait)
                if number > 1:
                    times[name].append(took)
        said = run()
        recorded.stop()
        limit_s = kernels_s(run) if on_card else timed(run, wait)[1]  # at the end: launching is slower in a process that was profiled
    off = (said.float() - wanted.float()).abs().max().item() / wanted.float().abs().max().item()
    if not off <= NEARLY:
        raise SystemExit(f"{tokens} tokens: recorded logits are off by {off:.4f} of the largest, allowed {NEARLY}")
    for name, took_s in times.items():
        host_s, wall_s = (median(one) for one in zip(*took_s, strict=True))
        what = f"{name}, host {host_s / len(layers) * 1e6:.0f} us a layer" + (f", logits off by {off:.4f}" if name == "recorded" else "")
        yield Row(f"{tokens} tokens behind {behind}", what, wall_s, limit_s, "s", wall_s / limit_s, "", None, 0, 0)


def main() -> None:
    try:
        given = {"work": "bench-work", "model": "llama8b", "layers": "16", "behind": "0", "passes": "12"} | given_of(sys.argv[1:], KEYS)
        asked = read_values(given, ("out",), (), {"layers": 1, "behind": 0, "passes": 1})
        lengths = [
            read_values({"tokens": word}, (), (), {"tokens": 1})["tokens"] for word in given.get("tokens", "128,512,2048").split(",")
        ]
    except UserError as error:
        raise SystemExit(str(error)) from None
    if not torch.cuda.is_available():
        raise SystemExit("this needs a card that torch sees, and there is none")
    bench = Bench(Path(given["work"]).resolve())
    checkpoint = bench.checkpoint(f"{given['model']}-{given['layers']}", f"model={given['model']}", f"model.layers={given['layers']}")
    most = asked["behind"] + max(lengths)
    plan = solve(model=str(checkpoint), hardware="h100", **{"workload.prompt_tokens": most, "workload.new_tokens": 8})
    with opened(Trial(plan, checkpoint, 4, 0)) as (session, _, device):
        cases = {str(n): partial(rows, session, partial(CardPieces, device), n, asked["behind"], asked["passes"]) for n in lengths}
        run_cases(cases, bare_machine(), asked.get("out"))


if __name__ == "__main__":
    main()
