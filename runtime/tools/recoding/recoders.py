"""The formats that a pack can write: the one list."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import Checkpoint, read_checkpoint
from penstock.runtime.asked.run_schema import PackFormat
from penstock.runtime.model.skeleton import build_skeleton
from penstock.runtime.tools.recoding.recoded import Recoded
from penstock.runtime.tools.recoding.recoder import Recoder
from penstock.runtime.tools.recoding.sources import Sources
from penstock.runtime.tools.recoding.to_int4 import ToInt4
from penstock.runtime.tools.recoding.to_lossless import ToLossless
from penstock.runtime.tools.recoding.to_rows import ToRows

Progress = Callable[[int, int], None]
Made = tuple[Sources, Recoder]


def _of_bf16(form: PackFormat, of: Callable[[Sources, Progress], Recoder]) -> Callable[[Checkpoint, Progress], Made]:
    """From a checkpoint whose matrices are BF16, as is what it computes in."""

    def made(checkpoint: Checkpoint, progress: Progress) -> Made:
        model = build_skeleton(checkpoint.directory)
        computed = str(model.dtype).removeprefix("torch.")
        if computed != "bfloat16":
            where = f"format={form}: {checkpoint.directory} computes in {computed}"
            raise UserError(f"{where}, allowed is bfloat16; pack it without format=")
        sources = Sources.of(checkpoint, model, form)
        return sources, of(sources, progress)

    return made


RECODERS: Mapping[PackFormat, Callable[[Checkpoint, Progress], Made]] = MappingProxyType(
    {
        PackFormat.lossless: _of_bf16(PackFormat.lossless, ToLossless.of),
        PackFormat.int4: _of_bf16(PackFormat.int4, ToInt4.of),
        PackFormat.rows: ToRows.of,
    }
)


def recoded(checkpoint: Path, form: PackFormat, directory: Path, beside: list[Path], progress: Progress) -> Recoded:
    """The checkpoint in the directory ``checkpoint`` in the format ``form``; headers and the small files ``beside`` it go to the empty
    ``directory``. ``progress(done, total)`` counts bytes that are read beforehand. UserError where it cannot have that format."""
    sources, recoder = RECODERS[form](read_checkpoint(checkpoint), progress)
    return Recoded(sources, recoder, directory, beside)
