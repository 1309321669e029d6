"""The secret that the hosts of a run share."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from penstock.planner.common.errors import UserError
from penstock.planner.common.user_folder import user_path

SECRET, SECRET_FILE = "PENSTOCK_SECRET", "PENSTOCK_SECRET_FILE"
LEAST_BYTES = 16


def shared_secret() -> bytes:
    """What PENSTOCK_SECRET says, or the file that PENSTOCK_SECRET_FILE names, without white space at its ends. UserError where neither is
    set, where it is short enough to be guessed, or where others may read the file."""
    named, said = os.environ.get(SECRET_FILE), os.environ.get(SECRET)
    if named:
        secret, where = _read(user_path(named)), f"{SECRET_FILE}={named}"
    elif said:
        secret, where = said.encode().strip(), SECRET
    else:
        raise UserError(
            f"several hosts prove to each other who they are by a secret that they share: set {SECRET}, or {SECRET_FILE} to a file of it,"
            " to the same on each (such as what `openssl rand -hex 32` prints)"
        )
    if len(secret) < LEAST_BYTES:
        raise UserError(f"{where}: has {len(secret)} bytes, and fewer than {LEAST_BYTES} can be guessed; `openssl rand -hex 32` prints 64")
    return secret


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UserError(f"{SECRET_FILE}={path}: others may read it; chmod 600 {path}")
            return file.read().strip()
    except OSError as error:
        raise UserError(f"{SECRET_FILE}={path}: {error.strerror}; name a file that holds the secret") from error
