"""Several cards, as the probe finds them: which are alike, what their links carry alone and at once, what a hop takes."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import threading
import types

import pytest
import torch
from omegaconf import OmegaConf

from penstock.planner.contract.config.better_profile import read_earlier, worse_than
from penstock.planner.contract.config.resolve_hardware import hardware_from, hardware_mapping
from penstock.planner.contract.given.links import GLOO, NCCL
from penstock.planner.probe import measure as probing
from penstock.planner.probe.findings import CannotMeasure, Figure, Findings
from penstock.planner.probe.gpu_rates import Gpu
from penstock.planner.probe.profile_table import _figures
from penstock.planner.probe.runtime_rates import HOPS, measure_hops
from penstock.planner.probe.watched.clocked import FULL, QUICK
from penstock.runtime.timed import recorded_hops
from penstock.runtime.timed.rank_times import measure
from tests.planner.test_presets import hardware
from tests.planner.test_probe_products import answering

TOLD = {"alone": [50.0, 50.0, 48.0, 52.0], "together": [[2, 97.0], [4, 160.0]], "hop_s": 7.2e-5, "word_hop_s": 4.9e-5, "p2p_gbps": 380.0}
TOLD |= {"free_bytes": [60 * 10**9, 80 * 10**9, 79 * 10**9, 80 * 10**9], "hops": {"by": "copies", "vram_bytes": 90 * 2**20}}
TOLD |= {"read_bytes": 16 * 2**30}


def probed(monkeypatch, shares=FULL, names=("H100",) * 4) -> Findings:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(name=names[index]))
    gpu = object.__new__(Gpu)
    gpu.name, gpu.index, gpu.context_bytes = "H100", 0, 10**9
    found = Findings("2026-11-23")
    found.add(Figure("gpu.h2d", [[2**20, 48.0], [2**26, 55.0]], "copies"))
    found.add(Figure("vram_bytes", 81 * 10**9, "CUDA"))
    meter = types.SimpleNamespace(say=lambda doing: None)
    probing._measure_links(found, meter, shares, gpu)
    return found


def test_all_cards_of_a_kind_are_found_and_their_links_at_once_are_relative_to_each_alone(monkeypatch):
    asked = answering(monkeypatch, TOLD)
    found = probed(monkeypatch)
    assert asked[0][2:] == ["penstock.runtime.timed.rank_times", "devices=0,1,2,3", "seconds=0.5"]
    assert found.numbers("devices") == [0, 1, 2, 3]
    assert found.number("vram_bytes") == 80 * 10**9, "the least of the others; of its own card this process has taken a part"
    cfg = hardware("h100")
    cfg.devices, cfg.links = [0, 1, 2, 3], probing._links(found)
    made = hardware_from(cfg)
    assert made.links.together.points == ((1, 55.0), (2, 106.7), (4, 176.0)) and made.cards == 4
    assert made.links.share(4, 4 * 55.0) == pytest.approx(0.8) and made.links.hop_s == 7.2e-5
    assert hardware_mapping(made)["links"] == {
        "together_gbps": [[1, 55.0], [2, 106.7], [4, 176.0]],
        "hop_s": 7.2e-5,
        "p2p_gbps": 380.0,
        "word_hop_s": 4.9e-5,
        "vram_bytes": 90 * 2**20,
    }
    assert dict(_figures(cfg))["links.together_gbps"].splitlines()[-1] == "4 GPUs 176.0 GB/s"


@pytest.mark.parametrize(("shares", "names", "devices"), [(QUICK, ("H100", "H100"), [0, 1]), (FULL, ("H100", "A2"), [])])
def test_a_quick_probe_counts_cards_alone_and_cards_that_were_not_measured_are_no_ranks(monkeypatch, shares, names, devices):
    asked = answering(monkeypatch, TOLD)
    found = probed(monkeypatch, shares, names)
    assert not asked and found.numbers("devices") == devices and probing._links(found) is None


class Played(Gpu):
    """A card of a played machine: its kind's rates, while it is the one in use."""

    KINDS = {"5080": (16, 55.0, 900.0), "3090": (24, 24.0, 850.0), "A2": (15, 12.0, 190.0)}
    """Name -> GB of VRAM, GB/s of the link, of the memory."""
    names: tuple[str, ...] = ()
    in_use = 0
    broken: tuple[str, ...] = ()
    """Kinds of which a figure cannot be had."""

    def __init__(self, index: int):
        if "lost" in self.names[index]:
            raise CannotMeasure("its context cannot start")
        self.index, self.name, self.context_bytes = index, self.names[index], 10**8 * (index + 1)
        self.device, type(self).in_use = f"cuda:{index}", index
        self.vram_bytes = self.KINDS[self.name][0] * 10**9

    def kinds(self):
        return {name: tuple(i for i, one in enumerate(self.names) if one == name) for name in self.names}

    def use(self):
        type(self).in_use = self.index

    def leave(self):
        self.check()

    def check(self):
        assert self.in_use == self.index, "another card is in use"
        return self.KINDS[self.name]

    def identity(self):
        room = self.check()[0]
        yield Figure("gpu.name", self.name, f"CUDA device {self.index}, PCIe 4 x16")
        yield Figure("gpu.context_bytes", self.context_bytes, "NVML")
        yield Figure("vram_bytes", room * 10**9, "free")

    def compute(self, seconds):
        memory = self.check()[2]
        if self.name in self.broken:
            raise RuntimeError("no such instruction")
        yield from (Figure(f"gpu.{name}", 10.0, "") for name in ("dense_tflops", "attention_tflops"))
        yield Figure("gpu.memory_gbps", memory, "")

    def link(self, arena, seconds):
        rate = self.check()[1]
        yield from (Figure(f"gpu.{way}", [[2**20, rate / 2], [2**26, rate]], "copies") for way in ("h2d", "d2h"))

    def pageable(self, seconds):
        self.check()
        yield Figure("gpu.h2d_pageable_gbps", 7.0, "")

    def both_ways(self, arena, seconds):
        self.check()
        yield Figure("gpu.h2d_with_d2h_gbps", 20.0, "")

    def issuing(self, arena, seconds):
        self.check()
        raise CannotMeasure("the interpreter was busy")
        yield


def machine_of(monkeypatch, names, broken=(), own=0, told=None):
    """What is said of such a machine's cards: what was found, and the profile."""
    monkeypatch.setattr(Played, "names", names)
    monkeypatch.setattr(Played, "broken", broken)
    monkeypatch.setattr(probing, "Gpu", Played)
    asked = answering(monkeypatch, told or {})
    shares = dataclasses.replace(QUICK, links_s=0.5 if told else 0.0, decode_s=0.0, products_s=0.0)
    gpu, found, arena = Played(own), Findings("2026-11-24"), types.SimpleNamespace()
    found.attempt(("vram_bytes",), gpu.identity)
    meter = types.SimpleNamespace(say=lambda doing: None)
    monkeypatch.setattr(probing, "measure_cpu", lambda *_: iter(()))
    monkeypatch.setattr(probing, "measure_launch", lambda *_: iter([Figure("layer_launch_s", 5e-4, "")]))
    with contextlib.ExitStack() as held:
        others = probing._measure_compute(found, meter, shares, arena, gpu, held)
    assert Played.in_use == own
    for path, value in (("dram_bytes", 64 * 10**9), ("cpu.cores", 8), ("ssd.read", [[2**22, 4, 3.0]]), ("cpu.matvec_gbps", 40.0)):
        found.add(Figure(path, value, ""))
    found.add(Figure("cpu.dense_tflops", 1.0, ""))
    found.add(Figure("dram.pin_s_per_gb", 0.2, ""))
    return found, probing._profile("played", found, gpu, others), asked


def test_a_card_of_another_kind_is_measured_and_stands_beside_the_first_one(monkeypatch, tmp_path):
    told = TOLD | {"alone": [50.0, 22.0], "together": [[2, 60.0]], "free_bytes": [15 * 10**9, 20 * 10**9]}
    found, cfg, asked = machine_of(monkeypatch, ("5080", "3090"), told=told)
    assert asked[0][2:] == ["penstock.runtime.timed.prompt_times", "gpu=0", f"seconds={QUICK.cpu_s / 3}"]
    assert asked[1][2:] == ["penstock.runtime.timed.rank_times", "devices=0,1", "seconds=0.5"]
    assert cfg.devices == [0, 1] and cfg.gpu.name == "5080"
    (other,) = cfg.others
    assert (other.device, other.vram_bytes, other.gpu.name, other.gpu.context_bytes) == (1, 24 * 10**9, "3090", 2 * 10**8)
    assert other.gpu.h2d == [[2**20, 12.0], [2**26, 24.0]] and other.gpu.memory_gbps == 850.0 and cfg.gpu.memory_gbps == 900.0
    assert cfg.vram_bytes == 16 * 10**9, "what the other card has free says nothing of this one"
    assert cfg.links.together_gbps == [[1, 55.0], [2, round(60 / 72 * 79, 3)]], "a share of both links' own peaks"
    assert cfg.origin["others"] == (
        "measured 2026-11-24: GPU 1 3090: CUDA device 1, PCIe 4 x16; each figure as that of gpu,"
        " but for gpu.copy_s (the interpreter was busy)"
    )
    assert cfg.origin["devices"] == "measured 2026-11-24: 1 of 5080, and 1 unlike it"
    path = tmp_path / "played.yaml"
    OmegaConf.save(OmegaConf.structured(cfg), path)
    again = read_earlier(path)
    assert again == cfg
    made = hardware_from(again)
    assert [made.card(number).gpu.h2d.peak for number in range(2)] == [55.0, 24.0] and made.cards == 2
    assert made.links.share(2, made.links_gbps(2)) == pytest.approx(60 / 72, rel=1e-4)
    figures = dict(_figures(cfg))
    assert figures["others.0.gpu.name"] == "3090" and figures["others.0.device"] == "1"
    slower = dataclasses.replace(cfg, others=[dataclasses.replace(other, gpu=dataclasses.replace(other.gpu, h2d=[[2**26, 10.0]]))])
    assert [str(worse) for worse in worse_than(cfg, slower)] == ["others.1 3090.h2d is 10, earlier 24"]


def test_all_cards_of_a_kind_are_like_the_one_that_was_measured_and_those_of_the_first_kind_come_first(monkeypatch):
    told = TOLD | {"alone": [50.0, 50.0, 22.0, 22.0], "free_bytes": [15 * 10**9, 14 * 10**9, 20 * 10**9, 20 * 10**9]}
    found, cfg, asked = machine_of(monkeypatch, ("3090", "5080", "3090", "5080"), own=1, told=told)
    assert asked[1][2:][1] == "devices=1,3,0,2" and cfg.devices == [1, 3, 0, 2]
    assert [(other.device, other.gpu.name) for other in cfg.others] == [(0, "3090"), (2, "3090")]
    assert cfg.vram_bytes == 14 * 10**9 + 2 * 10**8, "of its own kind the one that has least"
    assert [card.device for card in hardware_from(cfg).others] == [0, 2]


@pytest.mark.parametrize(
    ("names", "broken", "others", "says"),
    [
        (("5080", "A2"), ("A2",), [], "not measured: GPU 1 A2: gpu.dense_tflops: RuntimeError: no such instruction"),
        (("5080", "lost"), (), [], "not measured: GPU 1 lost: its context cannot start"),
        (
            ("5080", "A2", "3090"),
            ("A2",),
            [2],
            "CUDA device 2, PCIe 4 x16; each figure as that of gpu, but for gpu.copy_s (the interpreter was busy); "
            "without GPU 1 A2: gpu.dense_tflops: RuntimeError: no such instruction",
        ),
    ],
)
def test_a_card_without_rates_is_left_out_and_the_profile_says_why(monkeypatch, names, broken, others, says):
    found, cfg, _ = machine_of(monkeypatch, names, broken)
    assert [other.device for other in cfg.others] == others and cfg.origin["others"].endswith(says)
    assert cfg.devices == ([0, *others] if others else None) and cfg.links is None
    assert hardware_from(cfg).cards == 1 + len(others)


def test_cards_of_one_kind_have_no_others(monkeypatch):
    found, cfg, _ = machine_of(monkeypatch, ("5080", "5080"))
    assert cfg.others == [] and "others" not in cfg.origin and cfg.devices == [0, 1]


def test_links_that_cannot_be_timed_say_why(monkeypatch):
    answering(monkeypatch, {}, 1, "Traceback\nRuntimeError: NCCL")
    found = probed(monkeypatch)
    assert found.origin["links.together_gbps"] == "not measured: timing the links of all GPUs failed: RuntimeError: NCCL"
    assert probing._links(found) is None


class FakeRank:
    """A card whose link carries 50 GB/s alone, and less beside others; and its seat at the table."""

    free_bytes, read_bytes = 10, 2**30

    def __init__(self, rank: int, table: Table):
        self.rank, self.count, self.table = rank, table.count, table
        self.hops: list[tuple[str, int, int, bool]] = []
        self.is_busy = False

    def gathered(self, value):
        self.table.values[self.rank] = value
        self.table.barrier.wait(10)
        found = list(self.table.values)
        self.table.barrier.wait(10)
        return found

    def copied_gbps(self, seconds):
        self.table.seconds.append(seconds)
        return 50.0 - self.rank

    @contextlib.contextmanager
    def busy(self):
        self.is_busy = True
        yield
        self.is_busy = False

    def meet(self, meeting):
        return {"by": "copies", "vram_bytes": 90 * 2**20}

    def send(self, nbytes, to):
        self.hops.append(("to", to, nbytes, self.is_busy))

    def receive(self, nbytes, sender):
        self.hops.append(("from", sender, nbytes, self.is_busy))

    def recorded_hop_s(self, meeting, nbytes):
        return 2e-5 * (self.is_busy and nbytes == 16384)


class Table:
    def __init__(self, count: int):
        self.count, self.values, self.barrier = count, [0.0] * count, threading.Barrier(count)
        self.seconds: list[float] = []


def test_all_ranks_measure_in_turn_and_at_once():
    table, told = Table(3), {}
    ranks = [FakeRank(rank, table) for rank in range(3)]
    threads = [threading.Thread(target=lambda one: told.setdefault(one.rank, measure(one, one, 0.4)), args=(one,)) for one in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert told[0] == told[1] == told[2]
    assert told[0]["alone"] == [50.0, 49.0, 48.0] and told[0]["together"] == [[2, 99.0], [3, 147.0]]
    assert sorted(table.seconds) == [0.1] * 3 + [0.4] * 18, "each warms up, 3 alone in turn, 2 and 3 at once three times"
    assert told[0]["word_hop_s"] == 2e-5, "beside busy links"
    assert not ranks[2].hops
    for one, other in ((0, 1), (1, 0)):
        ways = [hop[:2] for hop in ranks[one].hops]
        assert ways == [("to", other), ("from", other)][:: 1 - 2 * one] * (len(ways) // 2), "there and back, each from one who is named"
        assert all(busy == (nbytes == 16384) for _, _, nbytes, busy in ranks[one].hops)


@pytest.mark.parametrize(("able", "found"), [({0, 1}, 2e-5), ({0}, 0.0), ({1}, 0.0)])
def test_hops_are_recorded_by_both_ranks_or_launched_by_none(monkeypatch, able, found):
    """A card would wait for the other one's word for ever."""
    asked: list[int] = []

    class Graph:
        def us(self, rounds):
            asked.append(rounds)
            return [20.0] * rounds

    monkeypatch.setattr(recorded_hops, "_recorded", lambda meeting, *_: Graph() if meeting.rank in able else None)
    table, told = Table(3), {}

    def seconds(rank: int) -> None:
        told[rank] = recorded_hops.recorded_hop_s(FakeRank(rank, table), torch.device("cpu"), 16384, 5)

    threads = [threading.Thread(target=seconds, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert (told[0], told[1], told[2]) == (found, found, 0.0) and asked == [5, 5] * bool(found)


def test_a_rank_that_fails_ends_all_at_once():
    """Or the first one waits as long as it has patience, and then says so, too."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock.runtime.timed.rank_times", "devices=cpu,none", "seconds=0.1"], capture_output=True, text=True
    )
    assert done.returncode == 1 and not done.stdout and "none" in done.stderr
    assert done.stderr.count("Traceback") == 1


def test_processes_without_cards_hop_by_gloo_and_a_probe_times_it(monkeypatch):
    told = {"alone": [5.0, 5.0], "together": [[2, 8.0]], "hop_s": 1.5e-4, "p2p_gbps": 1.25, "free_bytes": [0, 0]}
    asked = answering(monkeypatch, told)
    found = Findings("2026-11-23")
    found.attempt(HOPS, lambda: measure_hops(0.5))
    assert asked[0][2:] == ["penstock.runtime.timed.rank_times", "devices=cpu,cpu", "seconds=0.5"]
    cfg = hardware("laptop")
    cfg.gpu, cfg.links, cfg.vram_bytes = None, None, 0
    assert hardware_from(cfg).links == GLOO and "links" not in hardware_mapping(hardware_from(cfg))
    cfg.links = probing._links(found)
    made = hardware_from(cfg).links
    assert (made.hop_s, made.p2p_gbps) == (1.5e-4, 1.25)
    assert dict(_figures(cfg))["links.p2p_gbps"] == "1.2 GB/s"
    assert hardware_from(hardware("laptop")).links == NCCL
