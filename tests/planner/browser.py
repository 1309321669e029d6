"""A page as a real browser shows it, headless and offline."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli import HANGS_S

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND"


def browser() -> str:
    """The first that is installed; the test is skipped where none is."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    return found


def _call(page: Path, profile: Path, *flags: str) -> str:
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", OFFLINE)
    result = subprocess.run([browser(), *quiet, *flags, page.as_uri()], capture_output=True, text=True, timeout=HANGS_S)
    assert result.returncode == 0, result.stderr
    return result.stdout


def ask(page: Path, profile: Path, script: str) -> str:
    """What ``script`` finds in ``page``: it is appended to a copy of it and writes its answer into the element ``answer``."""
    copy = profile.with_suffix(".html")
    asking = f'<pre id="answer"></pre><script>document.getElementById("answer").textContent = (() => {{ {script} }})();</script></body>'
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", asking), encoding="utf-8")
    dom = _call(copy, profile, "--dump-dom")
    return dom.split('<pre id="answer">')[1].split("</pre>")[0]


def screenshot(page: Path, profile: Path, picture: Path) -> None:
    """Save what the page looks like."""
    _call(page, profile, "--window-size=900,2000", f"--screenshot={picture}")
