"""The formats that a pack can write: the one list."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import read_checkpoint
from penstock.runtime.asked.run_schema import PackFormat
from penstock.runtime.model.skeleton import build_skeleton
from penstock.runtime.tools.recoding.recoded import Recoded
from penstock.runtime.tools.recoding.recoder import Recoder
from penstock.runtime.tools.recoding.sources import Sources
from penstock.runtime.tools.recoding.to_int4 import ToInt4
from penstock.runtime.tools.recoding.to_lossless import ToLossless

Progress = Callable[[int, int], None]

RECODERS: Mapping[PackFormat, Callable[[Sources, Progress], Recoder]] = MappingProxyType(
    {PackFormat.lossless: ToLossless.of, PackFormat.int4: ToInt4.of}
)


def recoded(checkpoint: Path, form: PackFormat, directory: Path, beside: list[Path], progress: Progress) -> Recoded:
    """The checkpoint in the directory ``checkpoint`` in the format ``form``; headers and the small files ``beside`` it go to the empty
    ``directory``. ``progress(done, total)`` counts bytes that are read beforehand. UserError where it cannot have that format."""
    found, model = read_checkpoint(checkpoint), build_skeleton(checkpoint)
    computed = str(model.dtype).removeprefix("torch.")
    if computed != "bfloat16":
        raise UserError(f"format={form}: {checkpoint} computes in {computed}, allowed is bfloat16; pack it without format=")
    sources = Sources.of(found, model, form)
    return Recoded(sources, RECODERS[form](sources, progress), directory, beside)
