"""A model by its name on the Hugging Face hub: found in the local cache, or its config alone fetched into it."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.planner.common.errors import UserError
from penstock.planner.common.user_folder import user_path

CONFIG = "config.json"
BESIDE = ("generation_config.json", "model.safetensors.index.json")
"""Small files that are fetched with the config, where a model has them."""
TIMEOUT_S = 10.0
"""For the hub's first answer."""

_NAME = re.compile(r"(?:https?:/+(?:www\.)?huggingface\.co/)?([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/?")


def hub_name(text: str) -> str | None:
    """The repository that ``text`` names, ``ORG/NAME`` or its address; None for anything that is a path here."""
    found = _NAME.fullmatch(text)
    return None if found is None or user_path(text).exists() else found[1]


def config_folder(name: str) -> Path:
    """The directory of the local cache that holds the config of the repository ``name``, with the weights where they were downloaded.

    Fetches kilobytes when it is not there. UserError, one line, when there is no such model, no access, or no way to the hub.
    """
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

    try:
        kept = try_to_load_from_cache(name, CONFIG)
        if isinstance(kept, str):
            return Path(kept).parent
        about = HfApi().model_info(name, timeout=TIMEOUT_S)
        there = {entry.rfilename for entry in about.siblings or ()}
        if CONFIG not in there:
            raise UserError(
                f"{name}: the repository has no {CONFIG}; choose one with safetensors weights, or download a GGUF file and give its path"
            )
        found = Path(hf_hub_download(name, CONFIG, revision=about.sha)).parent
        for beside in there.intersection(BESIDE):
            hf_hub_download(name, beside, revision=about.sha)
    except hub_errors() as error:
        raise hub_refusal(name, error) from error
    return found


def hub_errors() -> tuple[type[Exception], ...]:
    """What calls of the hub raise: of the network, of the hub's answers, of names that cannot be."""
    from huggingface_hub import errors

    return (OSError, errors.HTTPError, errors.EntryNotFoundError, errors.HFValidationError)  # type: ignore[attr-defined]


def hub_refusal(name: str, error: Exception) -> UserError:
    """Why the hub gave nothing of the repository ``name``, in one line."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return UserError(f"{name}: its owner lets in whom they know; ask on its page, then `hf auth login`, and try again")
    if isinstance(error, errors.RepositoryNotFoundError):
        return UserError(f"{name}: no such directory, and no such model on the hub; check the name, or `hf auth login` if it is private")
    answered = errors.HfHubHTTPError | errors.EntryNotFoundError | errors.HFValidationError
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled) or not isinstance(error, answered | OSError):
        return UserError(f"{name}: not in the local Hugging Face cache, and the hub cannot be reached; go online, or give its directory")
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return UserError(f"{name}: the hub failed ({reason[0][:160]}); try again, or give its directory")
