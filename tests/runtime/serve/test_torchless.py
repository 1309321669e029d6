"""The front reads text without torch, by the very classes that transformers reads it by with torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from inspect import getsource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.runtime.asked.prompts import Vocabulary, read_vocabulary
from penstock.runtime.serve import serve_process
from tests.cli import HANGS_S, ROOT
from tests.conftest import SHARED
from tests.runtime.formats.gguf_made import COMMITTED

TEXTS = ("Hello there,  world!\n\t12345", "Žluťoučký kůň 鯨 \U0001f469\u200d\U0001f680", "<s>[INST] <|im_start|>user</s>", " x", "")
FAMILIES = {"llama": "LlamaTokenizerFast", "qwen2": "Qwen2Tokenizer", "gpt2": None}
"""Model type -> the tokenizer's class that its checkpoint names."""


def found(read: Callable[[Path], Vocabulary], path: str, texts: Sequence[str]) -> list[Any]:
    """What is read of the checkpoint at ``path``, as JSON has it."""
    vocabulary = read(Path(path))
    words: Any = vocabulary.tokenizer
    ids = [words(text)["input_ids"] for text in texts]
    said = [{"role": "user", "content": text} for text in texts]
    template = words.apply_chat_template(said, tokenize=False, add_generation_prompt=True) if words.chat_template else None
    decoded = [vocabulary.text(each) for each in ids]
    return [type(words).__name__, ids, decoded, template, sorted(vocabulary.stop_ids), vocabulary.generation.to_diff_dict()]


TORCHLESS = f"""
from __future__ import annotations
import json, sys
from pathlib import Path
from types import SimpleNamespace
from penstock.runtime.serve.serve_process import _vocabulary
{getsource(found)}
read = lambda path: _vocabulary(path, SimpleNamespace(model=SimpleNamespace(vocab=257)))
print(json.dumps({{path: found(read, path, json.loads(sys.argv[1])) for path in sys.argv[2:]}}))
print(json.dumps([name for name in sys.modules if name.startswith("torch.")]))
"""


def read_torchless(paths: list[Path]) -> tuple[Mapping[str, Any], list[str]]:
    """What a process finds that leaves torch out, and what it has of torch."""
    command = [sys.executable, "-c", TORCHLESS, json.dumps(TEXTS), *map(str, paths)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0 and "PyTorch" not in done.stderr, done.stderr
    said, torch_modules = map(json.loads, done.stdout.splitlines()[-2:])
    return said, torch_modules


def test_ids_templates_and_stop_tokens_are_those_that_transformers_reads_with_torch(desk: Path, tmp_path: Path) -> None:
    paths = [desk / "model", *(path for path in (SHARED / "models" / "tiny-llama", SHARED / "models" / "tiny-mixtral") if path.exists())]
    for model_type, name in FAMILIES.items():
        paths.append(shutil.copytree(desk / "model", tmp_path / model_type))
        for file, more in (("config.json", {"model_type": model_type}), ("tokenizer_config.json", {"tokenizer_class": name})):
            (paths[-1] / file).write_text(json.dumps({**json.loads((paths[-1] / file).read_text()), **more}))
    without, modules = read_torchless(paths)
    with_torch = {str(path): found(lambda path: read_vocabulary(path, 257), str(path), TEXTS) for path in paths}
    assert modules == [] and without == json.loads(json.dumps(with_torch))


def test_a_gguf_files_vocabulary_is_read_with_torch(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' reader imports it."""
    left_out: list[Path] = []
    plan: Any = SimpleNamespace(model=SimpleNamespace(vocab=512))
    for path in (desk / "model", sorted(COMMITTED.glob("*.gguf"))[0]):
        monkeypatch.setattr(serve_process, "leave_torch_out", lambda path=path: left_out.append(path))
        words = serve_process._vocabulary(path, plan).tokenizer
        assert words is not None and words("x = 1")["input_ids"]
    assert left_out == [desk / "model"]
