"""Every decoder architecture of transformers, tiny and random, through the commands: planned, streamed, packed, held against `generate`.

    python bench/zoo.py [REGEX] [jobs=2] [out=zoo.json]

Each case of bench/zoo.yaml and bench/zoo_coded.py whose name fits: a checkpoint;
 `planner solve` for three layers at a time; `runtime run` of three prompts of
unequal lengths as one batch, with `validate=full`; `runtime pack`, and the same tokens from the packed store; transformers' own greedy
`generate` on each prompt alone. Writes one entry a case to OUT and prints the table of all that OUT holds. Steps are forks of one process
that call the programs' own `main`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.zoo_coded import coded_cases  # noqa: E402
from bench.zoo_models import Case, cases, greedy  # noqa: E402

PROMPTS = ("def main(args):\n    return self.value + len(args)\n", "a short one", "class Row:\n    tokens: int\n")
NEW_TOKENS = 8
LIMIT_S = 400
NEEDS = re.compile(r"hardware\.dram_bytes=([0-9.]+[A-Za-z]*)")
ENOUGH = "0.2GB"
"""For most of these models; what more needs is asked of the planner."""
FORCED = ["force.cap_layers=0", "force.hwm_layers=3"]
"""At most three layers in DRAM, so that some are read in every pass."""
YES = ("plans", "runs", "identical", "packed", "text", "streamed")


def child(work: Callable[[], Any], log: Path) -> tuple[int, str]:
    """``work`` in a fork: its status, and what it wrote."""
    pid = os.fork()
    if not pid:
        with log.open("w") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        try:
            code = work() or 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            traceback.print_exc()
            code = 99
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    end = time.monotonic() + LIMIT_S
    while not (done := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(pid, 9)
        time.sleep(0.02)
    return os.waitstatus_to_exitcode(done[1]), log.read_text(errors="replace")


def program(name: str, *arguments: str) -> Callable[[], Any]:
    """A run of ``planner`` or ``runtime``."""

    def run() -> Any:
        from penstock.planner.cli import main as planner
        from penstock.runtime.cli import main as runtime

        sys.argv = [name, *arguments]
        return (planner if name == "planner" else runtime)()

    return run


def last_line(text: str, folder: Path) -> str:
    """The error among what a program wrote, with no path of this machine in it."""
    lines = [line.replace(f"{folder}/", "") for line in text.splitlines() if line.strip()]
    said = [line for line in lines if re.match(r"(planner|runtime): |\w*(Error|Exception)\b", line)]
    return (said or lines or ["nothing was said"])[-1][:300]


class Failed(Exception):
    """A step did not succeed: its name, and what it said."""


def solved(checkpoint: Path, plan: Path, folder: Path) -> None:
    """Write a plan by which three layers at a time are in DRAM."""
    base = ["solve", "hardware=cpu", "model=hf", f"model.checkpoint={checkpoint}", f"out={plan}", f"workload.batch={len(PROMPTS)}"]
    base += ["workload.prompt_tokens=64", f"workload.new_tokens={NEW_TOKENS}"]
    dram, text = ENOUGH, ""
    for force in (FORCED, FORCED, []):
        code, text = child(program("planner", *base, f"hardware.dram_bytes={dram}", *force), folder / "solve.log")
        if not code:
            return
        dram = max(NEEDS.findall(text), key=_size, default=dram)
    raise Failed("solve", last_line(text, folder))


def _size(text: str) -> float:
    found = re.match(r"([0-9.]+)([A-Za-z]*)", text)
    return float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}.get(found[2][:1].lower(), 1) if found else 0


def ran(plan: Path, folder: Path, *more: str) -> dict[str, Any]:
    """The report of a run by ``plan``, whose logits have the unstreamed model's bits."""
    prompts, out = folder / "prompts.jsonl", folder / "run.json"
    out.unlink(missing_ok=True)
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    arguments = ["run", f"plan={plan}", f"max_new_tokens={NEW_TOKENS}", f"prompts={prompts}", f"out={out}", *more]
    arguments.append("engine.cpu_product=decode")
    code, text = child(program("runtime", *arguments), folder / "run.log")
    if not out.exists():
        raise Failed("run", last_line(text, folder))
    return {**json.loads(out.read_text()), "status": code}


def examined(case: Case) -> dict[str, Any]:
    """What became of ``case``: one answer for each of ``YES``, and the error where there is one."""
    found: dict[str, Any] = {"group": case.group}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = folder / "model"
        code, text = child(lambda: case.save(checkpoint), folder / "build.log")
        if code:
            return found | {"error": f"transformers: {last_line(text, folder)}", "judged": False}
        loaded = case.loaded
        if loaded is not None:
            code, text = child(lambda: greedy(checkpoint, PROMPTS, NEW_TOKENS, folder / "want.json", loaded), folder / "want.log")
        found["judged"] = loaded is not None and not code
        try:
            found["plans"] = False
            solved(case.source(checkpoint), folder / "plan.yaml", folder)
            found |= {"plans": True, "runs": False}
            report = ran(folder / "plan.yaml", folder, "validate=full")
            found |= {"runs": True, "identical": report["logits"]["identical"], "passes": report["logits"]["passes"]}
            found["streamed"] = report["stages"].get("decode", {}).get("ssd", {}).get("bytes", 0) > 0
            if found["judged"]:
                found["text"] = json.loads((folder / "want.json").read_text()) == report["tokens"]
            found["packed"] = False
            code, text = child(
                program("runtime", "pack", f"checkpoint={case.source(checkpoint)}", f"out={folder / 'packed'}"), folder / "pack.log"
            )
            if code:
                raise Failed("pack", last_line(text, folder))
            found["packed"] = ran(folder / "plan.yaml", folder, f"checkpoint={folder / 'packed'}")["tokens"] == report["tokens"]
        except Failed as failed:
            found["error"] = ": ".join(failed.args)
            if case.refused:
                found["refused"] = failed.args[0] == "solve" and bool(re.search(case.refused, failed.args[1]))
        if not found["judged"]:
            found["reference"] = "transformers has no decoder for it" if loaded is None else last_line(text, folder)
    return found


def results(chosen: list[Case], jobs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each case's answer as it comes, ``jobs`` at a time."""
    waiting, running = list(chosen), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            case, (reads, writes) = waiting.pop(0), os.pipe()
            pid = os.fork()
            if not pid:
                os.close(reads)
                with os.fdopen(writes, "w") as pipe:
                    json.dump(examined(case), pipe)
                os._exit(0)
            os.close(writes)
            running[pid] = case, reads
        case, reads = running.pop(pid) if (pid := next(iter(running))) else running[pid]
        with os.fdopen(reads) as pipe:
            yield case.name, json.load(pipe)
        os.waitpid(pid, 0)


def table(document: dict[str, Any]) -> Iterator[str]:
    """The entries as Markdown: counts, then a line a case."""
    entries = document["cases"]
    judged = [entry for entry in entries.values() if entry["judged"]]
    yield f"transformers {document['transformers']}, torch {document['torch']}, CPU; {len(entries)} cases, transformers runs {len(judged)}."
    coded = [entry for entry in entries.values() if entry["group"] == "quantised"]
    if coded:
        runs, refused = (sum(bool(entry.get(what)) for entry in coded) for what in ("runs", "refused"))
        yield f"Quantised: {len(coded)} cases, {runs} run, {refused} are refused by solve in one line that names the method."
    yield "Of those " + ", ".join(f"{what}: {sum(bool(entry.get(what)) for entry in judged)}" for what in YES) + "."
    yield ""
    yield "| case | " + " | ".join(YES) + " | what was said |"
    yield "|---" * (len(YES) + 2) + "|"
    for name, entry in entries.items():
        said = entry.get("error", "") + ("" if entry["judged"] else " (transformers does not run it either)")
        yield f"| {name} | " + " | ".join({True: "yes", False: "**no**"}.get(entry.get(what), "–") for what in YES) + f" | {said} |"


def main() -> None:
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="error")
    options = dict(argument.split("=", 1) for argument in sys.argv[1:] if re.match(r"(jobs|out)=", argument))
    patterns = [argument for argument in sys.argv[1:] if not re.match(r"(jobs|out)=", argument)]
    import torch
    import transformers

    import penstock.planner.cli
    import penstock.runtime.engine.open_session  # noqa: F401  imported once: children are forks

    out = Path(options.get("out", "zoo.json"))
    document = json.loads(out.read_text()) if out.exists() else {"cases": {}}
    document |= {"transformers": transformers.__version__, "torch": torch.__version__}
    known = [*cases(), *coded_cases()]
    chosen = [case for case in known if re.search("|".join(patterns) or ".", case.name, re.IGNORECASE)]
    for name, found in results(chosen, int(options.get("jobs", "2"))):
        document["cases"][name] = found
        answers = "  ".join(f"{what} {found.get(what, '-')}" for what in YES)
        print(f"{name:60.60} {answers}  {found.get('error', '')}", flush=True)
        document["cases"] = {case.name: document["cases"][case.name] for case in known if case.name in document["cases"]}
        out.write_text(json.dumps(document, indent=1) + "\n")
    print("\n".join(table(document)))


if __name__ == "__main__":
    main()
