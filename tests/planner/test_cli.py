"""`planner` from the outside: verbs, configuration, refusals, sweeps, completion."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from penstock.planner.cli import PROGRAM
from tests.cli import HANGS_S, ROOT, command, process, refusal
from tests.support import save_tiny

SOLVE = ("solve", "hardware=rtx5080", "model=llama8b")


def test_alone_the_program_lists_its_verbs_with_a_line_each(tmp_path: Path) -> None:
    result = command("planner", cwd=tmp_path)
    assert result.returncode == 0
    told = [line.split() for line in result.stdout.splitlines() if line.startswith("  planner ")]
    assert {words[1] for words in told} == {verb.name for verb in PROGRAM.verbs} and all(len(w) > 5 for w in told)


def test_solve_ends_with_one_json_line_and_leaves_only_the_plan(tmp_path: Path) -> None:
    result = process("planner", *SOLVE, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["plan"] == "plan.yaml"
    assert summary["predicted"]["decode_tokens_per_s"] > 0
    plan = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    assert summary["stages"]["decode"] == plan["predicted"]["decode_stages"] and summary["decided"]["weights"] == plan["weights"]
    assert summary["tiers"]["vram"]["capacity_bytes"] == plan["hardware"]["vram_bytes"] and summary["tiers"]["dram"]["items"]
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


def test_a_profile_of_an_earlier_version_is_refused_with_what_makes_it_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CONFIG_DIR", str(tmp_path))
    (tmp_path / "hardware").mkdir()
    text = (ROOT / "conf/hardware/h100.yaml").read_text().replace("  bus_gbps:", "  read_gbps:")
    (tmp_path / "hardware/local.yaml").write_text(text)
    result = command("planner", "solve", "hardware=local", "model=llama8b", cwd=tmp_path)
    assert result.returncode == 2 and "hardware.dram.read_gbps: no such key" in result.stderr
    assert "run `planner probe` again" in result.stderr and len(result.stderr.splitlines()) == 1


def test_solve_output_fits_80_columns_and_has_no_colours_in_a_pipe(tmp_path: Path) -> None:
    for model, workload in (("qwen3-235b-a22b", "batch"), ("llama70b", "shared-prefix")):
        result = command("planner", "solve", "hardware=rtx5080", f"model={model}", f"workload={workload}", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert "\x1b" not in result.stdout
        picture = result.stdout.splitlines()[:-3]
        assert max(map(len, picture)) <= 80


def test_solve_with_a_shared_prefix_says_what_is_kept_and_from_when_it_pays(tmp_path: Path) -> None:
    asked = ("solve", "hardware=rtx5080", "model=llama70b", "workload=shared-prefix")
    result = command("planner", *asked, cwd=tmp_path)
    told = [line for line in result.stdout.splitlines() if line.startswith(("  KV kept", "  first token", "  Of a prompt"))]
    assert len(told) == 3 and not any("…" in line for line in told) and "tokens on" in result.stdout
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["predicted"]["restored_tokens"] == 7680
    plan = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    assert plan["kv"]["reuse"]["ssd_bytes"] > 0 and plan["break_even_tokens"]["dram"] > 0
    without = command("planner", *asked, "workload.kept_tokens=0", cwd=tmp_path)
    assert "KV kept" not in without.stdout and json.loads(without.stdout.splitlines()[-1])["predicted"]["restored_tokens"] == 0


def test_restoring_in_dram_needs_its_rate(tmp_path: Path) -> None:
    cpu = ("hardware=cpu", "model=llama8b", "hardware.dram.copy_gbps=0")
    line = refusal("planner", "solve", *cpu, "workload=shared-prefix", cwd=tmp_path)
    assert "hardware.dram.copy_gbps=0" in line and "workload.kept_tokens=0" in line


def test_solve_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = (
        "import sys, atexit; sys.argv = ['planner', 'solve', 'hardware=rtx5080', 'model=llama8b'];"
        "atexit.register(lambda: print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'transformers'})));"
        "from penstock.planner.cli import main; main()"
    )
    env = {"PYTHONPATH": str(ROOT), "PENSTOCK_CONFIG_DIR": str(tmp_path / "none"), "PATH": "/usr/bin:/bin"}
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=HANGS_S)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("hardware.vram_byte=1", ["hardware.vram_byte=1", "vram_bytes", "did you mean hardware.vram_bytes?"]),
        ("dram_bytes=6GiB", ["did you mean hardware.dram_bytes?"]),
        ("+workload.bach=1", ["+workload.bach=1", "did you mean workload.batch?"]),
        ("workload.batch=abc", ["workload.batch=abc", "a whole number"]),
        ("workload.batch=null", ["workload.batch=null", "a whole number"]),
        ("hardware.ssd.write_gbps=fast", ["hardware.ssd.write_gbps=fast", "a number"]),
        ("workload.kept_tokens=-1", ["workload.kept_tokens=-1", "0 or more"]),
        ("workload.kept_tokens=all", ["workload.kept_tokens=all", "a whole number, or null"]),
        ("workload.kv_spill=maybe", ["workload.kv_spill=maybe", "true, false"]),
        ("workload.objective=latncy", ["workload.objective=latncy", "latency, throughput, ttft", "did you mean latency?"]),
        ("force.page_tokens=0", ["force.page_tokens=0", "allowed: 16, 32", "set force.page_tokens=16"]),
        ("force.policy=rollin", ["force.policy=rollin", "pinned, rolling", "did you mean rolling?"]),
        ("hardware=rtx5008", ["hardware=rtx5008", "rtx4090", "did you mean rtx50"]),
        ("workload=chta", ["workload=chta", "long-prompt", "did you mean chat?"]),
        ("hardware=local", ["hardware=local", "run `planner probe` first"]),
        ("hardware=rtx5080,t4", ["--multirun"]),
        ("hardware.dram_bytes=6GX", ["hardware.dram_bytes=6GX", "6GiB"]),
        ("hardware.dram_bytes=-1", ["hardware.dram_bytes=-1", "1 or more"]),
        ("workload.prompt_tokens=0", ["workload.prompt_tokens=0", "1 or more"]),
        ("hardware.ssd.read=[[4096,1,2.0],[4096,1,3.0]]", ["hardware.ssd.read", "two rows"]),
        ("hardware.gpu.h2d=[[65536,2.0],[4096,3.0]]", ["hardware.gpu.h2d", "ascend"]),
        ("workload.batch=[1", ["workload.batch=[1", "a whole number"]),
        ("t4", ["t4", "key=value", "did you mean hardware=t4?"]),
        ("~workload.batch", ["~workload.batch", "key=null"]),
        ("--bogus", ["--bogus", "--multirun"]),
        ("hydra.foo=1", ["hydra.foo"]),
        ("workload.name=${nowhere}", ["workload.name", "nowhere"]),
        ("hardware.ssd.read=${hardware.dram_bytes}", ["hardware.ssd.read: must be a list, not"]),
        ("hardware.dram_bytes=1e400GB", ["hardware.dram_bytes=1e400GB", "6GiB"]),
        ("hardware.pass_s=1e11", ["hardware.pass_s=100000000000.0", "at most 1e+06"]),
        ("model.layers=10000000000", ["model.layers=10000000000", "at most 10000"]),
        ("out=/proc/plan.yaml", ["out=/proc/plan.yaml", "/proc is not a directory that can be written to"]),
        ("hardware=null", ["hardware=null", "must be a name"]),
        ("force=3", ["force=3", "keys of its own", "force.policy="]),
        ("hardware.gpu=[1]", ["hardware.gpu=[1]", "keys of its own"]),
        ("out=", ["out=: is empty", "leave the key out"]),
        ("hardware.host.products.FP9=[[1,2]]", ["hardware.host.products.FP9: no such format", "INT4-...", "did you mean FP8"]),
        ("hardware.host.products.INT4=[[1,2]]", ["choose of INT4-row, INT4-32, INT4-64, INT4-128, INT4-row-asym"]),
        ("hardware.host.f16_products={FP9: [[1, 2]]}", ["hardware.host.f16_products.FP9: no such format", "did you mean FP8"]),
        ("hardware.host.f16_products={FP8: [[1, -2]]}", ["hardware.host.f16_products.FP8: the row [1, -2]", "all above 0"]),
        ("hardware.host.f16_products.FP8=[[4, 2], [1, 3]]", ["hardware.host.f16_products.FP8: 1 after 4", "must ascend"]),
        ("hardware.host.f16_products.FP8=3", ["hardware.host.f16_products.FP8=3", "must be rows by name such as {FP8: [[1, 10.5]]}"]),
        ("hardware.host.f16_products.FP8=[3]", ["hardware.host.f16_products.FP8=[3]", "must be rows by name"]),
        ("hardware.host.f16_products.FP8=[[1, 1e30]]", ["the row [1, 1e+30]", "at most 1152921504606846976 rows, 1e-06 to 1e+09 GB/s"]),
        (
            "hardware.host.format_threads={FP8: 2.5}",
            ["hardware.host.format_threads={FP8: 2.5}: must be ", "whole numbers by name such as {FP8: 10}"],
        ),
        ("hardware=RTX5080", ["hardware=RTX5080", "did you mean rtx5080?"]),
        ("hardware", ["hardware: expected key=value, such as hardware=..."]),
        ("Qwen/Qwen3-8B", ["expected key=value; did you mean model.checkpoint=Qwen/Qwen3-8B?"]),
        ("hardware.vram_bytes=\u0666GiB", ["must be a size such as 6GiB"]),
        ("workload.batch=1000000000000", ["must be at most 1048576"]),
        (f"out={'x' * 300}", ["cannot be written (File name too long)", "choose another out="]),
        ("ranks=0", ["ranks=0: must be 1 or more"]),
        ("out=/", ["out=/: a directory; name a file"]),
    ],
)
def test_bad_input_is_refused_in_one_line_that_names_it(argument: str, words: list[str], tmp_path: Path) -> None:
    line = refusal("planner", *SOLVE, argument, cwd=tmp_path)
    for word in words:
        assert word in line


@pytest.mark.parametrize("name", ["f16_products={FP8: [[1, 2]]}", "f16_products.FP8=[[1, 2]]", "threads=3"])
def test_a_key_of_a_section_that_is_null_is_refused_with_its_name(name: str, tmp_path: Path) -> None:
    line = refusal("planner", "solve", "hardware=cpu", "model=llama8b", f"hardware.host.{name}", cwd=tmp_path)
    assert f"hardware.host.{name}: hardware.host is null in this hardware; choose another hardware=" in line


def test_an_unknown_verb_is_refused_with_the_nearest(tmp_path: Path) -> None:
    assert "did you mean solve?" in refusal("planner", "slove", cwd=tmp_path)


def test_hardware_and_model_are_asked_for_with_their_choices(tmp_path: Path) -> None:
    assert "rtx5080" in refusal("planner", "solve", "model=llama8b", cwd=tmp_path)
    line = refusal("planner", "solve", "hardware=rtx5080", cwd=tmp_path)
    assert "model is required" in line
    assert "llama70b" in line


def test_a_bare_plan_or_checkpoint_is_told_its_key(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    for program, verb, word, key in (
        ("planner", "simulate", "plan.yaml", "plan"),
        ("runtime", "run", "mine.yml", "plan"),
        ("runtime", "chat", "weights", "model.checkpoint"),
        ("runtime", "pack", "weights", "checkpoint"),
    ):
        assert refusal(program, verb, word, cwd=tmp_path).endswith(f"{word}: expected key=value; did you mean {key}={word}?")


def test_who_has_no_profile_is_told_where_one_is_looked_for(tmp_path: Path) -> None:
    line = refusal("planner", "solve", "model=llama8b", cwd=tmp_path, PENSTOCK_CONFIG_DIR="/nowhere")
    assert "hardware is required; /nowhere/hardware has no profile of this machine: run `planner probe` and choose hardware=" in line


def test_a_plan_of_a_server_is_to_be_served(tmp_path: Path) -> None:
    served = ("workload=serve", "workload.clients=2", "force.prefill_chunk_tokens=512")
    said = command("planner", *SOLVE, *served, cwd=tmp_path).stdout
    assert "then: runtime serve plan=plan.yaml" in said
    assert "then: runtime run plan=plan.yaml" in command("planner", *SOLVE, cwd=tmp_path).stdout


def test_a_preset_beside_a_checkpoint_of_another_depth_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    line = refusal("planner", "solve", "hardware=t4", "model=llama8b", "model.checkpoint=model", cwd=tmp_path)
    assert "model.layers=32: the checkpoint model has " in line and "leave out model.layers=, or model= of a preset" in line


def test_setting_a_gpu_figure_of_a_machine_without_gpu_is_refused(tmp_path: Path) -> None:
    line = refusal("planner", "solve", "hardware=cpu", "model=llama8b", "hardware.gpu.context_bytes=1", cwd=tmp_path)
    assert "hardware.gpu is null" in line
    line = refusal("planner", "solve", "hardware=cpu", "model=llama8b", "hardware.devices=[0,1]", cwd=tmp_path)
    assert "hardware.devices=[0, 1]: this hardware has no GPU" in line


def test_a_directory_that_no_model_drafts_from_is_named_by_its_key(tmp_path: Path) -> None:
    for draft, words in (("nowhere", "no such directory"), (".", "empty")):
        line = refusal("planner", *SOLVE, "speculate=draft", f"draft={draft}", cwd=tmp_path)
        assert f"draft={draft}: " in line and words in line and "model.checkpoint" not in line


def test_an_older_plan_is_moved_aside_and_said_and_the_same_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("older")
    (tmp_path / "plan.1.yaml").write_text("oldest")
    said = command("planner", *SOLVE, cwd=tmp_path).stdout
    assert "plan.yaml held another plan: it is plan.2.yaml now" in said and json.loads(said.splitlines()[-1])["older"] == "plan.2.yaml"
    assert (tmp_path / "plan.2.yaml").read_text() == "older" and (tmp_path / "plan.1.yaml").read_text() == "oldest"
    again = command("planner", *SOLVE, cwd=tmp_path).stdout
    assert "held another" not in again and sorted(p.name for p in tmp_path.glob("plan*")) == ["plan.1.yaml", "plan.2.yaml", "plan.yaml"]


def test_an_infeasible_problem_leaves_an_older_plan_alone(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("older")
    line = refusal("planner", *SOLVE, "hardware.vram_bytes=1GiB", cwd=tmp_path)
    assert "VRAM is short by" in line
    assert (tmp_path / "plan.yaml").read_text() == "older"


def test_a_measured_profile_is_found_by_name_and_local_is_the_default(tmp_path: Path, clean_environment: Path) -> None:
    preset = yaml.safe_load((ROOT / "conf/hardware/rtx5080.yaml").read_text())
    (clean_environment / "hardware").mkdir()
    for name in ("local", "attic"):
        (clean_environment / "hardware" / f"{name}.yaml").write_text(yaml.safe_dump(preset | {"name": name}))
    for arguments, name in ((("hardware=attic",), "attic"), ((), "local")):
        result = command("planner", "solve", "model=llama8b", *arguments, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout.splitlines()[-1])["hardware"] == name


def test_a_wrong_key_in_a_users_profile_is_named_with_its_file(tmp_path: Path, clean_environment: Path) -> None:
    (clean_environment / "hardware").mkdir()
    (clean_environment / "hardware" / "odd.yaml").write_text("name: odd\nvram_byte: 3\n")
    line = refusal("planner", "solve", "hardware=odd", "model=llama8b", cwd=tmp_path)
    assert "hardware/odd" in line
    assert "did you mean hardware.vram_bytes?" in line


def test_a_figure_set_by_hand_says_so_instead_of_its_old_origin(tmp_path: Path) -> None:
    result = command("planner", *SOLVE, "hardware.dram_bytes=40GB", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert any(line.split() == ["DRAM", "40", "GB", "set", "by", "hand"] for line in result.stdout.splitlines())
    origin = yaml.safe_load((tmp_path / "plan.yaml").read_text())["hardware"]["origin"]
    assert origin["dram_bytes"] == "set by hand"


def test_cfg_job_shows_the_composed_configuration(tmp_path: Path) -> None:
    result = command("planner", *SOLVE, "hardware.dram_bytes=6GiB", "--cfg", "job", cwd=tmp_path)
    shown = yaml.safe_load(result.stdout)
    assert shown["hardware"]["dram_bytes"] == 6 * 2**30
    assert shown["workload"]["name"] == "chat"


@pytest.mark.parametrize("verb", ["solve", "probe"])
def test_help_shows_an_example_and_every_key(verb: str, tmp_path: Path) -> None:
    result = command("planner", verb, "--help", cwd=tmp_path)
    assert result.returncode == 0
    assert f"\n  planner {verb} " in result.stdout
    assert {"solve": "workload.batch", "probe": "probe.quick"}[verb] in result.stdout


def test_a_sweep_goes_to_the_next_free_directory_and_survives_a_point_that_fails(tmp_path: Path) -> None:
    (tmp_path / "sweeps" / "4").mkdir(parents=True)
    result = command("planner", *SOLVE, "hardware.vram_bytes=1GiB,8GiB", "--multirun", "out=my plan.yaml", cwd=tmp_path)
    assert result.returncode == 2
    assert "[0]  hardware.vram_bytes=1073741824  no plan fits" in result.stderr
    assert (tmp_path / "sweeps" / "5" / "1" / "my plan.yaml").is_file()
    assert not (tmp_path / "my plan.yaml").exists()
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert [row["status"] for row in rows] == [2, 0] and rows[0]["error"].startswith("no plan fits")


def test_a_sweep_that_is_refused_leaves_no_directory(tmp_path: Path) -> None:
    refusal("planner", *SOLVE, "workload.batch=1,abc", "--multirun", cwd=tmp_path)


def test_a_path_may_hold_spaces_quotes_commas_and_equal_signs(tmp_path: Path) -> None:
    name = "it's a=b, [c] {d}.yaml"
    result = command("planner", *SOLVE, f"out={name}", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_seeds_variables_apply_and_an_explicit_override_wins(tmp_path: Path) -> None:
    env = {"WSM_STAGING_MB": "64", "WSM_CPU_CACHE_CAP_LAYERS": "12", "WSM_VERBOSE": "1"}
    result = command("planner", *SOLVE, "hardware.vram_bytes=6GiB", "hardware.dram_bytes=10GiB", "force.cap_layers=8", cwd=tmp_path, **env)
    assert result.returncode == 0, result.stderr
    plan = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    assert plan["weights"]["dram"]["cap_layers"] == 8
    assert plan["weights"]["ssd"]["staging_bytes"] == 64 * 2**20
    notes = "\n".join(plan["notes"])
    assert "WSM_STAGING_MB=64 applied as force.staging_bytes=67108864" in notes
    assert "WSM_CPU_CACHE_CAP_LAYERS=12 gave way to an explicit force.cap_layers" in notes
    assert "WSM_VERBOSE=1 has no use" in notes
    assert "WSM_STAGING_MB=64" in result.stdout


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("WSM_GPU_MAX_GROUPS", "4", "force.vram_slots"),
        ("WSM_MAX_CACHED_LAYERS", "3", "force.vram_slots"),
        ("WSM_AGGRESSIVE_GPU_PREFETCH", "2", "force.vram_prefetch_distance"),
        ("WSM_CPU_CACHE_CAP_LAYERS", "400", "force.cap_layers"),
        ("WSM_STAGING_MB", "0", "force.staging_bytes"),
    ],
)
def test_a_seeds_variable_that_cannot_be_on_this_machine_is_named(name: str, text: str, key: str, tmp_path: Path) -> None:
    line = refusal("planner", "solve", "hardware=cpu", "model=llama8b", cwd=tmp_path, **{name: text})
    assert line.endswith(f"{key} was set by {name}={text}"), line


def test_a_seeds_variable_is_not_blamed_for_what_it_did_not_set(tmp_path: Path) -> None:
    line = refusal("planner", "solve", "hardware=cpu", "model=llama8b", "force.cap_layers=400", cwd=tmp_path, WSM_STAGING_MB="64")
    assert "force.cap_layers=400" in line and "WSM" not in line


def test_a_seeds_variable_that_does_not_parse_is_refused(tmp_path: Path) -> None:
    assert "WSM_STAGING_MB=lots" in refusal("planner", *SOLVE, cwd=tmp_path, WSM_STAGING_MB="lots")


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("planner so", "solve"),
        ("planner solve model=llama7", "model=llama70b"),
        ("planner solve hardware=rtx5080 hardware.dram_bytes=6GiB workload.b", "workload.batch="),
        ("planner solve workload.objective=t", "workload.objective=throughput workload.objective=ttft"),
        ("planner solve hardware.ssd.", "hardware.ssd.burst_s= hardware.ssd.long_gbps= hardware.ssd.read= hardware.ssd.write_gbps="),
        ("planner solve --m", "--multirun"),
        ("planner export to=acc", "to=accelerate"),
        ("planner nothing x", ""),
        ("planner diff conf", "conf/"),
        ("planner explain pl", "plan="),
    ],
)
def test_completion_answers_for_verbs_then_for_what_the_verb_accepts(line: str, answer: str, tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    result = command("planner", "-sc", "query=bash", cwd=tmp_path, COMP_LINE=line, COMP_POINT=str(len(line)))
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == answer


def test_completion_installs_for_the_program_by_name(tmp_path: Path) -> None:
    result = command("planner", "-sc", "install=bash", cwd=tmp_path)
    assert result.stdout.rstrip().endswith("hydra_bash_completion planner")
    assert subprocess.run(["bash", "-n", "-c", result.stdout], check=False).returncode == 0


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    program = f"PYTHONPATH={shlex.quote(str(ROOT))} {shlex.quote(sys.executable)} -c 'from penstock.planner.cli import main; main()'"
    pipe = f"{program} solve hardware=rtx5080 model=llama8b | head -n 1"
    result = subprocess.run(["bash", "-c", pipe], cwd=tmp_path, capture_output=True, text=True)
    assert result.stderr == ""


ON_TERMINAL = """
import sys
from penstock.planner.cli import main
for verb in VERBS:
    sys.argv = ['planner', *verb]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, ended.code
    print('ended', verb[0], flush=True)
"""


def on_terminal(verbs: Sequence[Sequence[str]], cwd: Path) -> list[str]:
    """What the planner writes for each of ``verbs`` where stdout is a terminal."""
    import os
    import pty

    ours, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    env.pop("NO_COLOR", None)
    code = ON_TERMINAL.replace("VERBS", repr(verbs))
    with subprocess.Popen([sys.executable, "-c", code], cwd=cwd, env=env, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        said = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:
                break
            if not piece:
                break
            said += piece
    os.close(ours)
    assert process.returncode == 0, said.decode()
    return re.split("ended [a-z]+\r\n", said.decode())[:-1]


def test_colours_are_for_terminals_alone(tmp_path: Path) -> None:
    verbs = (SOLVE, ("explain", "hardware=cpu", "model=demo"), ("diff", "a.yaml", "b.yaml"), ("doctor",))
    command("planner", *SOLVE, "out=a.yaml", cwd=tmp_path)
    command("planner", *SOLVE, "hardware.vram_bytes=6GB", "out=b.yaml", cwd=tmp_path)
    for verb, said in zip(verbs, on_terminal(verbs, tmp_path), strict=True):
        assert "\x1b[" in said, verb
        assert "\x1b" not in command("planner", *verb, cwd=tmp_path).stdout, verb


def test_every_key_that_names_a_file_knows_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell but bash puts it in the place of a tilde behind `=`."""
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    for words in (
        (*SOLVE, "out=~/plan.yaml"),
        ("explain", "plan=~/plan.yaml", "out=~/explain.json", "html=~/explain.html"),
        ("simulate", "plan=~/plan.yaml", "out=~/simulate.json", "trace=~/trace.json"),
        ("replan", "plan=~/plan.yaml", "out=~/longer.yaml"),
        ("diff", "a=~/plan.yaml", "b=~/longer.yaml", "out=~/diff.json"),
        ("export", "plan=~/plan.yaml", "to=env", "out=~/plan.env"),
        ("report", "dir=~", "out=~/all"),
        ("doctor", "path=~", "out=~/doctor.json"),
    ):
        assert command("planner", *words, cwd=tmp_path).returncode in (0, 1), words
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert {path.name for path in home.iterdir()} >= {
        "plan.yaml", "explain.json", "explain.html", "simulate.json", "trace.json", "longer.yaml", "diff.json", "plan.env", "all.csv",
        "doctor.json",
    }  # fmt: skip


def test_a_home_of_nobody_here_is_a_name_like_any_other(tmp_path: Path) -> None:
    for words in (("solve", "model.checkpoint=~no-such-user/model", "hardware=cpu"), ("simulate", "plan=~no-such-user/plan.yaml")):
        assert "~no-such-user" in refusal("planner", *words, cwd=tmp_path)
