"""What a launched layer of a prompt costs the thread that launches it, beside a card that does nothing.

    python bench/prompt_host.py [work=DIR] [layers=32] [tokens=8] [passes=40] [cases=whole,parts,recorded,recorded_parts]
                                 [cold=4MiB] [code=DIR]

A Llama of tiny tensors, all in VRAM, which is this host's memory: what is computed takes next to no time, and what remains is the host's.
Kernels of Triton are played, and so are products, attention and the driver: each is a call of C that does nothing, so results mean nothing.
`whole` is one card's pass; `parts` a pass in two parts, each of which comes from another rank and goes on to another one, at each layer.
`recorded` and `recorded_parts` are the same where layers were recorded around their attention: a graph's launch is a call of C here, too.
Before each layer `cold` bytes are read, as a host reads others: what the interpreter needs is no longer in the caches.

For each case: processor time of the thread, microseconds a layer and part, median and least of `passes` passes; operations of torch, calls
of Python's functions, and calls of the driver by their names, a layer and part. `code` is another checkout whose engine runs: two that take
turns compare. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import json
import os
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

GIVEN = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
ROOT = Path(GIVEN.get("code", Path(__file__).resolve().parent.parent)).resolve()
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.nn.attention import bias  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from bench.visit_host import IdleCard  # noqa: E402
from penstock import solve  # noqa: E402
from penstock.planner.common.measures import parse_bytes  # noqa: E402
from penstock.runtime.engine.open_session import open_session  # noqa: E402
from penstock.runtime.engine.passes.generate import Batch  # noqa: E402
from penstock.runtime.engine.session import Session  # noqa: E402
from penstock.runtime.hops.hop import HopMeter  # noqa: E402
from penstock.runtime.hops.peer_hop import Channel, Incoming, Outgoing, PeerHop  # noqa: E402
from penstock.runtime.kv.batch.kv_sequence import KvSequence  # noqa: E402
from penstock.runtime.kv.batch.row_parts import own_forward  # noqa: E402
from penstock.runtime.memory.card_events import CardEvents  # noqa: E402
from penstock.runtime.memory.ground import OpenCard  # noqa: E402
from penstock.runtime.model.rows import RowKind, Step  # noqa: E402
from penstock.runtime.ranks.dealt_layer import DealtLayer  # noqa: E402
from penstock.runtime.ranks.pass_parts import PassParts  # noqa: E402
from penstock.runtime.store.decoder import decoder_layers  # noqa: E402

CPU = torch.device("cpu")
PARTS = 2


class Driver:
    """Calls of C that do nothing, counted by name."""

    def __init__(self) -> None:
        self.calls, self.counts = Counter[str](), False
        self._call = ctypes.PyDLL(None).labs
        self._call.argtypes = (ctypes.c_long,)

    def call(self, name: str) -> None:
        if self.counts:
            self.calls[name] += 1
        self._call(1)


DRIVER = Driver()


class DriverEvent:
    """``memory.bare_copies.BareEvent``, of which each call is one of the driver's."""

    def record(self, _stream: object) -> None:
        DRIVER.call("event record")

    def wait(self, _stream: object) -> None:
        DRIVER.call("stream waits for event")

    def query(self) -> bool:
        DRIVER.call("event query")
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, _end: object) -> float:
        DRIVER.call("event time")
        return 0.0


class Card(IdleCard):
    """Whose VRAM is this host's memory, and whose events are a driver's."""

    def __init__(self) -> None:
        super().__init__()
        self._events: Any = CardEvents(DriverEvent)
        self._base = self._events.record(None)

    def holds(self, tensor: torch.Tensor) -> bool:
        return True

    def copying(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src)

    def copy_event(self) -> Any:
        return self._events.record(None)

    compute_event = copy_event

    def compute_waits(self, event: Any) -> None:
        event.before(None)

    def done(self, event: Any) -> bool:
        return bool(event.done())

    def time_of(self, event: Any) -> float:
        return float(event.seconds_after(self._base))


class Lane:
    """``hops.card_lane.CardLane``, each call of the driver's in its place."""

    def follow(self) -> None:
        DRIVER.call("event record")
        DRIVER.call("stream waits for event")

    def copy(self, into: int, source: int, nbytes: int) -> None:
        DRIVER.call("copy")

    def take(self, into: torch.Tensor, source: int) -> None:
        torch.mul(into, 1, out=into)

    def wait_word(self, address: int, value: int) -> None:
        DRIVER.call("stream waits for word")

    def write_word(self, address: int, value: int) -> None:
        DRIVER.call("word written")

    def keep(self, tensor: torch.Tensor) -> None:
        """Of code that asked for it."""
        DRIVER.call("event record")
        DRIVER.call("event query")

    def mark(self) -> Callable[[], None]:
        DRIVER.call("event record")
        return lambda: DRIVER.call("stream waits for event")

    def settle(self) -> None: ...
    def close(self) -> None: ...


class Ways:
    """From a rank before and to one behind that never say anything."""

    def __init__(self) -> None:
        self._memory = torch.zeros(1 << 21, dtype=torch.uint8)
        begin = self._memory.data_ptr()
        channel, meter = Channel([begin, begin + (1 << 20)], 1 << 20, begin, begin + 4), HopMeter()
        lane: Any = Lane()
        self._before, self._behind = PeerHop(None, Incoming(channel, lane, lane, meter)), PeerHop(Outgoing(channel, lane, meter), None)

    def before(self, peer: int) -> PeerHop:
        return self._before

    def behind(self, peer: int) -> PeerHop:
        return self._behind

    of = before

    def expect(self, parts: int) -> None: ...


class Pieces:
    """``recorded.card_pieces.CardPieces``, in which nothing is."""

    def __init__(self) -> None:
        self._cuts = 0

    def warming(self) -> AbstractContextManager[None]:
        return nullcontext()

    recording = warming

    def cut(self) -> int:
        self._cuts += 1
        return self._cuts - 1

    def launch(self, _number: int) -> None:
        DRIVER.call("graph launch")

    def close(self) -> None: ...


class Compiled:
    packed_metadata = ()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_: DRIVER.call("kernel of Triton")


class Kernel:
    """What ``triton.jit`` makes of a function."""

    def __init__(self, function: Callable[..., Any], varying: Sequence[str] = ()):
        self.arg_names, self.do_not_specialize = list(inspect.signature(function).parameters), varying

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        return lambda *_, **__: Compiled()


def play_kernels() -> None:
    """Have the engine's modules meet a Triton, a card's attention and products that compute nothing."""
    made = {name: types.ModuleType(name) for name in ("triton", "triton.language", "triton.language.extra")}
    triton: Any = made["triton"]
    triton.language, triton.next_power_of_2, triton.cdiv = (
        made["triton.language"],
        lambda n: 1 << (n - 1).bit_length(),
        lambda a, b: -(-a // b),
    )
    triton.language.constexpr, made["triton.language.extra"].libdevice = object, None  # type: ignore[attr-defined]
    triton.jit = lambda function=None, do_not_specialize=(): (
        (lambda one: Kernel(one, do_not_specialize)) if function is None else Kernel(function)
    )
    sys.modules |= made
    kernels = import_module("penstock.runtime.formats.kernels.layer_triton").LayerKernels()
    for module in [module for name, module in sys.modules.items() if name.startswith("penstock.") and hasattr(module, "layer_kernels")]:
        module.layer_kernels = lambda _device: kernels  # type: ignore[attr-defined]
    played: Any = functional
    played.linear = lambda x, weight, bias=None: x.new_empty(*x.shape[:-1], weight.shape[0])
    played.scaled_dot_product_attention = _attended
    any_bias: Any = bias
    any_bias.can_use_flash_attention = lambda _: True
    torch.ops.aten._scaled_dot_product_flash_attention = _Flash()  # type: ignore[assignment]
    with_flash = sys.modules.get("penstock.runtime.kv.attention.behind_others")
    if with_flash is not None:
        with_flash.can_use_flash_attention = lambda _: True  # type: ignore[attr-defined]


def _attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None, **more: Any) -> torch.Tensor:
    if isinstance(attn_mask, bias.CausalBias):
        return bias.CausalBias._dispatch(query, key, value, attn_mask, **more)
    rows, heads, tokens, dim = query.shape
    return query.new_empty(rows, tokens, heads, dim).transpose(1, 2)


class _Flash:
    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor]:
        return (_attended(query, key, value),)

    default = __call__


class Operations(TorchDispatchMode):
    """Counts what reaches the dispatcher."""

    count, whole = 0, False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return function(*args, **(kwargs or {}))


def checkpoint_of(work: Path, layers: int) -> Path:
    found = work / f"prompt-host-{layers}"
    if not found.exists():
        sizes = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
        config = LlamaConfig(num_hidden_layers=layers, max_position_embeddings=1024, dtype=torch.bfloat16, **sizes)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(found)
    return found


@contextmanager
def opened(checkpoint: Path, tokens: int) -> Iterator[Session]:
    """All in VRAM."""
    with open_session(solve(model=str(checkpoint), hardware="h100"), checkpoint, OpenCard(Card(), CPU)) as session:
        session.load(Batch([[5] * tokens], 4, 1 << 20))
        session.engine.stepper.attention._flash = True
        yield session


def in_parts(session: Session, tokens: int) -> None:
    """Have layers of ``session`` computed part by part, between two ranks."""
    engine, ways = session.engine, Ways()
    stepper = engine.stepper
    parts = PassParts(tokens // PARTS, stepper.attention, engine.kv, (engine._binder,), stepper.put)
    for layer in decoder_layers(engine.model):
        layer.forward = DealtLayer(own_forward(layer), lambda: ways, lambda: parts, 1, 1)
    before = stepper._begin_pass

    def begin_pass(step: Step) -> None:
        parts.begin_pass(step)
        before(step)

    stepper._begin_pass = begin_pass


def record(session: Session, tokens: int) -> None:
    """Have layers of ``session`` launched in pieces, for passes or parts of ``tokens``."""
    from penstock.runtime.recorded.prompts.prompt_layers import PromptLayers  # other checkouts may have none

    stepper, sequence = session.engine.stepper, KvSequence.of(0, [1] * tokens)
    layers = PromptLayers(decoder_layers(session.engine.model), stepper.attention, Pieces())
    sequence.hold(session.engine.kv.pages, tokens)
    layers.record(partial(stepper.run, Step((sequence.row(tokens, RowKind.prompt),))))
    sequence.release(session.engine.kv.pages)
    assert layers.refused is None, layers.refused
    before = stepper._begin_pass

    def begin_pass(step: Step) -> None:
        layers.begin_pass(step)
        before(step)

    stepper._begin_pass = begin_pass


def measured(session: Session, tokens: int, passes: int, parts: int, cold_bytes: int) -> Mapping[str, Any]:
    """Of prompts of ``tokens`` tokens."""
    engine, begun, taken = session.engine, [0], list[int]()
    layers, others = decoder_layers(engine.model), np.ones(max(8, cold_bytes) // 8)
    each = len(layers) * parts
    sequence = KvSequence.of(0, [1 + number % 200 for number in range(tokens)])
    sequence.hold(engine.kv.pages, tokens)
    step = Step((sequence.row(tokens, RowKind.prompt),))
    for _ in range(3):
        engine.stepper.run(step)
    with Operations() as operations, suppress(RuntimeError):  # code that makes a bias for each layer cannot be counted
        engine.stepper.run(step)
        operations.whole = True
    functions, DRIVER.counts = [0], True
    DRIVER.calls.clear()
    engine.stepper.run(step)
    DRIVER.counts, driver = False, {name: round(count / each, 1) for name, count in DRIVER.calls.items() if count >= each / 2}

    def count(_frame: object, event: str, _arg: object) -> None:
        functions[0] += event == "call"

    sys.setprofile(count)
    engine.stepper.run(step)
    sys.setprofile(None)
    gc.collect()
    gc.freeze()  # as a run does
    layers[0].register_forward_pre_hook(lambda *_: begun.__setitem__(0, time.thread_time_ns()))
    layers[-1].register_forward_hook(lambda *_: taken.append(time.thread_time_ns() - begun[0]))

    def forget(*_: object) -> None:
        """What the caches hold is something else's; the time that this takes is no layer's."""
        since = time.thread_time_ns()
        others.sum()
        begun[0] += time.thread_time_ns() - since

    if cold_bytes:
        for layer in layers:
            layer.register_forward_pre_hook(forget)
    for _ in range(passes):
        engine.stepper.run(step)
    us = [ns / 1e3 / each for ns in taken]
    counted = round(operations.count / each, 1) if operations.whole else None
    rest = {"operations": counted, "functions": round(functions[0] / each, 1), "driver": driver}
    return {"us_median": round(median(us), 1), "us_least": round(min(us), 1), **rest}


def main() -> None:
    work, tokens, passes = Path(GIVEN.get("work", "bench-work")), int(GIVEN.get("tokens", "8")), int(GIVEN.get("passes", "40"))
    torch.set_num_threads(1)
    checkpoint = checkpoint_of(work.resolve(), int(GIVEN.get("layers", "32")))
    play_kernels()
    cold_bytes, found = parse_bytes(GIVEN.get("cold", "0")) or 0, {}
    for case in GIVEN.get("cases", "whole,parts,recorded,recorded_parts").split(","):
        with ExitStack() as stack:
            session = stack.enter_context(opened(checkpoint, tokens))
            parts = PARTS if case.endswith("parts") else 1
            if parts > 1:
                in_parts(session, tokens)
            if case.startswith("recorded"):
                record(session, tokens // parts)
            found[case] = measured(session, tokens, passes, parts, cold_bytes)
        print(f"{case:14}", found[case], flush=True)
    print(json.dumps({"load": os.getloadavg()[0], "cases": found}))


if __name__ == "__main__":
    main()
