"""What a pack is asked, checked without torch, which takes seconds to import."""

from __future__ import annotations

from pathlib import Path

from penstock.planner.common.errors import UserError
from penstock.planner.common.output import check_place
from penstock.planner.contract.checkpoint.checkpoint_files import PACK_MANIFEST, gguf_config, read_checkpoint
from penstock.runtime.asked.run_schema import PackFormat
from penstock.runtime.store.blockdev import check_device


def check_pack(checkpoint: Path, out: Path, device: Path | None, force: bool, adapter: Path | None, form: PackFormat | None) -> None:
    """UserError where ``checkpoint`` is damaged or a packed store already, where ``out`` holds something else, where ``device`` may not be
    written, and where two keys contradict each other."""
    if (checkpoint / PACK_MANIFEST).exists():
        raise UserError(f"{checkpoint}: already a packed store; give the Hugging Face checkpoint")
    read_checkpoint(checkpoint)
    if out.exists() and not out.is_dir():
        raise UserError(f"out={out}: a file is there; name a directory")
    if out.exists() and out.samefile(checkpoint):
        raise UserError(f"out={out}: is the checkpoint itself; name another directory")
    if out.exists() and any(out.glob("*.safetensors")):
        raise UserError(f"out={out}: holds a safetensors checkpoint; name another directory")
    if (out / PACK_MANIFEST).exists() and not force:
        raise UserError(f"out={out}: holds a packed store already; add force=true to replace it, or name another directory")
    check_place(out, "out")
    if form is not None and adapter is not None:
        raise UserError(f"format={form}: adapter={adapter} cannot be merged at the same time; merge it by PEFT, then pack what that saves")
    if form is not None and gguf_config(checkpoint) is not None:
        raise UserError(f"format={form}: {checkpoint} is a GGUF file, which is packed as it is; leave format out")
    if adapter is not None and not adapter.is_dir():
        raise UserError(f"adapter={adapter}: no such directory; name a PEFT adapter's")
    if device is not None:
        check_device(device, force)


def check_packed(path: Path) -> None:
    """UserError where ``path`` is no directory, or no packed store that `runtime pack` has finished."""
    if not path.is_dir():
        raise UserError(f"store={path}: no such directory; name a packed store")
    if not (path / PACK_MANIFEST).exists():
        raise UserError(f"store={path}: no {PACK_MANIFEST}, so no complete packed store; `runtime pack` makes one from a checkpoint")
