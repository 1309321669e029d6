"""What the hosts of a run must have in common, by digest."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from penstock.planner.common.outside.installed import installed_version

_PACKAGES = ("penstock", "torch", "transformers")


def installed(package: str) -> str:
    """Which version of ``package`` is installed."""
    return installed_version(package) or "none, or its source tree"


def versions() -> dict[str, str]:
    """Of what computes, without importing any of it."""
    return {package: installed(package) for package in _PACKAGES}


@dataclass(frozen=True)
class HostClaims:
    """Of one host, which its first rank says to rank 0 before anything is loaded."""

    host: str
    """Its name."""
    rank: int
    """The first of its ranks."""
    on_host: int
    """Ranks of each host."""
    count: int
    """Of all ranks."""
    versions: dict[str, str]
    plan: str
    """Digest of the plan's text."""
    checkpoint: str
    """Digest of the weights' names, forms and places, and of config.json."""

    def words(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def differs(self, other: dict[str, Any]) -> str | None:
        """Why the host that says ``other`` cannot go with this one, which has rank 0; None where it can."""
        theirs = other.get("versions")
        theirs = theirs if isinstance(theirs, dict) else {}
        for package, mine in self.versions.items():
            if theirs.get(package) != mine:
                return f"has {package} {theirs.get(package)}, and {self.host} has {mine}; install the same on both"
        if (other.get("count"), other.get("on_host")) != (self.count, self.on_host):
            said = f"{other.get('on_host')} of {other.get('count')} ranks"
            return f"starts {said}, and {self.host} {self.on_host} of {self.count}; give torchrun the same numbers on both"
        if other.get("plan") != self.plan:
            return f"has another plan than {self.host} (their digests differ); give both the same plan="
        if other.get("checkpoint") != self.checkpoint:
            return f"has other weights than {self.host} (their digests differ); copy the same files to both"
        rank = other.get("rank")
        if not isinstance(rank, int) or rank not in range(self.on_host, self.count, self.on_host):
            return f"says that its first rank is {rank}; start torchrun with another --node-rank on each host"
        return None
