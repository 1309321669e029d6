"""NUMA: memory of several nodes, and on which of them the card is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.planner.common.cgroup import read_text
from penstock.planner.common.threads import allowed_cores, numbers
from penstock.planner.doctor.card_check import cards_on_the_bus
from penstock.planner.doctor.finding import Finding, Verdict


def node_findings(root: Path = Path("/")) -> Iterator[Finding]:
    """Whether this process has cores of the card's node alone. One node, as on most machines, leaves nothing to choose."""
    yield from _interleaved(root)
    nodes = {int(d.name.removeprefix("node")): numbers(read_text(d / "cpulist")) for d in _node_directories(root)}
    if len(nodes) < 2:
        yield Finding("NUMA", "one node", Verdict.good)
        return
    near = {int(text) for card in cards_on_the_bus(root) if (text := read_text(card / "numa_node"))} & nodes.keys()
    if len(near) != 1:
        yield Finding("NUMA", f"{len(nodes)} nodes, {'no card' if not near else 'cards on several'}", Verdict.good)
        return
    (node,) = near
    allowed = allowed_cores(root)
    if allowed <= nodes[node]:
        yield Finding("NUMA", f"{len(nodes)} nodes, here the cores of node {node}, the card's", Verdict.good)
        return
    bound = f"numactl --cpunodebind={node} --preferred={node}"
    change = f"start `planner probe` and `runtime run` behind `{bound}`: copies from another node's DRAM cross the link between nodes"
    yield Finding("NUMA", f"{len(nodes)} nodes, the card is on node {node}", Verdict.fair, change)


def _interleaved(root: Path) -> Iterator[Finding]:
    """Memory dealt over nodes line by line, by the BIOS, or page by page, by a policy."""
    cpus, nodes = root / "sys/devices/system/cpu", len(list(_node_directories(root)))
    sockets = {text for f in cpus.glob("cpu[0-9]*/topology/physical_package_id") if (text := read_text(f))}
    if nodes == 1 and len(sockets) > 1 and " hypervisor" not in (read_text(root / "proc/cpuinfo") or ""):
        change = "turn node interleaving off in the BIOS: half of what the CPU multiplies by comes from the other socket"
        yield Finding("interleaving", f"{len(sockets)} sockets in one node", Verdict.fair, change)
    policy = (read_text(root / "proc/self/numa_maps") or "").partition("\n")[0].split()[1:2]
    if policy and policy[0].startswith("interleave"):
        change = "start without numactl --interleave: the CPU multiplies by what lies in its own node's DRAM, at twice the rate"
        yield Finding("interleaving", f"pages by the policy {policy[0]}", Verdict.fair, change)


def _node_directories(root: Path) -> Iterator[Path]:
    """Those with cores: memory of an expander or of a card has none."""
    return (d for d in (root / "sys/devices/system/node").glob("node[0-9]*") if numbers(read_text(d / "cpulist")))
