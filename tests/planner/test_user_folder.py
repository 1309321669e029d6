"""Paths with a tilde, also of users that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.common.user_folder import cache_dir, home_path, profile_dir, user_path
from penstock.planner.contract.plan.planfile import read_plan


def test_a_tilde_is_a_home_that_is_known_and_else_part_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert user_path("~/plan.yaml") == Path("/home/me/plan.yaml") and home_path() == Path("/home/me")
    assert user_path("~nobody-of-this-name/plan.yaml") == Path("~nobody-of-this-name/plan.yaml")
    assert user_path(Path("a/~b")) == Path("a/~b")
    with pytest.raises(UserError, match="plan=~nobody-of-this-name: no such file"):
        read_plan(user_path("~nobody-of-this-name"))


def test_without_a_home_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_CONFIG_DIR", "PENSTOCK_CACHE_DIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    for place in (profile_dir, cache_dir):
        with pytest.raises(UserError, match="HOME=: no home directory is known"):
            place()
