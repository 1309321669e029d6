"""WSM's environment variables mean what WSM's documents say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.planner.common.command.known_keys import keys_of
from penstock.planner.common.command.wsm import TABLE, read_environment
from penstock.planner.common.errors import UserError
from penstock.planner.contract.config.config_schema import SolveConfig
from penstock.runtime.asked.run_schema import RunConfig

SEEDS = Path(__file__).resolve().parents[3] / "shared" / "seeds"
SCHEMAS = {"solve": SolveConfig, "run": RunConfig}


@pytest.mark.skipif(not SEEDS.is_dir(), reason="no ../shared/seeds beside this checkout")
def test_every_variable_that_the_seeds_name_is_known() -> None:
    named = {name for seed in SEEDS.glob("*.txt") for name in re.findall(r"WSM_[A-Z_]+[A-Z]", seed.read_text())}
    assert named <= {variable.name for variable in TABLE}


def test_the_table_of_knobs_names_every_variable_beside_its_key() -> None:
    lines = (Path(__file__).resolve().parents[2] / "docs" / "knobs.md").read_text().splitlines()
    for variable in TABLE:
        if variable.always is None:
            (line,) = [line for line in lines if line.startswith("|") and f"`{variable.name}`" in line]
            assert f"`{variable.solve or variable.run}`" in line


@pytest.mark.parametrize("verb", SCHEMAS)
def test_every_key_that_a_variable_sets_exists(verb: str) -> None:
    keys = keys_of(SCHEMAS[verb])
    assert {key for variable in TABLE if (key := variable.key(verb))} <= set(keys)


def test_every_variable_has_a_use_somewhere_or_says_why_not() -> None:
    assert all(bool(variable.solve or variable.run) != bool(variable.always) for variable in TABLE)
    assert not any("\n" in variable.always for variable in TABLE if variable.always)


@pytest.mark.parametrize("verb", SCHEMAS)
@pytest.mark.parametrize(
    ("name", "same", "opposite"),
    [
        ("WSM_CPU_ROLL_SYNC", ["1", "true"], ["0"]),
        ("WSM_KV_THROTTLE_THRESHOLD", [], ["8"]),
        ("WSM_KV_THROTTLE_MS", [], ["16"]),
    ],
)
def test_what_is_so_whatever_the_value_sets_no_key_and_says_so(verb: str, name: str, same: list[str], opposite: list[str]) -> None:
    always = next(variable.always for variable in TABLE if variable.name == name)
    for values, verdict in ((same, "holds anyway"), (opposite, "is ignored")):
        for text in values:
            read = read_environment({name: text}, verb, set())
            assert read.overrides == ()
            assert read.notes == (f"{name}={text} {verdict}: {always}",)


def test_a_note_never_claims_that_a_dead_variable_was_applied() -> None:
    everything = {variable.name: "1" for variable in TABLE}
    for verb in SCHEMAS:
        read = read_environment(everything, verb, set())
        applied = [note.partition("=")[0] for note in read.notes if " applied as " in note]
        assert len(applied) == len(read.overrides)
        assert not {v.name for v in TABLE if v.key(verb) is None} & set(applied)


@pytest.mark.parametrize(
    ("name", "text", "override"),
    [
        ("WSM_CPU_CACHE_CAP_LAYERS", "50", "force.cap_layers=50"),
        ("WSM_AGGRESSIVE_GPU_PREFETCH", "3", "force.vram_prefetch_distance=6"),
        ("WSM_MAX_CACHED_LAYERS", "6", "force.vram_slots=12"),
        ("WSM_GPU_MAX_GROUPS", "10", "force.vram_slots=10"),
        ("WSM_GPU_FREE_GUARD_MB", "1024", "workload.vram_guard_bytes=1073741824"),
        ("WSM_CPU_ROLLING_MODE", "1", "force.policy=rolling"),
        ("WSM_CPU_ROLLING_MODE", "0", "force.policy=pinned"),
        ("WSM_PAIR_AHEAD", "2", "force.vram_prefetch_distance=4"),
        ("WSM_KIND_AHEAD_CAP", "2", "force.vram_prefetch_distance=4"),
    ],
)
def test_a_variable_becomes_an_override_and_a_note(name: str, text: str, override: str) -> None:
    read = read_environment({name: text, "PATH": "/bin"}, "solve", set())
    assert read.overrides == (override,)
    assert read.notes == (f"{name}={text} applied as {override}",)


def test_the_engines_variables_apply_to_a_run_only() -> None:
    environ = {"WSM_CPU_WRAP_AROUND": "0", "WSM_VERBOSE": "1"}
    assert read_environment(environ, "run", set()).overrides == ("verbose=true", "engine.wrap_around=false")
    assert read_environment(environ, "solve", set()).overrides == ()


@pytest.mark.parametrize(
    ("name", "text", "override"),
    [
        ("WSM_CPU_WRAP_AROUND", "0", "engine.wrap_around=false"),
        ("WSM_SKIP_PRELOAD_WAIT", "1", "engine.warmup_layers=0"),
        ("WSM_SKIP_PRELOAD_WAIT", "0", "engine.warmup_layers=null"),
        ("WSM_EVICT_FINISHED", "1", "engine.keep_finished_units=0"),
        ("WSM_EVICT_FINISHED", "0", "engine.keep_finished_units=1"),
        ("WSM_BALANCE_PREFETCH", "1", "engine.balance_units=1"),
        ("WSM_BALANCE_PREFETCH", "0", "engine.balance_units=null"),
        ("WSM_BALANCE_TOL", "3", "engine.balance_units=3"),
        ("WSM_BALANCE_TOL", "0", "engine.balance_units=1"),
    ],
)
def test_how_the_engine_moves_is_a_quantity_of_a_run(name: str, text: str, override: str) -> None:
    assert read_environment({name: text}, "run", set()).overrides == (override,)


def test_the_seeds_own_settings_agree_with_one_another() -> None:
    """As their benchmark sets them: one key from several variables is given the same value by each."""
    environ = {"WSM_AGGRESSIVE_GPU_PREFETCH": "2", "WSM_PAIR_AHEAD": "2", "WSM_KIND_AHEAD_CAP": "2", "WSM_GPU_MAX_GROUPS": "10"}
    environ |= {"WSM_SKIP_PRELOAD_WAIT": "1", "WSM_EVICT_FINISHED": "1", "WSM_BALANCE_PREFETCH": "1", "WSM_BALANCE_TOL": "1"}
    values = {(v.key("run"), v.convert(environ[v.name])) for v in TABLE if v.name in environ}
    assert values == {
        ("force.vram_prefetch_distance", "4"),
        ("force.vram_slots", "10"),
        ("engine.warmup_layers", "0"),
        ("engine.keep_finished_units", "0"),
        ("engine.balance_units", "1"),
    }
    assert len(read_environment(environ, "run", set()).overrides) == 5


def test_of_two_variables_for_one_key_one_applies_and_the_other_is_noted() -> None:
    read = read_environment({"WSM_MAX_CACHED_LAYERS": "6", "WSM_GPU_MAX_GROUPS": "10"}, "solve", set())
    assert read.overrides == ("force.vram_slots=10",)
    assert "WSM_MAX_CACHED_LAYERS=6 gave way to WSM_GPU_MAX_GROUPS" in read.notes


def test_an_explicit_override_wins() -> None:
    read = read_environment({"WSM_STAGING_MB": "64"}, "solve", {"force.staging_bytes"})
    assert read.overrides == ()
    assert "gave way to an explicit force.staging_bytes" in read.notes[0]


def test_a_misspelt_variable_is_noted_with_the_nearest() -> None:
    assert "did you mean WSM_STAGING_MB" in read_environment({"WSM_STAGNG_MB": "64"}, "solve", set()).notes[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [("WSM_STAGING_MB", "-1"), ("WSM_CPU_ROLLING_MODE", "yes"), ("WSM_MAX_CACHED_LAYERS", "many"), ("WSM_EVICT_FINISHED", "maybe")],
)
def test_a_value_that_does_not_parse_is_refused(name: str, text: str) -> None:
    with pytest.raises(UserError, match=f"{name}={text}"):
        read_environment({name: text}, "solve", set())
