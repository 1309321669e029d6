"""Which model types the installed `transformers` builds text models of, read from its own tables without importing it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.common.outside.installed import installed_version

TABLES = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")
"""Of ``transformers.models.auto.modeling_auto``: what `runtime run` builds a model by."""
WRAPPED = "language_model"
"""Under which a model of several modalities has its text model."""
_PREFIX_REMOVED = r'"{}":\s*\[\s*PrefixChange\(prefix_to_remove="language_model"'
_PREFIX_OWN = r'base_model_prefix = "language_model'


def refuse_unknown_type(config: Mapping[str, Any], where: str) -> None:
    """UserError where ``config``, a whole config.json, is of a model that the installed transformers has no code for. Nothing where
    transformers is not installed: then there is a planner alone."""
    kind, known = str(config.get("model_type", "")), known_types()
    if not kind or not known or kind in known:
        return
    here = installed_version("transformers") or ""
    code = "; code beside a checkpoint is never run" if config.get("auto_map") else ""
    raise UserError(
        f"{where}: transformers {here} has no text model of model_type {kind[:40]!r}{code}; update transformers, or use another model"
    )


def refuse_foreign_prefix(config: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    """UserError where ``config``, a whole config.json, is of a text model alone, and the ``names`` of tensors are those of a wrapper. The
    installed transformers does not look for those. Nothing where transformers is not installed."""
    foreign = next((name for name in names if f"{WRAPPED}." in name and ".layers." in name), None)
    if foreign is None or any(isinstance(config[key], dict) for key in config if key.endswith("_config") and key != "quantization_config"):
        return
    kind = str(config.get("model_type", ""))
    texts = _texts(kind)
    if not texts or any(re.search(pattern, text) for text in texts for pattern in (_PREFIX_REMOVED.format(re.escape(kind)), _PREFIX_OWN)):
        return
    prefix = foreign.partition(f"{WRAPPED}.")[0] + WRAPPED
    raise UserError(
        f"{where}: is of the text model {kind[:40]!r} alone, and the tensors lie under {prefix}, as a multimodal model's do; transformers "
        "finds none there: restore that model's own config.json"
    )


def _texts(kind: str) -> list[str]:
    """Where the installed transformers says which prefixes the names of a ``kind``'s tensors may have."""
    folder = _folder()
    if folder is None:
        return []
    family = re.sub(r"_text(_model)?$", "", kind)
    found = [folder / "conversion_mapping.py", *sorted((folder / "models" / family).glob("modeling_*.py"))]
    try:
        return [path.read_text(encoding="utf-8") for path in found]
    except OSError:
        return []


def _folder() -> Path | None:
    found = find_spec("transformers")
    return Path(found.submodule_search_locations[0]) if found is not None and found.submodule_search_locations else None


@cache
def known_types() -> frozenset[str]:
    """Empty where transformers is not installed, or its tables are not where they were."""
    folder = _folder()
    if folder is None:
        return frozenset()
    try:
        text = (folder / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    tables = [re.search(rf"^{name} = OrderedDict\((.*?)^\)", text, re.DOTALL | re.MULTILINE) for name in TABLES]
    if None in tables:
        return frozenset()
    return frozenset(key for table in tables if table for key in re.findall(r'\(\s*"([^"]+)",', table[1]))
