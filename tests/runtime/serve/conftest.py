"""What the tests of a server share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support import save_tiny


@pytest.fixture(scope="session")
def exact_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random llama in float32: no two tokens are as likely, however a pass rounds."""
    rough, exact = (tmp_path_factory.mktemp(name) for name in ("rough", "exact"))
    save_tiny(rough)
    AutoModelForCausalLM.from_pretrained(rough, dtype=torch.float32).save_pretrained(exact)
    return exact
