"""Two hosts beside one, played by two groups of processes on this machine: what a second drive brings, and what the network takes of it.

    python bench/hosts.py work=bench-work out=hosts.json                    # 16 layers of the demo geometry, half of the cores each
    python bench/hosts.py work=bench-work out=hosts.json layers=8 steps=12  # less
    python bench/hosts.py work=bench-work drive=1.2                         # the drive's GB/s: less where cores would bind

Each group is a `torchrun --nnodes=2` of its own on half of this machine's cores, with a host name of its own. It runs `bench/held_host.py`:
the group's reads are held to 0.4 of the drive by a token bucket, what it sends to 10 Gbit/s and 50 us. Plans are solved for that: the
drive's rates times 0.4, one layer kept in each host's DRAM, the network's hop as 50 us and a hop of gloo on this machine's loopback. Rows:

    decode: bytes read for a token / seconds, over what the held drives give together
    x one: seconds of a step by one group over seconds by two
    logits: 1 where `validate=full` finds them bit for bit those of the model held in memory
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cases import Row, run_cases  # noqa: E402
from bench.held_host import held_drive  # noqa: E402
from bench.keys import given_of, told_keys  # noqa: E402
from bench.link import Bench, machine  # noqa: E402

KEYS = ("work", "out", "model", "layers", "steps", "prompt", "drive")
SHARE = 0.4
SEND_GBPS, SEND_S = 1.25, 5e-5
HOSTS = ("left", "right")


class Played:
    """Both runs of one checkpoint."""

    def __init__(self, bench: Bench, profile: Mapping[str, Any], given: Mapping[str, str]):
        self.bench, self.given, self.profile = bench, given, profile
        self.probed_gbps = max(row[2] for row in profile["ssd"]["read"])
        self.drive_gbps = float(given.get("drive") or self.probed_gbps)
        self.one_s = 0.0
        cores = sorted(os.sched_getaffinity(0))
        self.cores = cores[: len(cores) // 2], cores[len(cores) // 2 :]
        self.held = self.drive_gbps * SHARE
        self.hop_s = SEND_S + self._gloo_hop_s()

    def _gloo_hop_s(self) -> float:
        command = [sys.executable, "-m", "penstock.runtime.timed.rank_times", "devices=cpu,cpu", "seconds=0.2"]
        told = subprocess.run(command, env=self.bench.env, capture_output=True, text=True, check=True).stdout
        return float(json.loads(told.strip().splitlines()[-1])["hop_s"])

    def facts(self) -> dict[str, Any]:
        """What was held, for the result."""
        return {
            "played": "two groups of processes on one machine, half of its cores each",
            "drive_probed_gbps": self.probed_gbps,
            "drive": f"{self.drive_gbps:.3f} GB/s, as {'drive= says' if 'drive' in self.given else 'probed'}",
            "reads": f"a token bucket of {self.held:.3f} GB/s a group, {SHARE} of that",
            "sends": f"{SEND_GBPS} GB/s and {SEND_S * 1e6:.0f} us each, in the wrapper",
            "hop_s": self.hop_s,
            "load_average": os.getloadavg()[0],
        }

    def checkpoint(self) -> Path:
        model, layers = self.given.get("model", "demo"), self.given.get("layers", "16")
        return self.bench.checkpoint(f"{model}-{layers}", f"model={model}", f"model.layers={layers}")

    def plan(self, hosts: int) -> Path:
        """For ``hosts``, as they are held."""
        checkpoint, out = self.checkpoint(), self.bench.work / f"hosts-{hosts}.yaml"
        work = {"prompt_tokens": self.given.get("prompt", "32"), "new_tokens": self.given.get("steps", "24"), "context_tokens": 0}
        changed = {"hosts": hosts, "network.gbps": SEND_GBPS, "network.hop_s": self.hop_s}
        asked = [
            *held_drive(self.profile, self.held),
            *(f"hardware.{key}={value}" for key, value in changed.items()),
            *(f"workload.{key}={value}" for key, value in work.items()),
        ]
        source = ["model=hf", f"model.checkpoint={checkpoint}"]
        self.bench.call(
            "planner",
            "solve",
            "hardware=local",
            *source,
            "force.cap_layers=1",
            "force.hwm_layers=4",
            f"ranks={hosts}",
            f"out={out}",
            *asked,
        )
        return out

    def run(self, hosts: int) -> dict[str, Any]:
        """The report of the first group."""
        plan, report = self.plan(hosts), self.bench.work / f"hosts-{hosts}.json"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        secret = secrets.token_hex(32)
        groups = [self._start(number, hosts, plan, report, port, secret) for number in range(hosts)]
        failed = [group.wait() for group in groups]
        if any(failed):
            raise SystemExit(f"a group ended with status {max(failed)}; see {self.bench.work}/group-*.txt")
        found = json.loads(report.read_text())
        assert isinstance(found, dict)
        return found

    def _start(self, number: int, hosts: int, plan: Path, report: Path, port: int, secret: str) -> subprocess.Popen[bytes]:
        held = {"HELD_READ_GBPS": self.held, "HELD_SEND_GBPS": SEND_GBPS, "HELD_SEND_S": SEND_S, "HELD_NAME": HOSTS[number]}
        held |= {"HELD_CORES": ",".join(map(str, self.cores[number])), "GLOO_SOCKET_IFNAME": "lo", "PENSTOCK_SECRET": secret}
        script = [str(ROOT / "bench" / "held_host.py"), "run", f"plan={plan}", f"out={report}", "validate=full"]
        launcher = [f"--nnodes={hosts}", f"--node-rank={number}", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
        command = [sys.executable, *(["-m", "torch.distributed.run", *launcher] if hosts > 1 else []), *script]
        told = (self.bench.work / f"group-{number}.txt").open("wb")
        return subprocess.Popen(command, env=self.bench.env | {k: str(v) for k, v in held.items()}, stdout=told, stderr=told)

    def rows(self, hosts: int) -> Iterator[Row]:
        report = self.run(hosts)
        made, ratio, case = report["measured"], report["ratio"], f"{hosts} host{'s' * (hosts > 1)}"
        seconds, taken = made["decode_s_per_token"], (0.0, made["dram_bytes"] / 1e9)
        gbps, limit = made["ssd_bytes_per_token"] / seconds / 1e9, hosts * self.held
        yield Row(case, f"decode: {seconds:.4f} s", gbps, limit, "GB/s", gbps / limit, "", ratio["decode_s_per_token"], *taken)
        if hosts == 1:
            self.one_s = seconds
        else:
            yield Row(case, "x one", self.one_s, seconds, "s", self.one_s / seconds, ">= 1.8", None, *taken)
        same = float(report["logits"]["identical"])
        yield Row(case, "logits bit for bit", same, 1.0, "", same, ">= 1.0", None, *taken)


def main() -> None:
    given = given_of(sys.argv[1:], KEYS)
    every = os.sched_getaffinity(0)
    bench = Bench(Path(given.get("work", "bench-work")).resolve())
    os.sched_setaffinity(0, sorted(every)[: len(every) // 2])
    profile = bench.probe()
    os.sched_setaffinity(0, every)
    played = Played(bench, profile, given)
    cases = {f"{hosts} hosts": partial(played.rows, hosts) for hosts in (1, 2)}
    where = machine(profile) | {"cores": len(every), "keys": told_keys(given)} | played.facts()
    run_cases(cases, where, Path(given["out"]) if "out" in given else None)


if __name__ == "__main__":
    main()
