"""Everything that is looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.planner.doctor.card_check import Card, card_findings
from penstock.planner.doctor.disk_check import disk_findings
from penstock.planner.doctor.finding import Finding, Verdict
from penstock.planner.doctor.memory_check import memory_findings
from penstock.planner.doctor.memory_modules import module_findings
from penstock.planner.doctor.nodes import node_findings
from penstock.planner.doctor.processor import processor_findings
from penstock.planner.doctor.products_check import products_findings


def examine(path: Path, card: Card, root: Path = Path("/")) -> tuple[Finding, ...]:
    """All findings, in the order of the table. Takes well under a second, changes nothing. UserError for a path that is not."""
    memory = (*memory_findings(root), *node_findings(root), *module_findings(root))
    return (*card_findings(card, root), *memory, *disk_findings(path, root), *processor_findings(root), *products_findings(root))


def document(findings: tuple[Finding, ...]) -> dict[str, Any]:
    """``findings`` for JSON."""
    return {
        "stops": sum(f.verdict is Verdict.stops for f in findings),
        "findings": [{"name": f.name, "found": f.found, "verdict": str(f.verdict), "change": f.change or None} for f in findings],
    }
