"""`runtime run` as a user words it: paths of any name, mistakes that are told before torch is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import HANGS_S, ROOT, command, refusal
from tests.runtime.running import desk
from tests.support import decisions, plan_for, save_tiny, workload


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("a b") / "model = tiny")


def test_text_goes_in_and_comes_out_with_spaces_and_equals_signs_in_every_path(shared_models: Path, tmp_path: Path) -> None:
    place = tmp_path / "here = there"
    place.mkdir()
    (place / "model=1 x").symlink_to(shared_models / "tiny-llama")
    (place / "my prompts=2.txt").write_text("def main():\nimport os\n")
    plan = plan_for(place / "model=1 x", decisions(batch=2, pages=8), work=workload(batch=2, new_tokens=4))
    desk(place, plan).plan.rename(place / "my plan=a b.yaml")
    done = command(
        "runtime",
        "run",
        "+plan=my plan=a b.yaml",
        "checkpoint=model=1 x",
        "prompts=my prompts=2.txt",
        "out=run = 1.json",
        cwd=place,
        WSM_VERBOSE="1",
        WSM_EVICT_FINISHED="0",
        WSM_SKIP_PRELOAD_WAIT="1",
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((place / "run = 1.json").read_text())
    assert len(report["texts"]) == 2 and all(text.strip("\n").splitlines()[0] in done.stdout for text in report["texts"])
    assert json.loads(done.stdout.splitlines()[-1])["report"] == "run = 1.json"
    said = " ".join(done.stdout.split())
    assert "WSM_EVICT_FINISHED=0 applied as engine.keep_finished_units=1" in said and "engine.keep_finished_units has no effect" in said
    assert "WSM_SKIP_PRELOAD_WAIT=1 applied as engine.warmup_layers=0" in said and report["cache"]["warm_layers"] <= 4
    assert "[penstock] loaded layer 0 to DRAM cache" in done.stdout
    assert {path.name for path in place.iterdir()} == {"model=1 x", "my prompts=2.txt", "my plan=a b.yaml", "run = 1.json"}


def test_a_mistake_is_told_before_torch_is_imported(checkpoint: Path, tmp_path: Path) -> None:
    """Importing torch and transformers takes seconds; the plan, the checkpoint's headers and the values need neither."""
    here = desk(tmp_path, plan_for(checkpoint, decisions()))
    code = (
        "import sys; from penstock.runtime.tools.runtime_verbs import run_verb\n"
        "from penstock.runtime.asked.run_schema import RunConfig\n"
        "from penstock.planner.common.errors import UserError\n"
        "for keys in ({'plan': 'missing.yaml'}, {'batch': 5}, {'checkpoint': 'nowhere'}, {'prompts': 'nowhere'}, {'out': '.'}):\n"
        f"    try: run_verb(RunConfig(**({{'plan': {str(here.plan)!r}}} | keys)))\n"
        "    except UserError as error: print(error)\n"
        "print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANGS_S)
    *lines, imported = done.stdout.splitlines()
    told = [line.partition(":")[0] for line in lines]
    assert told == ["plan=missing.yaml", "batch=5", "nowhere", "prompts=nowhere", "out=."], done.stderr
    assert imported == "set()"


def test_the_command_line_refuses_in_one_line(checkpoint: Path, tmp_path: Path) -> None:
    here = desk(tmp_path, plan_for(checkpoint, decisions()))
    assert "plan=missing.yaml: no such file" in refusal("runtime", "run", "plan=missing.yaml", cwd=tmp_path)
    assert "plan=... is required" in refusal("runtime", "run", cwd=tmp_path)
    assert "engine.roll_sync" in refusal("runtime", "run", f"plan={here.plan}", "engine.roll_sync=true", cwd=tmp_path)
    assert "hwm = cap + k" in refusal("runtime", "run", f"plan={here.plan}", cwd=tmp_path, WSM_CPU_CACHE_HWM_LAYERS="30")
    line = refusal("runtime", "run", f"plan={here.plan}", "force.cap_layers=2", cwd=tmp_path, WSM_GPU_MAX_GROUPS="4")
    assert "force.vram_slots=4 breaks" in line and "cap_layers" not in line and "was set by WSM_GPU_MAX_GROUPS=4" in line
    assert "max_new_tokens" in refusal("runtime", "run", f"plan={here.plan}", "max_new_tokens=many", cwd=tmp_path)
