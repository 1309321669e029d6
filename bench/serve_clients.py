"""Clients that others wrote, against a server of a tiny trained checkpoint whose replies end.

    for tool in llm-comply lm-eval schemathesis; do python -m venv TOOLS/$tool && TOOLS/$tool/bin/pip install $tool; done
    TOOLS/lm-eval/bin/pip install tenacity aiohttp
    python bench/serve_clients.py work=DIR tools=TOOLS source=shared/models/tiny-llama out=serve-clients.json

`comply`: llm-comply's openai-chat, open-responses and anthropic, each test that does not pass named in :data:`EXCEPT`. `lm_eval`: the
loglikelihoods of a task of choices through `local-completions`, as token ids and as text, beside those that lm-eval has of transformers;
and a task of replies through `local-chat-completions`, beside the replies that transformers gives to the same prompts. `schemathesis`:
every check over /openapi.json but one: whether all that a schema allows is accepted, since some requests are refused in words
that no schema says. Each tool runs in an environment of its own; lm-eval takes torch and transformers of the process that calls it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cases import Row, chosen, run_cases  # noqa: E402
from bench.ending_model import LONGEST, PROMPTS, ending_checkpoint  # noqa: E402
from bench.keys import given_of  # noqa: E402
from bench.link import machine  # noqa: E402
from bench.serve_rig import Server  # noqa: E402
from penstock.planner.common.errors import UserError  # noqa: E402

KEYS = ("work", "tools", "source", "out", "cases", "hardware", "examples")
CASES = ("comply", "lm_eval", "schemathesis")
NAME = "model"
EXCEPT: Mapping[str, tuple[str, ...]] = {
    "openai-chat": ("chat-image-input", "chat-reasoning-summary"),
    "open-responses": ("image-input", "reasoning-summary"),
    "anthropic": ("anth-image-input", "anth-thinking-display"),
}
"""Images: the models here read text. Reasoning and thinking: the tiny model has none, and llm-comply skips them by its name."""
CHOICES = (
    ("def add(a, b):\n    return", (" a + b", " a - b", " None")),
    ("import os\nimport", (" sys", " apple", " 3")),
    ("class A:\n    def __init__(", ("self", "other", "3")),
    ("for i in", (" range(10):", " if", " return")),
    ("x = [1, 2, 3]\nprint(", ("x)", "y)", " ")),
    ("# Grüße, 日本\ns = ", ("'日本'", "'é'", "None")),
)
SHORT = 16
"""Tokens of a reply where thousands are asked for, many of which would otherwise never end."""
SAME = 1e-3
"""Nats between two sums of the same logarithms."""


class Clients:
    """The cases against one server."""

    def __init__(self, given: Mapping[str, str]):
        self.work = Path(given.get("work", "bench-work")).resolve()
        self.tools = Path(given["tools"]).resolve()
        self.source = Path(given["source"]).resolve()
        self.hardware = given.get("hardware", "cpu")
        self.examples = given.get("examples", "20")
        self.work.mkdir(parents=True, exist_ok=True)

    @cached_property
    def checkpoint(self) -> Path:
        path = self.work / "ending"
        if not (path / "model.safetensors").exists():
            ending_checkpoint(self.source, path)
        return path

    @contextmanager
    def served(self, *more: str) -> Iterator[str]:
        """The address of a server with ``more`` keys."""
        keys = ("model=hf", f"model.checkpoint={self.checkpoint}", f"hardware={self.hardware}", "workload=serve", f"name={NAME}", *more)
        with Server(self.work / "serve-clients.log", *keys) as server:
            yield f"http://{server.address.host}:{server.address.port}"

    # ---- cases

    def comply(self) -> Iterator[Row]:
        with self.served() as url:
            yield from self._comply(url)

    def _comply(self, url: str) -> Iterator[Row]:
        for form, without in EXCEPT.items():
            listed = self._tool("llm-comply", "--format", form, "--list", "-u", url).stdout
            tests = [name for name in re.findall(r"^  ([a-z][\w-]*)  ", listed, re.MULTILINE) if name not in without]
            found = self._tool(
                "llm-comply",
                "-u",
                f"{url}/v1",
                "-k",
                "none",
                "-m",
                NAME,
                "--format",
                form,
                "--json",
                "--timeout",
                "600",
                "-f",
                ",".join(tests),
            )
            document = json.loads(found.stdout[found.stdout.index("{") :])
            passed = [each["id"] for each in _results(document) if each["status"] in ("passed", "pass", "warning", "warn")]
            for each in _results(document):
                if each["id"] not in passed:
                    print(f"  {form}: {json.dumps(each)[:600]}", file=sys.stderr, flush=True)
            what = f"{form} without {', '.join(without)}"
            yield _row(f"llm-comply {self.version('llm-comply', 'llm_comply')}", what, len(passed), len(tests), "tests", ">= 1")

    def lm_eval(self) -> Iterator[Row]:
        with self.served() as url:
            yield from self._lm_eval(url)

    def _lm_eval(self, url: str) -> Iterator[Row]:
        name = f"lm-eval {self.version('lm-eval', 'lm_eval')}"
        tasks = self._tasks()
        common = ["--include_path", str(tasks), "--log_samples"]
        own = f"pretrained={self.checkpoint},dtype=bfloat16,softmax_dtype=float32"
        expected = self._samples("own", *common, "--model", "hf", "--device", "cpu", "--model_args", own, "--tasks", "tiny_choices")
        served = f"model={NAME},base_url={url}/v1/completions,tokenizer={self.checkpoint},tokenizer_backend=huggingface,num_concurrent=4"
        for what, ids in (("token ids", True), ("text", False)):
            said = self._samples(
                what.replace(" ", "-"), *common, "--model", "local-completions", "--model_args", f"{served},tokenized_requests={ids}",
                "--tasks", "tiny_choices",
            )  # fmt: skip
            apart = max(abs(float(a[0]) - float(b[0])) + (str(a[1]) != str(b[1])) for a, b in zip(said, expected, strict=True))
            yield _row(name, f"loglikelihood as {what}, largest difference to transformers", apart, SAME, "nats", "<= 1")
        chat = f"model={NAME},base_url={url}/v1/chat/completions,num_concurrent=4"
        said = self._samples(
            "chat", *common, "--apply_chat_template", "--model", "local-chat-completions", "--model_args", chat, "--tasks", "tiny_replies"
        )
        same = sum(a.strip() == b.strip() for a, b in zip(said, self._replies(), strict=True))
        yield _row(name, "generate_until through local-chat-completions, as transformers replies", same, len(PROMPTS), "", ">= 1")

    def schemathesis(self) -> Iterator[Row]:
        with self.served(f"limits.new_tokens={SHORT}") as url:
            yield from self._schemathesis(url)

    def _schemathesis(self, url: str) -> Iterator[Row]:
        found = self._tool(
            "schemathesis", "run", f"{url}/openapi.json", "-c", "all", "--exclude-checks", "positive_data_acceptance",
            "-n", self.examples, "--request-timeout", "600", "--no-color", "-w", "2", binary="st", cwd=self.work,
        )  # fmt: skip
        cases = re.search(r"(\d+) generated(?:, (\d+) found)?", found.stdout)
        if cases is None or found.returncode:
            print(found.stdout[-6000:], file=sys.stderr, flush=True)
        asked, wrong = (1, 1) if cases is None else (int(cases[1]), int(cases[2] or 0))
        name = f"schemathesis {self.version('schemathesis', 'schemathesis')}"
        yield _row(name, "requests over /openapi.json that found nothing", asked - wrong, asked, "", ">= 1")

    # ---- tools

    def version(self, tool: str, package: str) -> str:
        said = f"import importlib.metadata as m; print(m.version({package!r}))"
        return subprocess.run([self.tools / tool / "bin/python", "-c", said], capture_output=True, text=True, check=True).stdout.strip()

    def _tool(self, tool: str, *arguments: str, binary: str = "", **more: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run([self.tools / tool / "bin" / (binary or tool), *arguments], capture_output=True, text=True, **more)

    def _samples(self, name: str, *arguments: str) -> list[Any]:
        """The responses of a run, in the order of its documents."""
        out = self.work / "lm-eval" / name
        env = {**os.environ, "PYTHONPATH": sysconfig.get_paths()["purelib"], "HF_HUB_OFFLINE": "1"}
        python = self.tools / "lm-eval" / "bin/python"
        found = subprocess.run([python, "-m", "lm_eval", *arguments, "--output_path", out], capture_output=True, text=True, env=env)
        if found.returncode:
            raise SystemExit(f"lm-eval {name}: {found.stderr[-2000:]}")
        newest = max(out.rglob("samples_*.jsonl"), key=lambda path: path.stat().st_mtime)
        samples = sorted((json.loads(text) for text in newest.read_text().splitlines()), key=lambda sample: sample["doc_id"])
        return [each[0] for sample in samples for each in sample["resps"]]

    def _tasks(self) -> Path:
        tasks = self.work / "tasks"
        tasks.mkdir(exist_ok=True)
        choices = [{"question": text, "choices": said, "answer": 0} for text, said in CHOICES]
        _task(tasks, "tiny_choices", choices, "multiple_choice", "acc", ('doc_to_choice: "{{choices}}"', 'target_delimiter: ""'))
        said = ("generation_kwargs:", '  until: ["\\n\\n"]', f"  max_gen_toks: {LONGEST}", "  do_sample: false")
        _task(tasks, "tiny_replies", [{"question": text, "answer": "none"} for text in PROMPTS], "generate_until", "exact_match", said)
        return tasks

    def _replies(self) -> list[str]:
        """transformers' own."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.checkpoint)
        model = AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype=torch.bfloat16).eval()
        said = []
        for text in PROMPTS:
            ids = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
            reply = model.generate(torch.tensor([ids]), max_new_tokens=LONGEST, do_sample=False)[0, len(ids) :]
            said.append(tokenizer.decode(reply, skip_special_tokens=True).partition("\n\n")[0])
        return said


def _results(document: Any) -> list[dict[str, Any]]:
    """llm-comply's, each with its id and status."""
    found = document.get("results", document.get("tests", [])) if isinstance(document, dict) else document
    return [{"id": each.get("id") or each.get("test_id"), "status": str(each.get("status")).lower(), **each} for each in found]


def _task(folder: Path, name: str, documents: list[dict[str, Any]], kind: str, metric: str, more: tuple[str, ...]) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    lines = [
        f"task: {name}", "dataset_path: json", "dataset_kwargs:", "  data_files:", f"    test: {data}", "test_split: test",
        f"output_type: {kind}", 'doc_to_text: "{{question}}"', "doc_to_target: answer", *more, "metric_list:", f"  - metric: {metric}",
    ]  # fmt: skip
    (folder / f"{name}.yaml").write_text("\n".join(lines) + "\n")


def _row(case: str, what: str, result: float, limit: float, unit: str, target: str) -> Row:
    return Row(case, what, result, limit, unit, result / limit if limit else 0.0, target, None, 0.0, 0.0)


def main() -> None:
    try:
        given = given_of(sys.argv[1:], KEYS)
        absent = next((key for key in ("tools", "source") if key not in given), None)
        if absent:
            raise UserError(f"{absent}: missing; see the head of this file")
    except UserError as error:
        raise SystemExit(str(error)) from None
    clients = Clients(given)
    methods = {name: partial(getattr(clients, name)) for name in CASES}
    where = machine({"gpu": None, "cpu": {"cores": os.cpu_count()}, "dram_bytes": psutil.virtual_memory().total})
    run_cases(chosen(given.get("cases", ",".join(CASES)), methods), where, Path(given["out"]) if "out" in given else None)


if __name__ == "__main__":
    main()
