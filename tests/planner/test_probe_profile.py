"""The profile as a file and as a table."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from penstock.planner.common.errors import UserError
from penstock.planner.common.user_folder import profile_dir
from penstock.planner.contract.config.config_schema import CpuConfig, DramConfig, GpuConfig, HardwareConfig, SsdConfig
from penstock.planner.contract.config.profile_files import write_profile
from penstock.planner.probe.profile_table import profile_table


def card() -> GpuConfig:
    return GpuConfig(
        name="a GPU",
        context_bytes=5,
        dense_tflops=1.0,
        attention_tflops=0.5,
        burst_tflops=1.5,
        burst_s=0.06,
        memory_gbps=2.0,
        h2d=[[262144, 20.0]],
        d2h=[[262144, 19.0]],
        h2d_pageable_gbps=7.0,
        h2d_with_d2h_gbps=45.0,
    )


def profile(gpu: bool = False) -> HardwareConfig:
    return HardwareConfig(
        name="local",
        vram_bytes=0,
        dram_bytes=10,
        ssd_bytes=20,
        ssd=SsdConfig([[1048576, 4, 1.25]], 0.0),
        dram=DramConfig(20.0, 22.0, 0.3),
        cpu=CpuConfig(2, 1, 14.0, 0.16),
        gpu=card() if gpu else None,
        layer_launch_s=3e-4,
        origin={"ssd.write_gbps": "not measured: no room in [x]", "ssd.read": "measured 2026-11-21: O_DIRECT"},
    )


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CONFIG_DIR", str(tmp_path / "config"))


@pytest.mark.parametrize("gpu", [False, True])
def test_a_written_profile_reads_back_as_the_same_configuration(gpu):
    path = write_profile("local", profile(gpu))
    assert path == profile_dir() / "hardware" / "local.yaml"
    read = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(HardwareConfig), OmegaConf.load(path)))
    assert read == profile(gpu)


def test_the_directory_is_the_first_of_the_three_that_is_set(monkeypatch, tmp_path):
    assert profile_dir() == tmp_path / "config"
    monkeypatch.delenv("PENSTOCK_CONFIG_DIR")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    assert profile_dir() == tmp_path / "xdg" / "penstock"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert profile_dir() == tmp_path / ".config" / "penstock"


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_write_that_breaks_off_keeps_the_old_profile_and_leaves_nothing_else(monkeypatch, failure):
    path = write_profile("local", profile())
    before = path.read_text()

    def broken(_):
        raise failure

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises((KeyboardInterrupt, UserError)):
        write_profile("local", profile(gpu=True))
    assert path.read_text() == before
    assert [p.name for p in path.parent.iterdir()] == ["local.yaml"]


@pytest.mark.parametrize("name", ["../escape", "", "a/b", ".hidden"])
def test_a_name_that_is_no_file_name_is_refused(name):
    with pytest.raises(UserError, match="probe.name="):
        write_profile(name, profile())


def test_a_directory_that_cannot_be_made_is_one_clear_line(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PENSTOCK_CONFIG_DIR", str(tmp_path / "file"))
    with pytest.raises(UserError, match="cannot write the profile .*PENSTOCK_CONFIG_DIR"):
        write_profile("local", profile())


def test_the_table_shows_the_grid_and_says_why_a_figure_is_missing():
    console = Console(width=160, record=True, quiet=False, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(profile_table(profile(gpu=True)))
    text = console.export_text()
    assert "1 MiB  1.25" in text
    assert "not measured" in text and "no room in [x]" in text
    assert "0.00 GB/s" not in text


def test_importing_the_package_loads_neither_torch_nor_rich():
    code = (
        "import sys, penstock.planner.contract.config.profile_files; print([m for m in ('torch', 'rich', 'omegaconf') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_the_measuring_module_imports_without_torch():
    code = "import sys; sys.modules['torch'] = None; from penstock.planner.probe import measure, gpu_rates, cpu_rates"
    subprocess.run([sys.executable, "-c", code], check=True)
