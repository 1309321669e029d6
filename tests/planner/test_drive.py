"""A drive is told by what does not change from boot to boot."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.planner.common.drive import drive_of


def test_a_drive_is_its_device_file_system_and_size(tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev
    table = tmp_path / "proc" / "self" / "mountinfo"
    table.parent.mkdir(parents=True)
    table.write_text(f"36 35 {os.major(device)}:{os.minor(device)} / /mnt rw,noatime master:1 - ext4 /dev/nvme0n1p2 rw\n")
    assert drive_of(tmp_path, tmp_path).startswith("/dev/nvme0n1p2, ext4, ")
    table.write_text("36 35 9999:1 / /mnt rw - ext4 /dev/sda rw\n")
    assert drive_of(tmp_path, tmp_path).startswith("device ")
    assert drive_of(tmp_path) == drive_of(tmp_path)
