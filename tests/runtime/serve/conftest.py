"""What the tests of a server share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.planner.contract.plan.planfile import write_plan
from tests.runtime.serve.fake_motor import KEY, TEMPLATE, vocabulary
from tests.runtime.serve.motors import serving_plan
from tests.support import save_tiny


@pytest.fixture(scope="session")
def exact_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random llama in float32: no two tokens are as likely, however a pass rounds."""
    rough, exact = (tmp_path_factory.mktemp(name) for name in ("rough", "exact"))
    save_tiny(rough)
    AutoModelForCausalLM.from_pretrained(rough, dtype=torch.float32).save_pretrained(exact)
    return exact


@pytest.fixture(scope="session")
def desk(exact_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a plan, its checkpoint with a tokenizer, and files of keys."""
    desk = tmp_path_factory.mktemp("served")
    for file in exact_checkpoint.iterdir():
        (desk / "model").mkdir(exist_ok=True)
        (desk / "model" / file.name).write_bytes(file.read_bytes())
    tokenizer = vocabulary().tokenizer
    assert tokenizer is not None
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(desk / "model")
    write_plan(serving_plan(desk / "model"), desk / "plan.yaml")
    (desk / "keys.txt").write_text(f"# of a test\n{KEY}\n")
    (desk / "keys.txt").chmod(0o600)
    (desk / "short.txt").write_text("# of a test\nabc\n")
    (desk / "empty.txt").write_text("# none\n\n")
    return desk
