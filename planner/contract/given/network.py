"""What goes from host to host."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.planner.common.measures import GB


@dataclass(frozen=True)
class Network:
    """Between any two of the hosts that ranks are dealt over."""

    gbps: float
    """Of a large hidden state, one way."""
    hop_s: float
    """Seconds in which a token's hidden state goes from one to the other."""

    def hop_of(self, nbytes: float) -> float:
        """Seconds in which ``nbytes`` of hidden states go from host to host."""
        return self.hop_s + nbytes / self.gbps / GB
