"""A benchmark's machine may be the one that another command probed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.link import Bench
from bench.probed import adopt_profile, profile_of
from penstock.planner.common.errors import UserError


def test_a_profile_is_taken_over_with_the_file_that_plans_read(tmp_path: Path) -> None:
    earlier, bench = tmp_path / "earlier", Bench(tmp_path / "now")
    with pytest.raises(UserError, match=r"profile=.*has no profile.json; name the work="):
        adopt_profile(bench, earlier)
    (earlier / "config" / "hardware").mkdir(parents=True)
    (earlier / "profile.json").write_text('{"gpu": null, "host": null}')
    with pytest.raises(UserError, match="local.yaml"):
        adopt_profile(bench, earlier)
    (earlier / "config" / "hardware" / "local.yaml").write_text("name: local\n")
    adopt_profile(bench, earlier)
    assert (bench.work / "config" / "hardware" / "local.yaml").read_text() == "name: local\n"
    assert profile_of(bench, "true") == {"gpu": None, "host": None}, "nothing is probed"
    adopt_profile(bench, bench.work)
