"""What Hydra, OmegaConf and argparse complain about, in one line that names the key, the value and the remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from penstock.planner.common.command.known_keys import Key, known_at, unknown_key
from penstock.planner.common.command.overrides import key_of
from penstock.planner.common.errors import UserError, nearest

_SOURCE = re.compile(r"In '([^']+)'")
_VALUE = re.compile(r"(?:[Vv]alue|field type|Incompatible value) '([^']*)'")


def explain(error: BaseException, keys: Mapping[str, Key], overrides: Sequence[str]) -> UserError | None:
    """The one line for ``error``, or None when it is not about the configuration (a bug then, shown with its traceback).

    ``overrides`` are those that the user gave, as typed.
    """
    from hydra.errors import HydraException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, UserError):
        return error
    if isinstance(error, OverrideParseException):
        return _unparsable(error, keys)
    if isinstance(error, AssertionError) and "None" in str(error):  # "Unexpected type: None", or NoneType
        return _in_null_section(keys, overrides)
    if isinstance(error, ValueError) and "Config group override" in str(error):
        return _nameless_group(overrides)
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return None
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    about = next((e for e in chain if isinstance(e, OmegaConfBaseException)), None)
    if about is None:
        return UserError(_one_line(str(error)))
    return _from_omegaconf(about, " ".join(str(e) for e in chain), keys, overrides)


def _in_null_section(keys: Mapping[str, Key], overrides: Sequence[str]) -> UserError | None:
    """OmegaConf asserts when a key is set below a section that is null."""
    for override in overrides:
        key = known_at(key_of(override), keys)
        if key is not None and key.within is not None:
            group = key.within.partition(".")[0]
            return UserError(f"{override}: {key.within} is null in this {group}; choose another {group}=")
    return None


def _nameless_group(overrides: Sequence[str]) -> UserError:
    """Hydra wants text as the name of a group's file."""
    nameless = next((o for o in reversed(overrides) if o.partition("=")[2] in ("null", "~", "None", "true", "false")), "null")
    return UserError(f"{nameless}: must be a name; choose one, or leave it out")


def _unparsable(error: BaseException, keys: Mapping[str, Key]) -> UserError:
    override = getattr(error, "override", "")
    key, _, value = override.partition("=")
    known = keys.get(key_of(override))
    allowed = f"; it must be {known.allowed}" if known else ""
    return UserError(f"{key}={value}: the value cannot be read{allowed}; put quotes around text with special characters")


def _from_omegaconf(error: BaseException, story: str, keys: Mapping[str, Key], overrides: Sequence[str]) -> UserError:
    path = str(getattr(error, "full_key", "") or "")
    given = [o for o in overrides if key_of(o) == path] or [
        o for o in overrides if f"override {o}" in story or f"override ++{o.lstrip('+')}" in story or key_of(o).endswith("." + path)
    ]
    if given:
        path = key_of(given[-1])
    source = _SOURCE.search(story)
    where = f"conf {source.group(1)}: " if source and not given else ""
    known = known_at(re.sub(r"\[\d+\].*", "", path), keys)
    value = given[-1].partition("=")[2] if given else _quoted_value(story)
    inside = [name for name in keys if name.startswith(f"{path}.")] if path and known is None else []
    if inside:
        shown = f"={value}" if value is not None else ""
        return UserError(f"{where}{path}{shown}: it has keys of its own; set one of them, such as {inside[0]}=")
    if known is None:
        if path and "not in" in str(error) and not path.startswith("hydra."):
            again = "; if an earlier version measured it, run `planner probe` again" if where.startswith("conf hardware/") else ""
            return UserError(f"{where}{path}: {unknown_key(path, keys)}{again}")
        return UserError(f"{where}{path}: {_one_line(str(error))}" if path else where + _one_line(str(error)))
    if "Interpolation" in type(error).__name__:
        return UserError(f"{where}{path}={value}: {_one_line(str(error))}; write \\${{ for a literal ${{")
    shown = f"={value}" if value is not None else ""
    whole = "" if path == known.path or path.startswith(f"{known.path}[") else f"{known.path} "
    return UserError(f"{where}{path}{shown}: {whole}must be {known.allowed}{nearest(value or '', known.choices)}")


def _quoted_value(story: str) -> str | None:
    match = _VALUE.search(story)
    return match.group(1) if match else None


def _one_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = ["a list stands where keys with values belong" if line == "Cannot merge DictConfig with ListConfig" else line for line in lines]
    kept = [line for line in lines if not line.startswith(("full_key:", "object_type=", "reference_type=", "See http", "Set the env"))]
    return "; ".join(kept)
