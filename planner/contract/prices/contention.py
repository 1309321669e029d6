"""What the SSD's reads and the copies to the device take from each other: all of them pass through the same DRAM."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.planner.contract.given.hardware import HardwareProfile


@dataclass(frozen=True)
class Contention:
    """The share of its rate alone that each link loses while the other is busy. Near 0 beside one drive.

    While both links move, each goes on at its slower rate; when one has nothing left, the other goes on alone. So seconds add up: a second
    of reading costs copies the seconds that they lost meanwhile, and the other way round. At worst one waits for the other. Writes to the
    SSD count like reads.
    """

    ssd: float = 0.0
    h2d: float = 0.0

    @property
    def h2d_s_per_ssd_s(self) -> float:
        """Seconds that copies take longer for each second that the reads beside them would take alone."""
        return min(1.0, self.h2d / (1 - self.ssd))

    @property
    def ssd_s_per_h2d_s(self) -> float:
        """Seconds that reads take longer for each second that the copies beside them would take alone."""
        return min(1.0, self.ssd / (1 - self.h2d))

    def finish(self, ssd_s: float, h2d_s: float) -> tuple[float, float]:
        """Seconds after which reads and copies are over that begin together and would take ``ssd_s`` and ``h2d_s`` alone. What ends first
        was slowed all along, the other one as long as that took."""
        return (
            min(ssd_s + self.ssd_s_per_h2d_s * h2d_s, ssd_s / (1 - self.ssd)),
            min(h2d_s + self.h2d_s_per_ssd_s * ssd_s, h2d_s / (1 - self.h2d)),
        )


def contention(hardware: HardwareProfile) -> Contention:
    """Of this machine; none without a GPU, and none of a rate beside the other that is not known (0) or no lower than alone."""
    gpu = hardware.gpu
    if gpu is None:
        return Contention()
    return Contention(
        _lost(gpu.ssd_while_h2d_gbps, max(point.gbps for point in hardware.ssd_read)),
        _lost(gpu.h2d_while_ssd_gbps, gpu.h2d.peak),
    )


def _lost(beside_gbps: float, alone_gbps: float) -> float:
    return max(0.0, 1 - beside_gbps / alone_gbps) if beside_gbps else 0.0
