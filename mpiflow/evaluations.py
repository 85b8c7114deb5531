"""Evaluations: what a model is worth on a data set, and which evaluation was the best so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpiflow.exec.session import Session
from mpiflow.plan.records import Plan


def evaluate(plan: Plan, session: Session, name: str) -> dict[str, float]:
    """Collective. The outputs for a data set: the mean over every row, sums for totals."""
    data = plan.dataset(name)
    full = data.rows // data.batch
    programs = [p for p in plan.at_stage(0).programs if p.data == name]
    sums: dict[str, float] = {}
    for program in programs:
        steps = range(full, full + 1) if program.name.endswith("_tail") else range(full)
        session.expect(program.name, steps)
        for step in steps:
            values = session.run(program.name, step)
            for output in program.outputs:
                weight = 1 if output.total else program.rows
                sums[output.name] = sums.get(output.name, 0.0) + values[output.name] * weight
    totals = {output.name for p in programs for output in p.outputs if output.total}
    return {k: v if k in totals else v / data.rows for k, v in sums.items()}


@dataclass(slots=True)
class Best:
    """The best result so far of the metric that a job names, as `evaluate.accuracy`, if any.

    `step` is the one after which it was found, `since` counts the evaluations after it.
    """

    metric: str
    mode: str
    value: float | None = None
    step: int = 0
    since: int = 0

    def update(self, row: dict[str, Any]) -> bool:
        """Take in the results of an evaluation; whether they are better than all before."""
        name, _, metric = self.metric.rpartition(".")
        if name != row["evaluation"]:
            return False
        value, sign = row[metric], 1 if self.mode == "max" else -1
        if self.value is not None and sign * value <= sign * self.value:
            self.since += 1
            return False
        self.value, self.step, self.since = value, row["step"], 0
        return True

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"best": self.value, "best_step": self.step, "since_best": self.since}
