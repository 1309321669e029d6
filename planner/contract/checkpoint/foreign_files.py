"""Directories that are no safetensors checkpoint: what they are, in a line, and what to do with them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import xxhash

from penstock.planner.common.errors import UserError

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_CONVERT = (
    "import sys, transformers as t; "
    "t.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype='auto').save_pretrained(sys.argv[2]); "
    "t.AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])"
)
"""transformers reads pickled weights with torch's loader of tensors alone, which runs no code."""
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def foreign_file(path: Path) -> str | None:
    """What the file ``path`` is, given where a directory of a checkpoint was wanted; None where nothing is known of it."""
    if path.suffix.lower() in (*_PICKLED, ".safetensors"):
        return f"{path}: one file of a checkpoint; name the directory that holds it and config.json"
    return None


def foreign_directory(directory: Path) -> str | None:
    """What ``directory``, which lacks config.json or weights, is; None where nothing is known of it. Reads one small file at most."""
    names = sorted(path.name for path in directory.iterdir())
    if ADAPTER_CONFIG in names:
        base = base_of_adapter(directory) or "its base model"
        return (
            f"{directory}: this is a LoRA adapter of {base}, not a model; solve for model.checkpoint= {base}, "
            f"then `runtime pack checkpoint=... adapter={directory} out=...`"
        )
    pickled = next((name for name in names if name.endswith(_PICKLED) and name != "training_args.bin"), None)
    if pickled is not None:
        here, there = shlex.quote(str(directory)), shlex.quote(f"{str(directory).rstrip('/')}-safetensors")
        return (
            f"{directory}: holds {pickled}, pickled weights, which are not read; convert them, in as much memory as they have: "
            f'python -c "{_CONVERT}" {here} {there}'
        )
    return None


def adapter_digest(directory: Path) -> str:
    """xxh3_128 over a PEFT adapter's config and weights. UserError where one of them is missing or cannot be read."""
    if not directory.is_dir():
        raise UserError(f"adapter={directory}: no such directory; name a PEFT adapter's")
    state = xxhash.xxh3_128()
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        try:
            state.update((directory / name).read_bytes())
        except FileNotFoundError:
            raise UserError(f"adapter={directory}: no {name} in it; name a directory that PEFT's save_pretrained wrote") from None
        except OSError as error:
            raise UserError(f"{directory / name}: cannot be read ({error.strerror or error}); check its permissions") from None
    return state.hexdigest()


def base_of_adapter(directory: Path) -> str | None:
    """The name of the model that a PEFT adapter is for, as its config has it."""
    try:
        found = json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    base = found.get("base_model_name_or_path") if isinstance(found, dict) else None
    return base[:200] if isinstance(base, str) and base else None
