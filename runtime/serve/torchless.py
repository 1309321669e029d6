"""A process that reads and writes text needs no torch, which takes 260 MB and most of the imports' seconds."""

from __future__ import annotations

import logging
import sys

_SAID = "PyTorch was not found"


def leave_torch_out() -> None:
    """Nothing imports torch in this process any more; nothing changes where it is imported already. transformers supports that: tokenizers,
    templates and configurations are then read by the same classes as with torch, models are not there."""
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # the interpreter's own word for a module that is not to be found
        logging.getLogger("transformers").addFilter(lambda record: _SAID not in str(record.msg))
