"""The CPU's compiled kernels stay few, whatever row counts the experts get."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cli import HANGS_S, ROOT

MANY_ROW_COUNTS = """
import contextlib, sys
from penstock.runtime.cli import main
sys.argv = ["runtime", "--version"]
with contextlib.suppress(SystemExit):
    main()
import psutil, torch
experts, rows = torch.ones(1, 256, 512, dtype=torch.bfloat16), torch.ones(500, 256, dtype=torch.bfloat16)
def multiply(count):
    torch.nn.functional.grouped_mm(rows[:count], experts, offs=torch.tensor([count], dtype=torch.int32))
multiply(1)
before = psutil.Process().memory_info().rss
for count in range(2, 402):
    multiply(count)
print(psutil.Process().memory_info().rss - before)
"""


def test_a_kernel_for_every_row_count_is_not_kept(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")}
    done = subprocess.run(
        [sys.executable, "-c", MANY_ROW_COUNTS],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < 150e6
