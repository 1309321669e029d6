"""Every preset is whole, says where its figures come from, and holds the bytes of the real model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from importlib import resources
from typing import Any

import pytest
from omegaconf import OmegaConf

from penstock.planner.common.errors import UserError
from penstock.planner.contract.config.config_schema import HardwareConfig, ModelConfig
from penstock.planner.contract.config.geometry import hf_config_dict, spec_from_geometry
from penstock.planner.contract.config.resolve import model_from
from penstock.planner.contract.config.resolve_hardware import hardware_from
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.prices.cost import predict
from penstock.planner.contract.rules.broken import broken_rules
from penstock.planner.solver.program import solve
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


def load(group: str, name: str, schema: type) -> Any:
    """A preset merged onto its schema, as Hydra does it: a wrong key or type raises."""
    plain = OmegaConf.create((resources.files("conf") / group / f"{name}.yaml").read_text())
    assert plain.pop("defaults") == ["schema", "_self_"]
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), plain))


def model(name: str) -> ModelConfig:
    return load("model", name, ModelConfig)


def hardware(name: str) -> HardwareConfig:
    return load("hardware", name, HardwareConfig)


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
        only_runs_tell = {"pass_s", "start_s", "cpu.threads", "ssd.long_gbps", "ssd.burst_s"}
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
                assert all(rate <= beside.at(rows) for rows, rate in curve.points), "F16 costs no less than BF16"
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
