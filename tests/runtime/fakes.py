"""A device whose two streams run only when told to, a DRAM tier that spoils what is given back, and a ring between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial

import torch

from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.memory.device import CopyDevice
from penstock.runtime.memory.pieces import Segment, cut
from penstock.runtime.moving.ledger import Ledger
from penstock.runtime.moving.ring import UnitSource, VramRing
from tests.support import HostCopier

STREAMS = ("copies", "compute")
SPOILT = 255


@dataclass(eq=False)
class FakeEvent:
    """Recorded on a stream; ``at`` is the clock when the stream came to it."""

    at: int | None = None


@dataclass(eq=False)
class FlagEvent:
    """Has happened when somebody else's thread has written ``value``."""

    flag: torch.Tensor
    value: int

    @property
    def at(self) -> int | None:
        return self.value if int(self.flag[0]) >= self.value else None


@dataclass(frozen=True)
class _Record:
    event: FakeEvent


@dataclass(frozen=True)
class _Wait:
    event: FakeEvent | FlagEvent


class FakeLane:
    """A further stream of a ``FakeDevice``."""

    def __init__(self, queue: deque):
        self._queue = queue

    def copy(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._queue.extend(partial(dst.copy_, src) for dst, src in copies)

    def event(self) -> FakeEvent:
        event = FakeEvent()
        self._queue.append(_Record(event))
        return event

    def waits(self, event: FakeEvent) -> None:
        self._queue.append(_Wait(event))


class FakeDevice:
    """Two streams, and more where lanes are asked for, as queues of work that is done in any order that stream order and events allow.

    Bytes move when a copy is done, not when it is queued. The clock ticks once for each piece of work done. ``choose`` picks the next
    stream while the host waits; on the compute path the host must never wait.
    """

    def __init__(self, choose: Callable[[Sequence[str]], str] = lambda enabled: enabled[0]):
        self.clock = 0
        self.done_on = dict.fromkeys(STREAMS, 0)
        self.on_compute_path = False
        self._choose = choose
        self._queues: dict[str, deque] = {name: deque() for name in STREAMS}

    def launch(self, kernel: Callable[[], None]) -> None:
        """Queue ``kernel`` on the compute stream."""
        self._queues["compute"].append(kernel)

    def twin(self) -> FakeDevice:
        return self

    def lane(self) -> FakeLane:
        name = f"lane {len(self._queues)}"
        self._queues[name], self.done_on[name] = deque(), 0
        return FakeLane(self._queues[name])

    def holds(self, tensor: torch.Tensor) -> bool:
        return True

    def copying(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._queues["copies"].append(lambda: dst.copy_(src))

    def copy_parts(self, into: torch.Tensor, source: torch.Tensor, segments: Iterable[Segment]) -> None:
        for s in segments:
            self.copy(into[s.dst : s.dst + s.nbytes], source[s.src : s.src + s.nbytes])

    def driver_calls(self) -> None:
        """Only Python queues copies here."""

    def in_one_piece(self, begin: int, nbytes: int) -> bool:
        return True

    def event_ahead(self) -> tuple[FakeEvent, int]:
        raise NotImplementedError

    def copy_event(self) -> FakeEvent:
        return self._record("copies")

    def compute_event(self) -> FakeEvent:
        return self._record("compute")

    def idle_point(self) -> FakeEvent:
        return FakeEvent(self.clock)

    def copy_waits(self, event: FakeEvent) -> None:
        self._queues["copies"].append(_Wait(event))

    def compute_waits(self, event: FakeEvent) -> None:
        self._queues["compute"].append(_Wait(event))

    def compute_waits_for(self, flag: torch.Tensor, value: int) -> None:
        self._queues["compute"].append(_Wait(FlagEvent(flag, value)))

    def compute_writes(self, flag: torch.Tensor, value: int) -> None:
        self._queues["compute"].append(lambda: flag[:1].fill_(value))

    def host_waits(self, event: FakeEvent) -> None:
        assert not self.on_compute_path, "compute waited for the device on the host"
        while event.at is None:
            enabled = self.enabled()
            assert enabled, "the host waits for what nothing can bring about"
            self.advance(self._choose(enabled))

    def done(self, event: FakeEvent) -> bool:
        return event.at is not None

    def note_done(self, events: Iterable[FakeEvent]) -> None:
        assert all(event.at is not None for event in events), "an event that has not happened counts as one that has"

    def alias(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def time_of(self, event: FakeEvent) -> float:
        assert event.at is not None, "the time of an event that has not happened"
        return float(event.at)

    def enabled(self) -> list[str]:
        """Streams whose next piece of work can be done now."""
        return [name for name, queue in self._queues.items() if queue and not (isinstance(queue[0], _Wait) and queue[0].event.at is None)]

    def finish(self, stream: str, choose: Callable[[Sequence[str]], str] = lambda enabled: enabled[0]) -> None:
        """All that ``stream`` was given is done, and of the others what it waits for, or more."""
        while self._queues[stream]:
            self.advance(choose(self.enabled()))

    def advance(self, stream: str) -> None:
        """Do one piece of ``stream``'s work."""
        work = self._queues[stream].popleft()
        self.clock += 1
        self.done_on[stream] += 1
        if isinstance(work, _Record):
            work.event.at = self.clock
        elif not isinstance(work, _Wait):
            work()

    def _record(self, stream: str) -> FakeEvent:
        event = FakeEvent()
        self._queues[stream].append(_Record(event))
        return event


class SpoilingSource:
    """DRAM whose units differ from pass to pass and are overwritten the moment they are given back.

    ``late`` says whether a unit, by number, is still on its way when it is asked for; then nothing else may wait behind it.
    """

    def __init__(self, units: Sequence[Unit], nbytes: int, late: Callable[[int], bool] = lambda number: False):
        self._units = units
        self._nbytes = nbytes
        self._late = late
        self.held: dict[int, torch.Tensor] = {}
        """Units that were acquired and not given back, by number."""
        self.acquired = 0

    def arrived(self, unit: Unit) -> bool:
        assert unit == self._units[self.acquired % len(self._units)], "asked for out of order"
        return not self._late(self.acquired)

    def acquire(self, unit: Unit) -> tuple[int, torch.Tensor]:
        assert unit == self._units[self.acquired % len(self._units)], "fetched out of order"
        self.held[self.acquired] = contents(self.acquired, self._nbytes).clone()
        self.acquired += 1
        return self.acquired - 1, self.held[self.acquired - 1]

    def release(self, unit: Unit) -> None:
        number = next((number for number in self.held if self._units[number % len(self._units)] == unit), None)
        assert number is not None, "given back twice"
        self.held.pop(number).fill_(SPOILT)


@cache
def contents(number: int, nbytes: int) -> torch.Tensor:
    """What the ``number``-th unit since the start holds in DRAM; never ``SPOILT``, unlike the numbers around it everywhere. Nobody writes
    to it."""
    return ((torch.arange(nbytes) * 7 + number * 31) % SPOILT).to(torch.uint8)


@dataclass(frozen=True)
class Setting:
    """A small ring: ``kinds`` are the units of a pass, ``a`` for attention and ``f`` for FFN."""

    kinds: str = "af"
    slots: tuple[int, int] = (1, 1)
    distance: int = 1
    in_flight: int = 1
    chunk: int = 4
    wrap: bool = True
    balance: int = 1
    keep: int = 0
    late: bool = False
    """The SSD is always behind: no unit lies in DRAM before it is waited for."""

    def ring(self, device: CopyDevice, source: UnitSource, segments: Sequence[Segment], slot_bytes: int) -> VramRing:
        """Over slots that are spoilt at first."""
        units = self.units
        counts = zip(("attn", "ffn"), self.slots, strict=True)
        slots = {name: [torch.full((slot_bytes,), SPOILT, dtype=torch.uint8) for _ in range(n)] for name, n in counts}
        pieces, rest = tuple(cut(segments, self.chunk)), (self.wrap, self.balance, self.keep)
        return VramRing(units, lambda _: pieces, slots, source, device, self.distance, self.in_flight, Ledger(), *rest)

    @property
    def units(self) -> list[Unit]:
        return [Unit("attn" if kind == "a" else "ffn", i) for i, kind in enumerate(self.kinds)]


@dataclass
class Rig:
    """A ring on a fake device, driven by hand: five actors, each of which does one step when told to.

    ``copier`` and ``retirer`` are the ring's threads, ``host`` the thread that issues compute, ``copies`` and ``compute`` the device's
    streams. What each has done so far is the whole state: see :meth:`state`.
    """

    setting: Setting
    passes: int
    """Passes after which the host is at its end."""
    choose: Callable[[Sequence[str]], str] = lambda enabled: enabled[0]
    only_when_done: bool = False
    """The retirer goes on only when it need not wait for the device; the device's steps are then all taken by the device."""
    used: list[int] = field(default_factory=list)
    """Numbers whose kernels were done, in order."""

    def __post_init__(self) -> None:
        self.units = self.setting.units
        self.segments = (Segment(6, 0, 5), Segment(0, 5, 6))
        self.device = FakeDevice(self.choose)
        self.source = SpoilingSource(self.units, 11, lambda number: self.setting.late)
        self.ring = self.setting.ring(self.device, self.source, self.segments, 11)
        self.copied: list[int] = []
        """Numbers whose copy was queued, in that order."""
        self._holders: dict[int, int] = {}
        self._asked = 0
        self.checked = True
        self._device_copy, self.device.copy = self.device.copy, self._copy
        self._threads = {"copier": _Thread(self.ring.copying()), "retirer": _Thread(self.ring.retiring())}
        self._host = self._compute()
        self._next = next(self._host)
        self._host_steps = 0

    def enabled(self) -> list[str]:
        """Actors that can do something now."""
        threads = [name for name, thread in self._threads.items() if thread.ready()]
        if self.only_when_done and self.ring._queued and not self.device.done(self.ring._queued[0].end):
            threads = [name for name in threads if name != "retirer"]
        host = ["host"] if self._next is not None and self._next() else []
        return threads + host + self.device.enabled()

    def step(self, actor: str) -> None:
        """One step of ``actor``, then every rule is checked."""
        if actor in self._threads:
            self._threads[actor].step()
        elif actor == "host":
            self.device.on_compute_path = True
            self._next = next(self._host, None)
            self.device.on_compute_path = False
            self._host_steps += 1
        else:
            self.device.advance(actor)
        self.check()

    def replay(self, path: Sequence[str]) -> None:
        """Steps that another rig took, where each was checked."""
        self.checked = False
        for actor in path:
            self.step(actor)
        self.checked = True

    def check(self) -> None:
        """The window is kept, and without wrap-around nothing is fetched before its pass begins."""
        if not self.checked:
            return
        turns = self.ring.turns
        assert turns.left <= turns.entered <= turns.first <= turns.copied <= turns.fetched == self.source.acquired
        assert turns.fetched <= max(turns.entered + self.setting.distance, self._asked), "the copier ran too far ahead"
        assert turns.fetched <= turns.first + self.setting.balance, "more was fetched than may be chosen from"
        assert len(self.ring._queued) <= self.setting.in_flight, "too many copies in flight"
        if not self.setting.wrap:
            assert turns.fetched <= turns.begun * len(self.units), "fetched before its pass began"

    def state(self) -> tuple[int, ...]:
        """How far each actor is. Everything else follows from it: which bytes lie where, and what is queued."""
        return (*(t.steps for t in self._threads.values()), self._host_steps, *self.device.done_on.values())

    def state_after(self, actor: str) -> tuple[int, ...]:
        """The state to which one step of ``actor`` leads."""
        place = [*self._threads, "host", *self.device.done_on].index(actor)
        return tuple(steps + (k == place) for k, steps in enumerate(self.state()))

    @property
    def over(self) -> bool:
        """Whether compute has done all that it was to do."""
        return len(self.used) == self.passes * len(self.units)

    def _compute(self) -> Iterator[Callable[[], bool]]:
        for _ in range(self.passes):
            yield lambda: True
            self.ring.begin_pass()
            for unit in self.units:
                if not self.setting.distance:  # only then does asking change anything
                    yield lambda: True
                self._asked = self.ring.turns.asked = self.ring.turns.entered + 1
                yield self.ring.turns.may_enter
                number = self.ring.turns.entered
                _, buffer = self.ring.enter(unit)
                self.device.launch(partial(self._use, buffer, number))
                yield lambda: True
                self.device.launch(partial(self._use, buffer, number, last=True))
                self.ring.leave(unit, self.device.compute_event())

    def _copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """On the way to the device: what lay in the slot was left long enough ago, and the copy is not too far before its turn."""
        place, source = dst.untyped_storage().data_ptr(), src.untyped_storage().data_ptr()
        number = next(n for n, held in self.source.held.items() if held.untyped_storage().data_ptr() == source)
        if number not in self.copied:
            before = self._holders.get(place)
            assert before is None or before + self.setting.keep < self.ring.turns.left, "a slot was given away too soon"
            earlier = set(range(number)) - set(self.copied)
            assert number < min(earlier, default=number) + self.setting.balance, "copied too far before its turn"
            self._holders[place] = number
            self.copied.append(number)
        assert self._holders[place] == number, "two units were copied into one slot at once"
        self._device_copy(dst, src)

    def _use(self, buffer: torch.Tensor, number: int, last: bool = False) -> None:
        if self.checked:
            dram = contents(number, 11)
            want = torch.cat([dram[s.src : s.src + s.nbytes] for s in self.segments])
            assert torch.equal(buffer, want), f"unit number {number} was used before its bytes arrived or after they were overwritten"
        if last:
            self.used.append(number)


class _Thread:
    """A ring's thread, stepped by hand: it stands at what its generator yielded."""

    def __init__(self, work: Iterator[Callable[[], bool]]):
        self._work = work
        self._ready: Callable[[], bool] | None = next(work)
        self.steps = 0

    def ready(self) -> bool:
        return self._ready is not None and self._ready()

    def step(self) -> None:
        self._ready = next(self._work, None)
        self.steps += 1


class LockingCopier(HostCopier):
    """Copies at once, and locks pages up to ``most_bytes`` in all, ``largest`` in one go."""

    def __init__(self, most_bytes: int = 1 << 40, largest: int = 1 << 40):
        self.held: dict[int, int] = {}
        self.refusals = 0
        self.aliased = 0
        self._most = most_bytes
        self._largest = largest

    def lock(self, address: int, nbytes: int) -> str | None:
        assert address % 4096 == 0 and nbytes % 4096 == 0 and nbytes > 0
        if nbytes > self._largest or sum(self.held.values()) + nbytes > self._most:
            self.refusals += 1
            return "CUDA error 2"
        self.held[address] = nbytes
        return None

    def unlock(self, address: int) -> None:
        del self.held[address]

    def alias(self, host: torch.Tensor) -> torch.Tensor:
        start = host.data_ptr()
        assert any(at <= start and start + host.numel() <= at + n for at, n in self.held.items()), "kernels cannot read pageable memory"
        self.aliased += 1
        return host
