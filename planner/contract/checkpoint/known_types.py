"""Which model types the installed `transformers` builds text models of, read from its own tables without importing it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.planner.common.errors import UserError

TABLES = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")
"""Of ``transformers.models.auto.modeling_auto``: what `runtime run` builds a model by."""


def refuse_unknown_type(config: Mapping[str, Any], where: str) -> None:
    """UserError where ``config``, a whole config.json, is of a model that the installed transformers has no code for. Nothing where
    transformers is not installed: then there is a planner alone."""
    kind, known = str(config.get("model_type", "")), known_types()
    if not kind or not known or kind in known:
        return
    code = "; code beside a checkpoint is never run" if config.get("auto_map") else ""
    raise UserError(
        f"{where}: transformers {_version()} has no text model of model_type {kind[:40]!r}{code}; update transformers, or use another model"
    )


@cache
def known_types() -> frozenset[str]:
    """Empty where transformers is not installed, or its tables are not where they were."""
    found = find_spec("transformers")
    if found is None or not found.submodule_search_locations:
        return frozenset()
    try:
        text = (Path(found.submodule_search_locations[0]) / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    tables = [re.search(rf"^{name} = OrderedDict\((.*?)^\)", text, re.DOTALL | re.MULTILINE) for name in TABLES]
    if None in tables:
        return frozenset()
    return frozenset(key for table in tables if table for key in re.findall(r'\(\s*"([^"]+)",', table[1]))


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # with the mail parser behind it, for an error's sake

    try:
        return version("transformers")
    except PackageNotFoundError:
        return ""
