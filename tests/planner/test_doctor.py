"""`planner doctor` on machines that are files in a directory."""

from __future__ import annotations

import json
import os
import resource
import struct
from pathlib import Path

import pytest

from penstock.planner.doctor import card_check as card_module
from penstock.planner.doctor.card_check import Card, card_findings, cards_on_the_bus, torch_cuda
from penstock.planner.doctor.disk_check import disk_findings
from penstock.planner.doctor.examination import document, examine
from penstock.planner.doctor.finding import Finding, Verdict
from penstock.planner.doctor.memory_check import memory_findings
from penstock.planner.doctor.memory_modules import module_findings
from penstock.planner.doctor.nodes import node_findings
from penstock.planner.doctor.processor import processor_findings
from penstock.planner.doctor.products_check import products_findings
from penstock.planner.probe.driver import Driver, NvmlGpu
from tests.cli import command, refusal

NO_CARD = Card(None, {}, "NVML: Driver Not Loaded")
GPU = NvmlGpu("GPU-1", "A Card", 24 * 10**9, 10**8, "PCIe 4 x16 now, PCIe 4 x16 at most")


def write(root: Path, **files: str) -> Path:
    """``root`` with files; ``__`` in a name is a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def meminfo(total_gib: float, free_gib: float, **more: int) -> str:
    lines = {"MemTotal": int(total_gib * 2**20), "MemAvailable": int(free_gib * 2**20), **more}
    return "".join(f"{key}: {value} kB\n" for key, value in lines.items())


def named(findings, name: str) -> Finding:
    return next(f for f in findings if f.name == name)


def test_every_finding_that_is_not_good_says_what_to_change(tmp_path: Path) -> None:
    write(tmp_path, proc__meminfo=meminfo(64, 10, SwapTotal=8 * 2**20, SwapFree=0))
    for finding in examine(tmp_path, NO_CARD, tmp_path):
        assert finding.found
        if finding.verdict in (Verdict.fair, Verdict.stops):
            assert finding.change and ":" in finding.change, "what, and why"
        if finding.verdict is Verdict.good:
            assert not finding.change


@pytest.mark.parametrize(
    ("free_gib", "verdict"),
    [(63, Verdict.good), (20, Verdict.fair), (1.5, Verdict.stops)],
)
def test_free_dram_is_good_fair_or_too_little_to_run(free_gib: float, verdict: Verdict, tmp_path: Path) -> None:
    found = named(memory_findings(write(tmp_path, proc__meminfo=meminfo(64, free_gib))), "DRAM")
    assert found.verdict is verdict


def test_a_containers_limit_is_told_and_is_fine_where_it_limits_nothing(tmp_path: Path) -> None:
    files = {
        "proc__self__cgroup": "0::/box\n",
        "proc__self__mountinfo": "1 1 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "sys__fs__cgroup__box__memory.current": "0",
    }
    for limit, verdict in ((8 * 2**30, Verdict.fair), (128 * 2**30, Verdict.good)):
        root = write(tmp_path, proc__meminfo=meminfo(64, 60), **files, **{"sys__fs__cgroup__box__memory.max": str(limit)})
        found = named(memory_findings(root), "cgroup limit")
        assert found.verdict is verdict and ("68.7 GB" in found.change) is (verdict is Verdict.fair)


def limited(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))


def test_a_page_locking_limit_is_good_only_where_it_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = resource.RLIM_INFINITY
    root = write(tmp_path, proc__meminfo=meminfo(64, 60), proc__self__status="CapEff:\t0000000000000000\n")
    for soft, hard, verdict, word in ((none, none, "good", ""), (2**23, 2**23, "fair", "memlock=-1"), (2**23, none, "fair", "ulimit -l")):
        limited(monkeypatch, soft, hard)
        found = named(memory_findings(root), "page-locking")
        assert found.verdict == verdict and word in found.change
    write(tmp_path, proc__self__status="CapEff:\t000001ffffffffff\n")
    assert named(memory_findings(root), "page-locking").verdict is Verdict.good, "root is not asked"


@pytest.mark.parametrize(
    ("text", "verdict"), [("always [madvise] never", "good"), ("[always] madvise never", "good"), ("always madvise [never]", "fair"),
                          (None, "unknown")]
)  # fmt: skip
def test_huge_pages_must_be_on_for_those_who_ask(text: str | None, verdict: str, tmp_path: Path) -> None:
    root = write(tmp_path, proc__meminfo=meminfo(64, 60))
    if text:
        write(root, sys__kernel__mm__transparent_hugepage__enabled=text + "\n")
    assert named(memory_findings(root), "huge pages").verdict == verdict


def test_reserved_huge_pages_and_swapped_memory_are_told(tmp_path: Path) -> None:
    text = meminfo(64, 60, SwapTotal=8 * 2**20, SwapFree=4 * 2**20, Hugepagesize=2048) + "HugePages_Total:    1024\n"
    found = list(memory_findings(write(tmp_path, proc__meminfo=text)))
    assert "2.15 GB" in named(found, "reserved pages").found and named(found, "swap").verdict is Verdict.fair
    assert "4.29 GB of 8.59 GB" in named(found, "swap").found
    idle = list(memory_findings(write(tmp_path, proc__meminfo=meminfo(64, 60, SwapTotal=2**20, SwapFree=2**20))))
    assert named(idle, "swap").verdict is Verdict.good and not any(f.name == "reserved pages" for f in idle)


def mounted(root: Path, path: Path, kind: str) -> Path:
    device = os.stat(path).st_dev
    return write(root, proc__self__mountinfo=f"1 1 {os.major(device)}:{os.minor(device)} / /x rw - {kind} none rw\n")


@pytest.mark.parametrize(
    ("kind", "verdict"), [("ext4", "good"), ("xfs", "good"), ("nfs4", "fair"), ("fuse.sshfs", "fair"), ("tmpfs", "fair")]
)
def test_a_file_system_that_is_memory_or_a_network_is_not_good(kind: str, verdict: str, tmp_path: Path) -> None:
    assert named(disk_findings(tmp_path, mounted(tmp_path, tmp_path, kind)), "file system").verdict == verdict


def test_direct_reads_are_tried_on_a_file_and_on_a_directory_and_nothing_is_left(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(8192))
    for path in (file, tmp_path):
        assert named(disk_findings(path, tmp_path), "O_DIRECT").verdict in (Verdict.good, Verdict.fair)
    assert list(tmp_path.iterdir()) == [file]


def test_a_directory_that_may_not_be_written_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.planner.doctor import disk_check as disk
    from penstock.planner.probe.findings import CannotMeasure

    def refuse(directory: Path) -> None:
        raise CannotMeasure("no scratch file: Permission denied")

    monkeypatch.setattr(disk, "scratch_file", refuse)
    found = named(disk_findings(tmp_path, tmp_path), "O_DIRECT")
    assert found.verdict is Verdict.unknown and "Permission denied" in found.found and "path=" in found.change


def test_little_room_is_told_but_a_checkpoint_may_lie_on_a_full_or_read_only_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for nbytes, verdict in ((0, "fair"), (10**9, "fair"), (10**12, "good")):
        monkeypatch.setattr("penstock.planner.doctor.disk_check.free_bytes", lambda path, nbytes=nbytes: nbytes)
        assert named(disk_findings(tmp_path, tmp_path), "free space").verdict == verdict
    stats = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result([*stats[:8], os.ST_RDONLY, *stats[9:]]))
    assert named(disk_findings(tmp_path, tmp_path), "free space").found == "read-only"


def test_a_working_directory_that_takes_no_file_stops_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert named(disk_findings(tmp_path, tmp_path), "working dir").verdict is Verdict.good
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = named(disk_findings(tmp_path, tmp_path), "working dir")
    assert found.verdict is Verdict.stops and str(tmp_path) in found.found


def test_a_drive_that_spins_is_told_but_not_blamed_on_a_virtual_machine(tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev
    drive = f"sys__dev__block__{os.major(device)}:{os.minor(device)}__queue__rotational"
    assert named(disk_findings(tmp_path, tmp_path), "drive").verdict is Verdict.unknown
    assert named(disk_findings(tmp_path, write(tmp_path, **{drive: "0\n"})), "drive").verdict is Verdict.good
    assert named(disk_findings(tmp_path, write(tmp_path, **{drive: "1\n"})), "drive").verdict is Verdict.fair
    write(tmp_path, proc__cpuinfo="flags : fpu hypervisor sse\n")
    assert named(disk_findings(tmp_path, tmp_path), "drive").verdict is Verdict.unknown


@pytest.mark.parametrize(
    ("governor", "driver", "verdict"),
    [("performance", "acpi-cpufreq", "good"), ("powersave", "acpi-cpufreq", "fair"), ("powersave", "intel_pstate", "good"),
     ("ondemand", "", "fair"), ("schedutil", "acpi-cpufreq", "good"), ("", "", "unknown")],
)  # fmt: skip
def test_a_governor_that_holds_clocks_down_is_told(governor: str, driver: str, verdict: str, tmp_path: Path) -> None:
    for key, text in (("governor", governor), ("driver", driver)):
        if text:
            write(tmp_path, **{f"sys__devices__system__cpu__cpu0__cpufreq__scaling_{key}": text + "\n"})
    assert named(processor_findings(tmp_path), "CPU governor").verdict == verdict


@pytest.mark.parametrize(
    ("cpus", "card", "verdict", "said"),
    [("0-15", "1", "fair", "on node 1"), ("8-15", "1", "good", "node 1"), ("0-15", "-1", "good", "no card"),
     ("0-15", None, "good", "no card")],
)  # fmt: skip
def test_cores_of_another_node_than_the_cards_are_told(cpus: str, card: str | None, verdict: str, said: str, tmp_path: Path) -> None:
    assert named(node_findings(tmp_path), "NUMA").found == "one node"
    node = "sys__devices__system__node__node"
    write(tmp_path, **{f"{node}0__cpulist": "0-7\n", f"{node}1__cpulist": "8-15\n", f"{node}2__cpulist": "\n"})
    write(tmp_path, proc__self__status=f"Cpus_allowed_list:\t{cpus}\n")
    if card is not None:
        device = "sys__bus__pci__devices__0:1__"
        write(tmp_path, **{f"{device}vendor": "0x10de\n", f"{device}class": "0x030000\n", f"{device}numa_node": f"{card}\n"})
    found = named(node_findings(tmp_path), "NUMA")
    assert found.verdict == verdict and said in found.found
    assert verdict == "good" or "numactl --cpunodebind=1 --preferred=1" in found.change


def driver_of(card: Card, built: tuple[int, int] | None, root: Path, monkeypatch: pytest.MonkeyPatch) -> Finding:
    monkeypatch.setattr(card_module, "torch_cuda", lambda: built)
    return named(card_findings(card, root), "driver")


def test_without_a_card_the_cpu_is_good_and_with_one_but_no_driver_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert driver_of(NO_CARD, None, tmp_path, monkeypatch).verdict is Verdict.good
    write(tmp_path, **{"sys__bus__pci__devices__0:1__vendor": "0x10de\n", "sys__bus__pci__devices__0:1__class": "0x030200\n"})
    write(tmp_path, **{"sys__bus__pci__devices__0:2__vendor": "0x10de\n", "sys__bus__pci__devices__0:2__class": "0x068000\n"})
    assert len(cards_on_the_bus(tmp_path)) == 1
    found = driver_of(NO_CARD, None, tmp_path, monkeypatch)
    assert found.verdict is Verdict.fair and "Driver Not Loaded" in found.found and "--gpus" in found.change


def test_a_driver_too_old_for_torch_stops_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    old, new = (12, 8), (13, 0)
    for cuda, built, verdict in ((old, new, "stops"), (new, new, "good"), (new, old, "good"), (new, None, "fair")):
        card = Card(Driver("580.65", cuda), {GPU.uuid: GPU})
        assert driver_of(card, built, tmp_path, monkeypatch).verdict == verdict
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "hidden" in driver_of(Card(Driver("580.65", (13, 0)), {GPU.uuid: GPU}), (13, 0), tmp_path, monkeypatch).found


def test_a_card_that_others_use_is_told(tmp_path: Path) -> None:
    from dataclasses import replace

    busy = replace(GPU, used_bytes=10 * 10**9)
    card = Card(Driver("580.65", (13, 0)), {"1": GPU, "2": busy})
    verdicts = [f.verdict for f in card_findings(card, tmp_path) if f.name == "A Card"]
    assert verdicts == [Verdict.good, Verdict.fair]


def test_a_library_that_is_not_installed_stops_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_module, "NEEDED", ("torch", "no-such-library"))
    found = named(card_findings(NO_CARD, tmp_path), "libraries")
    assert found.verdict is Verdict.stops and found.change.startswith("pip install no-such-library")


def test_torchs_cuda_is_read_without_importing_torch() -> None:
    import subprocess
    import sys

    code = "import sys; from penstock.planner.doctor.card_check import torch_cuda; print(torch_cuda(), 'torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == f"{torch_cuda()} False"


def test_doctor_tells_each_finding_ends_with_json_and_leaves_nothing(tmp_path: Path) -> None:
    result = command("planner", "doctor", cwd=tmp_path)
    *told, last = result.stdout.splitlines()
    found = json.loads(last)
    assert result.returncode == (1 if found["stops"] else 0) and result.stderr == ""
    names = {f["name"] for f in found["findings"]}
    assert {"driver", "DRAM", "cgroup limit", "page-locking", "huge pages", "swap", "file system", "O_DIRECT", "free space"} <= names
    assert all(any(f["name"] in line for line in told) for f in found["findings"] if len(f["name"]) <= 14)
    assert "\x1b" not in result.stdout and max(map(len, told)) <= 80 and list(tmp_path.iterdir()) == []


def test_what_stops_a_run_is_the_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    from penstock.planner.asked.verb_schema import DoctorConfig
    from penstock.planner.verbs.doctor_verb import doctor_verb

    monkeypatch.setattr("penstock.planner.doctor.disk_check.free_bytes", lambda path: 0)
    assert doctor_verb(DoctorConfig(path=str(tmp_path), out=str(tmp_path / "d.json"))) == 1
    assert "1 of" in capsys.readouterr().out and json.loads((tmp_path / "d.json").read_text())["stops"] == 1


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "path=nowhere: no such file" in refusal("planner", "doctor", "path=nowhere", cwd=tmp_path)


def test_the_document_counts_what_stops() -> None:
    found = (Finding("a", "x", Verdict.stops, "y: z"), Finding("b", "x", Verdict.good))
    assert document(found)["stops"] == 1 and document(found)["findings"][1]["change"] is None


ALL = "avx2 avx512f avx512_bf16 avx512_fp16 amx_bf16"


@pytest.mark.parametrize(
    ("name", "flags", "verdict", "said"),
    [
        ("Intel(R) Xeon(R) Platinum 8480C", ALL, "good", "AMX"),
        ("AMD EPYC 9354", "avx2 avx512f avx512_bf16", "good", "AVX-512 with BF16"),
        ("Intel(R) Xeon(R) Platinum 8480C", "avx2 avx512f avx512_bf16 avx512_fp16", "fair", "AMX is hidden"),
        ("Intel(R) Xeon(R) Gold 6148", "avx2", "fair", "BIOS"),
        ("Intel(R) Core(TM) i9-13900K", "avx2", "good", "AVX2"),
        ("AMD EPYC", "avx2 hypervisor", "fair", "-cpu host"),
        ("AMD EPYC 9R14", "avx2 hypervisor", "fair", "-cpu host"),
        ("AMD EPYC 7763 64-Core Processor", "avx2 hypervisor", "good", "AVX2"),
        ("AMD Ryzen 9 5950X 16-Core Processor", "avx2 hypervisor", "good", "AVX2"),
        ("AMD Ryzen 9 7950X 16-Core Processor", "avx2 hypervisor", "fair", "-cpu host"),
        ("Intel(R) Xeon(R) CPU E5-2686 v4 @ 2.30GHz", "avx2 hypervisor", "good", "AVX2"),
        ("13th Gen Intel(R) Core(TM) i7-13700K", "avx2 hypervisor", "good", "AVX2"),
        ("QEMU Virtual CPU", "sse2 hypervisor", "fair", "-cpu host"),
        ("", "", "unknown", "does not say"),
    ],
)
def test_instructions_that_bios_or_hypervisor_hide_are_told(name: str, flags: str, verdict: str, said: str, tmp_path: Path) -> None:
    write(tmp_path, proc__cpuinfo=f"model name\t: {name}\nflags\t\t: {flags}\n" if flags else "")
    found = named(products_findings(tmp_path), "instructions")
    assert found.verdict == verdict and said in found.found + found.change


@pytest.mark.parametrize(("allowed", "verdict"), [("0-7", "good"), ("0,1,4,5", "fair"), ("0-3", None)])
def test_hardware_threads_that_share_a_core_are_told_to_who_was_given_a_part(allowed: str, verdict: str | None, tmp_path: Path) -> None:
    """Threads 0 to 3 lie on four cores, and 4 to 7 again."""
    cpus = "sys__devices__system__cpu__"
    write(tmp_path, proc__self__status=f"Cpus_allowed_list:\t{allowed}\n", **{f"{cpus}online": "0-7\n"})
    for n in range(8):
        write(tmp_path, **{f"{cpus}cpu{n}__topology__thread_siblings_list": f"{n % 4},{n % 4 + 4}\n"})
    found = [f for f in products_findings(tmp_path) if f.name == "SMT"]
    assert [f.verdict for f in found] == ([verdict] if verdict else [])
    assert verdict != "fair" or "4 hardware threads on 2 cores" in found[0].found


@pytest.mark.parametrize(("stopped", "verdict"), [(0, "good"), (400, "fair")])
def test_a_quota_that_stops_threads_is_told(stopped: int, verdict: str, tmp_path: Path) -> None:
    files = {
        "proc__self__cgroup": "0::/box\n",
        "proc__self__mountinfo": "1 1 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "sys__fs__cgroup__box__cpu.max": "800000 100000\n",
        "sys__fs__cgroup__box__cpu.stat": f"nr_periods 1000\nnr_throttled {stopped}\n",
    }
    assert not any(f.name == "CPU quota" for f in products_findings(tmp_path)), "no group, no quota"
    found = named(products_findings(write(tmp_path, **files)), "CPU quota")
    assert found.verdict == verdict and "8 cores" in found.found


def memory_device(locator: str, bank: str, mib: int, rated: int = 4800, clocked: int = 4800) -> bytes:
    """An SMBIOS structure of type 17, version 2.7."""
    size = mib if mib < 0x7FFF else 0x7FFF
    fields = bytearray(0x22)
    struct.pack_into("<BBH", fields, 0, 17, len(fields), 1)
    struct.pack_into("<H", fields, 0x0C, size)
    fields[0x10], fields[0x11] = 1, 2 if bank else 0
    struct.pack_into("<H", fields, 0x15, rated)
    struct.pack_into("<I", fields, 0x1C, mib)
    struct.pack_into("<H", fields, 0x20, clocked)
    return bytes(fields) + b"\0".join(text.encode() for text in (locator, bank) if text) + b"\0\0"


OTHER = struct.pack("<BBH", 4, 4, 0) + b"\0\0"
GIB32, NONE = 32 * 1024, 0


@pytest.mark.parametrize(
    ("devices", "verdict", "said"),
    [
        ([("DIMM_A1", "", GIB32), ("DIMM_A2", "", NONE), ("DIMM_B1", "", GIB32), ("DIMM_B2", "", NONE)], "good", "2 of 34.4 GB, 4800 MT/s"),
        ([("DIMM_A1", "", GIB32), ("DIMM_A2", "", GIB32), ("DIMM_B1", "", NONE)], "fair", "1 of 2 channels"),
        ([("DIMM 0", "P0 CHANNEL A", GIB32), ("DIMM 0", "P0 CHANNEL B", 16384)], "fair", "fill all channels alike"),
        ([("Controller0-ChannelA-DIMM0", "BANK 0", GIB32), ("Controller1-ChannelA-DIMM0", "BANK 0", NONE)], "fair", "1 of 2 channels"),
        ([("DIMM_A1", "", GIB32, 5600, 4800), ("DIMM_B1", "", GIB32, 5600, 4800)], "fair", "rated 5600 MT/s"),
        ([("DIMM1", "", GIB32), ("DIMM2", "", NONE)], "good", "1 of 34.4 GB"),
    ],
)  # fmt: skip
def test_empty_uneven_and_slow_memory_channels_are_told(devices: list[tuple], verdict: str, said: str, tmp_path: Path) -> None:
    table = tmp_path / "sys/firmware/dmi/tables/DMI"
    assert named(module_findings(tmp_path), "memory modules").verdict is Verdict.unknown
    table.parent.mkdir(parents=True)
    table.write_bytes(OTHER + b"".join(memory_device(*device) for device in devices) + struct.pack("<BBH", 127, 4, 9) + b"\0\0")
    found = named(module_findings(tmp_path), "memory modules")
    assert found.verdict == verdict and said in found.found + found.change


def test_a_table_of_modules_that_is_cut_says_nothing(tmp_path: Path) -> None:
    table = tmp_path / "sys/firmware/dmi/tables/DMI"
    table.parent.mkdir(parents=True)
    table.write_bytes(memory_device("DIMM_A1", "", GIB32)[:20])
    assert named(module_findings(tmp_path), "memory modules").verdict is Verdict.unknown


def test_memory_that_is_dealt_over_sockets_is_told(tmp_path: Path) -> None:
    write(tmp_path, **{"sys__devices__system__node__node0__cpulist": "0-3\n"})
    write(tmp_path, **{f"sys__devices__system__cpu__cpu{n}__topology__physical_package_id": f"{n // 2}\n" for n in range(4)})
    assert "BIOS" in named(node_findings(tmp_path), "interleaving").change
    write(tmp_path, proc__self__numa_maps="55d0 interleave:0-1 file=/bin/x\n", **{"sys__devices__system__node__node1__cpulist": "2-3\n"})
    assert "numactl --interleave" in named(node_findings(tmp_path), "interleaving").change
    write(tmp_path, proc__self__numa_maps="55d0 default file=/bin/x\n")
    assert not any(f.name == "interleaving" for f in node_findings(tmp_path))
