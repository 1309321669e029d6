"""Every preset is whole, says where its figures come from, and holds the bytes of the real model."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from importlib import resources
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from penstock.planner.common.errors import UserError
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.config.config_schema import HardwareConfig, ModelConfig
from penstock.planner.contract.config.geometry import hf_config_dict, spec_from_geometry
from penstock.planner.contract.config.resolve import model_from
from penstock.planner.contract.config.resolve_hardware import hardware_from
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.rules.broken import broken_rules
from penstock.planner.solver.program import solve
from penstock.runtime.beside.host_matrix import host_matrix_of
from penstock.runtime.timed.decoder_times import parts_of, samples
from tests.planner.test_geometry import meta_bytes, spec_bytes
from tests.support import workload

PARAMETERS = {
    "llama8b": 8_030_261_248,
    "llama70b": 70_553_706_496,
    "qwen3-32b": 32_762_123_264,
    "mixtral8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}
"""As the models' publishers count them."""

HARDWARE = (
    "rtx5080", "rtx5080-rtx3090", "rtx5090", "rtx5070ti", "rtx4090", "rtx4080", "rtx3090", "rtx3060", "rtx6000ada", "laptop",
    "t4", "l40s", "a100-80g", "h100", "h100x2", "h100x4", "h200", "cpu",
)  # fmt: skip
MODELS = (*PARAMETERS, "demo")
PUBLISHED = {
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v3.1": 671_026_419_200,
    "kimi-k2": 1_026_408_232_448,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "glm-4.5-air": 106_852_251_264,
    "llama-4-scout": 107_769_861_120,
    "minimax-m2": 228_689_764_864,
    "gemma-3-27b": 27_009_346_304,
}
"""Models that are planned from their published configs: the decoder's parameters."""


def names(group: str) -> set[str]:
    return {entry.name.removesuffix(".yaml") for entry in (resources.files("conf") / group).iterdir() if entry.name.endswith(".yaml")}


@functools.cache
def load(group: str, name: str, schema: type) -> Any:
    """A preset merged onto its schema, as Hydra does it: a wrong key or type raises. Read once: no test writes to it."""
    plain = OmegaConf.create((resources.files("conf") / group / f"{name}.yaml").read_text())
    assert plain.pop("defaults") == ["schema", "_self_"]
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), plain))


def model(name: str) -> ModelConfig:
    return load("model", name, ModelConfig)


def hardware(name: str) -> HardwareConfig:
    """Whoever asks may change it."""
    return copy.deepcopy(load("hardware", name, HardwareConfig))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of everything below ``value``; a table of rows is one leaf."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from leaves(below, f"{path}.{key}" if path else key)
    else:
        yield path, value


def test_the_presets_that_are_promised_are_there():
    assert names("hardware") >= set(HARDWARE)
    assert names("model") >= {*MODELS, *PUBLISHED, "hf"}


@pytest.mark.parametrize("name", HARDWARE)
class TestHardware:
    def test_it_makes_a_profile(self, name):
        profile = hardware_from(hardware(name))
        assert profile.name == name
        assert (profile.gpu is None) == (name == "cpu")

    def test_every_figure_says_where_it_comes_from(self, name):
        cfg = dataclasses.asdict(hardware(name))
        origin = cfg.pop("origin")
        only_runs_tell = {"pass_s", "start_s", "cpu.threads", "ssd.long_gbps", "ssd.burst_s", "host.ahead_bytes"}
        only_runs_tell |= {"host.attention_beside_h2d", "host.h2d_beside_attention"}
        only_runs_tell |= {"cpu.attention_gbps", "cpu.attention_tflops"}
        only_runs_tell |= {"gpu.burst_tflops", "gpu.burst_s"} if not cfg["gpu"] or not cfg["gpu"]["burst_tflops"] else set()
        of_other_machines = {"hosts", "network.gbps", "network.hop_s", "links.word_hop_s"}
        figures = (
            {path for path, value in leaves(cfg) if isinstance(value, int | float | list) and value != []}
            - only_runs_tell
            - of_other_machines
        )
        assert len(figures) >= 12
        uncovered = {path for path in figures if not any(path == key or path.startswith(f"{key}.") for key in origin)}
        assert not uncovered
        groups = {path.rsplit(".", depth)[0] for path in figures for depth in range(path.count(".") + 1)}
        assert set(origin) <= figures | groups, "an origin names nothing"
        assert all(text.partition(":")[0].split()[0] in ("datasheet", "measured", "derived") for text in origin.values())

    def test_its_rates_are_possible(self, name):
        """Nothing beats the link that it goes through, and curves grow with size."""
        p = hardware_from(hardware(name))
        assert 2 * p.dram_copy_gbps < 1.1 * p.dram_bus_gbps
        assert p.cpu_matvec_gbps <= p.dram_bus_gbps
        if p.host:
            for name, curve in p.host.f16_products.items():
                beside = p.host.products["BF16" if name == "F16" else name]
                assert all(rate < beside.at(rows) + 1e-6 for rows, rate in curve.points), "F16 costs no less than BF16"
        assert max(point.gbps for point in p.ssd_read) < p.dram_copy_gbps
        if p.gpu:
            assert max(point.gbps for point in p.ssd_read) + p.gpu.h2d.peak < p.dram_bus_gbps, "a drive leaves the bus to the link"
            assert_gpu_is_possible(p)


def assert_gpu_is_possible(p: HardwareProfile) -> None:
    gpu = p.gpu
    for curve in (gpu.h2d, gpu.d2h):
        sizes, rates = zip(*curve.points, strict=True)
        assert list(sizes) == sorted(set(sizes)) and list(rates) == sorted(rates)
        assert curve.peak < 63.0, "PCIe 5 x16 carries 63 GB/s"
    assert gpu.h2d_pageable_gbps < gpu.h2d.peak
    assert gpu.h2d_with_d2h_gbps <= gpu.h2d.peak
    assert gpu.memory_gbps > gpu.h2d.peak
    assert gpu.context_bytes < p.vram_bytes / 10


CORE_ROWS = (1, 2, 4, 8, 16)
CORE: dict[str, dict[str, tuple[float, ...]]] = {
    "products": {
        "BF16": (25.57, 24.71, 21.90, 10.11, 5.23),
        "FP8": (5.24, 4.73, 3.82, 3.09, 1.93),
        "FP8-row": (5.31, 4.85, 3.84, 3.09, 1.92),
        "MXFP4": (11.85, 7.96, 4.75, 1.94, 1.13),
        "INT4-128": (16.78, 10.35, 5.18, 1.86, 1.13),
        "INT8-row": (20.43, 18.97, 12.06, 3.01, 1.90),
        "GPTQ4-128": (5.81, 4.69, 3.25, 1.53, 0.96),
        "AWQ-128": (3.80, 3.26, 2.46, 1.34, 0.89),
        "NVFP4": (11.52, 8.12, 4.80, 1.58, 1.04),
        "lossless": (7.91, 7.59, 6.99, 5.10, 3.04),
        "Q8_0": (19.40, 15.39, 10.52, 3.31, 2.05),
        "Q4_0": (11.64, 8.44, 4.97, 1.67, 1.06),
        "Q4_K": (14.44, 10.01, 5.39, 1.62, 1.04),
        "Q5_K": (14.36, 10.25, 5.88, 1.77, 1.20),
        "Q6_K": (13.59, 9.67, 6.25, 2.10, 1.41),
    },
    "f16_products": {
        "F16": (16.27, 12.84, 11.55, 6.86, 3.53),
        "FP8": (0.48, 0.48, 0.47, 0.44, 0.39),
        "FP8-row": (0.48, 0.48, 0.47, 0.45, 0.40),
        "MXFP4": (11.27, 7.34, 4.38, 0.87, 0.61),
        "INT4-128": (15.23, 9.33, 4.75, 1.70, 0.86),
        "INT8-row": (19.31, 17.08, 10.72, 4.02, 2.11),
        "GPTQ4-128": (5.70, 4.53, 3.08, 1.43, 0.78),
        "AWQ-128": (3.73, 3.16, 2.41, 1.25, 0.72),
        "NVFP4": (10.91, 7.48, 4.45, 0.57, 0.44),
        "Q8_0": (16.69, 12.36, 8.62, 1.42, 1.05),
        "Q4_0": (11.18, 7.98, 4.63, 0.45, 0.37),
        "Q4_K": (13.84, 9.34, 4.99, 0.79, 0.57),
        "Q5_K": (14.08, 9.67, 5.60, 0.83, 0.62),
        "Q6_K": (13.25, 9.24, 5.91, 0.83, 0.65),
    },
}
"""One Zen 4 core held to AVX2, 2026-11-26: format -> GB/s of stored bytes by ``CORE_ROWS`` of BF16 and of F16. Medians of five
rounds in which formats took turns, by the clock of a pool of one thread, of units as ``runtime/timed/host_product_times.py`` makes them."""
CORE_GHZ = 3.7
"""Its clock."""
THREADS_SHARE = 0.8
"""Of a core's rate, for each thread."""
OF_ONE_CORE = sorted({*HARDWARE} - {"h100", "h100x2", "h100x4", "h200", "cpu"})
"""Presets whose CPU's products are derived from that core; the others' are those of a host with AVX512, or there is no card."""


@pytest.mark.parametrize(("key", "own"), [("products", "BF16"), ("f16_products", "F16")])
def test_the_core_was_measured_with_each_format_that_the_probe_times(key, own):
    assert {*CORE[key]} == {own, *(form for form in samples(128) if has_product(form, own))}, "measure the core with what is new"


@pytest.mark.parametrize("name", OF_ONE_CORE)
class TestOneCore:
    """A rate is ``THREADS_SHARE * core's rate * threads * clock``, at most BF16's; of F16 at most that of the format by BF16."""

    @pytest.mark.parametrize("key", CORE)
    def test_its_cpu_has_a_rate_of_each_format(self, name, key):
        assert [*getattr(hardware(name).host, key)] == [*CORE[key]]

    @pytest.mark.parametrize("key", CORE)
    def test_each_rate_is_its_threads_share_of_one_cores(self, name, key):
        cfg = hardware(name)
        host, share = hardware_from(cfg).host, core_share(cfg)
        for form, rates in CORE[key].items():
            if form != "BF16":
                most = host.products["BF16" if key == "products" or form == "F16" else form]
                wanted = {rows: tenths(min(share * gbps, most.at(rows))) for rows, gbps in zip(CORE_ROWS, rates, strict=True)}
                assert dict(getattr(host, key)[form].points) == pytest.approx(wanted), form

    def test_bf16_is_bound_by_memory_with_one_row(self, name):
        cfg, core = hardware(name), CORE["products"]["BF16"]
        profile, share = hardware_from(cfg), core_share(cfg)
        first, last = profile.cpu_matvec_gbps, tenths(share * core[-1])
        assert first < share * core[0]
        assert dict(profile.host.products["BF16"].points) == pytest.approx({1: first, CORE_ROWS[-1]: min(round(first / 2, 1), last)})

    @pytest.mark.parametrize("key", CORE)
    def test_its_origin_says_the_rule(self, name, key):
        cfg = hardware(name)
        said = cfg.origin[f"host.{key}"]
        assert f"{THREADS_SHARE} of one Zen 4 core's rates with AVX2" in said
        assert (f"of that core's {CORE_GHZ} GHz" in said) == (clock(cfg) < 1)


def clock(cfg: HardwareConfig) -> float:
    """The preset's clock over the core's, at most 1."""
    stated = re.search(r"x ([\d.]+) GHz", cfg.origin["cpu.dense_tflops"])
    assert stated
    return min(1.0, float(stated[1]) / CORE_GHZ)


def core_share(cfg: HardwareConfig) -> float:
    """What the preset's threads multiply over what the core does."""
    return THREADS_SHARE * cfg.host.threads * clock(cfg)


def tenths(gbps: float) -> float:
    """Rounded down, so that no rate passes the one that bounds it."""
    return math.floor(10 * gbps + 1e-6) / 10


def has_product(form: str, own: str) -> bool:
    """Whether a CPU multiplies rows of ``own`` by it as it is stored."""
    dtype = {"BF16": torch.bfloat16, "F16": torch.float16}[own]
    made = host_matrix_of(form, parts_of(samples(128)[form], torch.device("cpu")))
    return made is not None and made.takes(dtype)


CARDS = {"rtx5090": 32, "rtx5080": 16, "rtx5070ti": 16, "rtx4090": 24, "rtx4080": 16, "rtx3090": 24, "rtx3060": 12, "rtx6000ada": 48}
CARDS |= {"laptop": 8, "t4": 16, "l40s": 48, "a100-80g": 80, "h100": 80}
"""Card -> its nominal memory, GiB."""


@pytest.mark.parametrize("key", ["dram_bytes", "vram_bytes", "ssd_bytes"])
def test_a_memory_whose_unit_was_forgotten_is_asked_about(key):
    with pytest.raises(UserError, match=rf"hardware\.{key}=64: 64 bytes hold no model; did you mean hardware\.{key}=64GB\?"):
        hardware_from(dataclasses.replace(hardware("rtx4090"), **{key: 64}))


@pytest.mark.parametrize("name, gib", CARDS.items())
def test_a_card_offers_a_little_less_than_its_nominal_memory(name, gib):
    assert 0.9 < hardware(name).vram_bytes / (gib * 2**30) < 1


@pytest.mark.parametrize("name", MODELS)
class TestModel:
    def test_it_has_its_publishers_parameters(self, name):
        spec = spec_from_geometry(model(name))
        if name in PARAMETERS:
            assert spec.weight_bytes == 2 * PARAMETERS[name]
        assert spec.name == name

    def test_every_unit_has_the_bytes_that_transformers_gives_it(self, name):
        assert spec_bytes(spec_from_geometry(model(name))) == meta_bytes(model(name))

    def test_it_cites_its_source(self, name):
        assert model(name).source

    def test_its_config_is_read_back_by_transformers_as_it_was_written(self, name):
        from transformers import AutoConfig

        written = hf_config_dict(model(name))
        read = AutoConfig.for_model(**written)
        for key in ("num_hidden_layers", "max_position_embeddings", "rms_norm_eps", "vocab_size", "tie_word_embeddings"):
            assert getattr(read, key) == written[key]
        assert written["rope_parameters"].items() <= read.rope_parameters.items()


@pytest.mark.parametrize("name", PUBLISHED)
class TestPublished:
    def test_it_has_its_publishers_parameters(self, name):
        spec = model_from(model(name))
        assert sum(unit.count * unit.elements for unit in spec.units) == PUBLISHED[name]
        assert (spec.name, spec.checkpoint, spec.digest) == (name, None, None)

    def test_it_cites_its_source_and_can_be_shortened(self, name):
        cfg = model(name)
        assert "https://huggingface.co/" in cfg.source
        assert model_from(dataclasses.replace(cfg, layers=5)).layers == 5
        assert cfg.max_positions == cfg.config["max_position_embeddings"]

    def test_it_has_a_plan(self, name):
        profile, asked = hardware_from(hardware("h100")), workload(prompt_tokens=512, new_tokens=338)
        profile = dataclasses.replace(profile, ssd_bytes=2 * 10**12)
        spec = model_from(model(name))
        assert broken_rules(profile, spec, asked, solve(profile, spec, asked)) == []

    def test_no_checkpoint_is_made_of_it(self, name):
        with pytest.raises(UserError, match=f"model={name}: known by its published config, of which only a plan is made"):
            hf_config_dict(model(name))


def test_the_demo_is_about_1_2_gb():
    assert 1.15e9 < spec_from_geometry(model("demo")).weight_bytes < 1.25e9


def test_a_llama_70b_layer_is_855_654_400_parameters():
    spec = spec_from_geometry(model("llama70b"))
    norms = 2 * spec.hidden * spec.compute_dtype.nbytes
    assert spec.attn_bytes[0] + spec.ffn_bytes[0] + norms == 2 * 855_654_400


def test_a_mixtral_expert_is_352_mb():
    assert spec_from_geometry(model("mixtral8x7b")).experts.expert_bytes == 352_321_536


@pytest.mark.parametrize("machine", HARDWARE)
@pytest.mark.parametrize("name", ["mixtral8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b"])
def test_a_moe_model_has_a_plan_on_every_machine_and_keeps_what_it_can(name, machine):
    profile, spec, asked = hardware_from(hardware(machine)), spec_from_geometry(model(name)), workload(prompt_tokens=512, new_tokens=338)
    made = solve(profile, spec, asked)
    predicted = predict(profile, spec, asked, made)
    assert broken_rules(profile, spec, asked, made) == []
    step = predicted.h2d_bytes_per_token if profile.gpu else predicted.ssd_bytes_per_token
    assert step < len(spec.experts.layers) * spec.experts.top_k * spec.experts.expert_bytes + sum(spec.attn_bytes) + spec.head_bytes


def test_a_model_from_a_checkpoint_asks_for_its_directory():
    with pytest.raises(UserError, match=r"model\.checkpoint: missing, model=hf .* set model\.checkpoint=DIR"):
        model_from(model("hf"))


def test_a_preset_can_be_shortened_and_refuses_no_layers():
    assert model_from(dataclasses.replace(model("llama70b"), layers=4)).layers == 4
    with pytest.raises(UserError, match=r"model\.layers=0"):
        model_from(dataclasses.replace(model("llama70b"), layers=0))
