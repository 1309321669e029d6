"""How the links of several cards carry at once, and what goes from rank to rank."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.planner.common.measures import GB
from penstock.planner.contract.given.curve import Curve


@dataclass(frozen=True)
class Links:
    """Of one host."""

    together: Curve | None = None
    """Cards -> GB/s that the links of so many carry to them at once, all together; None: each carries what it does alone."""
    hop_s: float = 7e-5
    """Seconds in which a token's hidden state goes from a rank to the next one, while all links are busy: NCCL's send and receive of 16 KB
    between two H100s."""
    p2p_gbps: float = 0.0
    """Rate of larger hidden states between ranks; 0: not known, so nothing waits for it."""
    held_to: float = 1.0
    """What a rank's link is priced at while all carry, of what it carries alone."""
    word_hop_s: float = 0.0
    """Seconds of a token's hop inside a recorded step: through page-locked memory of the host, in an order that words keep. 0: that was not
    measured, and steps of several ranks are launched kernel by kernel."""
    vram_bytes: int = 0
    """Of each card that has a rank: what hops take beside the rank's own, NCCL's kernels, communicators and buffers."""

    def share(self, cards: int, alone_gbps: float) -> float:
        """Of a link's rate, what is left while those of ``cards`` carry at once, which carry ``alone_gbps`` one by one, added up."""
        return 1.0 if self.together is None or cards == 1 else min(1.0, self.together.at(cards) / alone_gbps)

    def hop_of(self, nbytes: float) -> float:
        """Seconds in which ``nbytes`` of hidden states go from a rank to the next one."""
        return self.hop_s + (nbytes / self.p2p_gbps / GB if self.p2p_gbps else 0.0)


NCCL = Links(vram_bytes=320 * 2**20)
"""Between cards, by default. Two H100s, four channels with buffers of 4 MiB: runs took 450 to 580 MB beside all else that was counted. Two
channels with 1 MiB, which runs have now, take 264 MB less: measured of communicators alone."""
GLOO = Links(None, 4.2e-4, 0.2)
"""Between processes of a host that have no cards. Measured over loopback, of 16 KiB and of 64 MiB there and back, on two cores that did
other work, too."""
