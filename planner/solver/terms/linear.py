"""A linear program under construction: integer variables, choices of exactly one, and a solver that proves its answer."""

from __future__ import annotations

from collections.abc import Sequence

import pulp

from penstock.planner.solver.terms.highs import least

MB = 10**6


class LinearProgram:
    """Bytes are in MB, so that the solver's tolerances suit models of any size."""

    def __init__(self) -> None:
        self.lp = pulp.LpProblem("penstock", pulp.LpMinimize)
        self.rows: list[pulp.LpConstraint] = []
        self.columns: dict[int, pulp.LpVariable] = {}

    def integer(self, name: str, low: int, high: int, forced: int | None = None) -> pulp.LpVariable:
        """A whole number in low..high, or the forced one."""
        low, high = (low, high) if forced is None else (forced, forced)
        return self.lp.add_variable(name, low, high, cat=pulp.LpInteger)

    def amount(self, name: str, high: float | None = None) -> pulp.LpVariable:
        """0 or more, up to ``high``."""
        return self.lp.add_variable(name, 0, high)

    def bits(self, name: str, count: int) -> list[pulp.LpVariable]:
        """Binaries of which exactly one is set."""
        bits = [self.lp.add_variable(f"{name}_{i}", 0, 1, cat=pulp.LpInteger) for i in range(count)]
        self.add(pulp.lpSum(bits) == 1)
        return bits

    def add(self, constraint: pulp.LpConstraint) -> None:
        """What must hold."""
        self.rows.append(constraint)
        self._count(constraint)

    def weighted(
        self, name: str, bits: Sequence[pulp.LpVariable], quantity: pulp.LpAffineExpression, most: float, factors: Sequence[float]
    ) -> pulp.LpAffineExpression:
        """``quantity``, at most ``most``, times the factor of the bit that is set."""
        return self.dot(self.shares(name, bits, quantity, most), factors)

    def shares(self, name: str, bits: Sequence[pulp.LpVariable], quantity: pulp.LpAffineExpression, most: float) -> list[pulp.LpVariable]:
        """One copy of ``quantity`` per choice, zero where the choice is not taken, so that products stay tight."""
        parts = [self.amount(f"{name}_{i}") for i in range(len(bits))]
        for part, bit in zip(parts, bits, strict=True):
            self.add(part <= most * bit)
        self.add(pulp.lpSum(parts) == quantity)
        return parts

    @staticmethod
    def dot(parts: Sequence[pulp.LpVariable], factors: Sequence[float]) -> pulp.LpAffineExpression:
        """The sum of the products."""
        return pulp.lpSum(part * factor for part, factor in zip(parts, factors, strict=True))

    def minimise(self, objective: pulp.LpAffineExpression) -> bool:
        """Whether there is a proven optimum; the variables then hold its values. At these tolerances HiGHS' presolve now and then calls a
        feasible program infeasible. So "infeasible" counts only if a solve without presolve agrees."""
        objective = objective + 0.0
        self._count(objective)
        return any(self._solved(objective, presolve) for presolve in ("on", "off"))

    def _count(self, expression: pulp.LpAffineExpression) -> None:
        self.columns.update((id(variable), variable) for variable, _ in expression.items())

    def _solved(self, objective: pulp.LpAffineExpression, presolve: str) -> bool:
        columns = sorted(self.columns.values(), key=lambda variable: variable.name)
        found = least(columns, self.rows, objective, presolve)
        if found is None:
            return False
        for variable, value in zip(columns, found, strict=True):
            variable.varValue = value
        return True
