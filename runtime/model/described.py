"""What transformers makes of a config, said to the planner: ``python -m penstock.runtime.model.described DIR`` prints one JSON document."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from penstock.planner.common.errors import UserError
from penstock.runtime.model.skeleton import build_skeleton
from penstock.runtime.store.decoder import decoder_layers
from penstock.runtime.store.parameters import DTYPES


def refusal(model: PreTrainedModel) -> str | None:
    """Why the runtime does not run ``model``, in one line; None when it does."""
    try:
        decoder_layers(model)
    except UserError as error:
        return str(error)
    return None


def describe(directory: Path) -> dict[str, Any]:
    """The model of ``directory``, which holds a config.json and no weights: ``tensors`` as rows of [name, shape, dtype], by safetensors'
    names, and why it is ``refused``. Parameters are on the meta device; buffers take a few MB."""
    try:
        model = build_skeleton(directory)
    except UserError as error:
        return {"tensors": [], "refused": str(error).removeprefix(f"{directory}: ")}
    names = {dtype: name for name, dtype in DTYPES.items()}
    kept = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    stored = [*model.named_parameters(), *buffers.items()]
    return {"tensors": [[name, list(tensor.shape), names[tensor.dtype]] for name, tensor in stored], "refused": refusal(model)}


if __name__ == "__main__":
    print(json.dumps(describe(Path(sys.argv[1]))))
