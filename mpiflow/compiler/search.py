"""Above the compiler: which mesh, micro-batches, schedule and level of ZeRO make a step shortest.

    candidates    all that may be tried: what is given stays, the rest is enumerated   candidates.py
    estimates     of each, cheap: seconds and bytes                                    estimate.py
    pruned        does not fit, cannot be cut, saves memory that there is
    planned       the most promising of the others, one by one, as many as are allowed

Each plan corrects the estimates of its mesh, so that the next is chosen by what is known by then.
What is planned is priced by the simulator, and proven. All of it is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from mpiflow.compiler.candidates import Candidate
from mpiflow.compiler.estimate import Estimate
from mpiflow.compiler.recompute import FULL, SELECTIVE
from mpiflow.errors import CompileError, MpiflowError
from mpiflow.graph.mesh import Mesh
from mpiflow.plan.records import Plan
from mpiflow.plan.text import size_text

PLANS = 12
"""As many plans are made at most."""
_MARGIN = 0.9
"""What is estimated to take this share of the limit fits for sure."""
_OVER = 1.25
"""What is estimated to take this many times the limit does not fit."""
_HOPELESS = 2.0
"""How many times the best step an estimate may be for its plan to be worth the time."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A candidate with its plan."""

    candidate: Candidate
    estimate: Estimate
    plan: Plan

    @property
    def seconds(self) -> float:
        """A training step, as the simulator predicts it."""
        train = self.plan.program("train")
        return train.seconds if train else 0.0

    @property
    def nbytes(self) -> int:
        """The arena of the rank that holds most."""
        return self.plan.arena()


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of a search: what was planned, the best first, and why not the others.

    `failed` and `uncut` have reasons; `large` the estimated bytes of what does not fit; `needless`
    save memory that there is enough of; `slower` were not planned as others promised more.
    """

    planned: tuple[Planned, ...]
    failed: tuple[tuple[Candidate, str], ...]
    uncut: tuple[tuple[Candidate, str], ...]
    large: tuple[tuple[Candidate, int], ...]
    needless: tuple[Candidate, ...]
    slower: tuple[Candidate, ...]

    @property
    def tried(self) -> int:
        """How many candidates there were."""
        groups = (self.planned, self.failed, self.uncut, self.large, self.needless, self.slower)
        return sum(map(len, groups))


Progress = Callable[[int, Candidate, Planned | str], None]
"""Called after each plan with its number, and what became of the candidate."""


def search(
    candidates: Sequence[Candidate],
    estimate: Callable[[Candidate], Estimate],
    plan: Callable[[Candidate], Plan],
    *,
    limit: int = 0,
    most: int = PLANS,
    progress: Progress = lambda number, candidate, outcome: None,
) -> Found:
    """Plan the most promising candidates, `most` of them, for arenas of `limit` bytes (0: any).

    The first of `candidates` is always planned: it is what would be had without a search, so the
    best is never predicted worse. CompileError where none of those that were planned can be had.
    """
    return _Search(list(candidates), estimate, plan, limit, most, progress).found()


@dataclass
class _Search:
    candidates: list[Candidate]
    estimate: Callable[[Candidate], Estimate]
    plan: Callable[[Candidate], Plan]
    limit: int
    most: int
    progress: Progress
    estimates: dict[Candidate, Estimate] = field(default_factory=dict)
    uncut: list[tuple[Candidate, str]] = field(default_factory=list)
    planned: list[Planned] = field(default_factory=list)
    fits: set[Candidate] = field(default_factory=set)
    failed: dict[Candidate, str] = field(default_factory=dict)
    time_factors: dict[Mesh, float] = field(default_factory=dict)
    byte_factors: dict[Mesh, float] = field(default_factory=dict)
    reason: MpiflowError | None = None

    def found(self) -> Found:
        """Plan by turns what promises most, and sort the rest by why it was not planned."""
        first = self.candidates[0]
        self._estimate_all()
        twin = replace(first, auto=False)
        if twin != first and not self.estimates[first].forced and twin in self.estimates:
            del self.estimates[twin]  # which is the same plan
        waiting = [c for c in self.estimates if c != first]
        self._try(first)
        while len(self.planned) + len(self.failed) < self.most:
            promising = self._most_promising([c for c in waiting if not self._is_needless(c)])
            if promising is None:
                break
            waiting.remove(promising)
            self._try(promising)
        if not self.planned:
            assert self.reason is not None
            raise self.reason
        needless = {c for c in waiting if self._is_needless(c)}
        large = {c for c in waiting if c not in needless and not self._may_fit(c)}
        return Found(
            tuple(sorted(self.planned, key=lambda p: (p.seconds, p.nbytes))),
            tuple(self.failed.items()),
            tuple(self.uncut),
            tuple((c, round(self._bytes(c))) for c in waiting if c in large),
            tuple(c for c in waiting if c in needless),
            tuple(c for c in waiting if c not in needless | large),
        )

    def _estimate_all(self) -> None:
        for candidate in self.candidates:
            try:
                self.estimates[candidate] = self.estimate(candidate)
            except CompileError as error:
                if candidate == self.candidates[0]:
                    self.estimates[candidate] = Estimate(float("inf"), 0.0)
                else:
                    self.uncut.append((candidate, _first_line(error)))

    def _is_needless(self, candidate: Candidate) -> bool:
        """Whether it does nothing but save memory where a like one that saves less fits.

        That is more than one micro-batch without stages, recomputation, level 2 of ZeRO, and level
        3 with micro-batches: weights are then gathered as at level 1, once. As level 1 has less to
        update, it may be faster than none; so may level 3, which gathers while it computes.
        """
        return any(
            other in self.fits or (other in self.estimates and self._fits_surely(other))
            for other in _saving_less(candidate)
        )

    def _fits_surely(self, candidate: Candidate) -> bool:
        """Without what only the limit asks for."""
        known = self.estimates[candidate]
        enough = not self.limit or known.nbytes <= _MARGIN * self.limit
        return enough and not known.forced

    def _try(self, candidate: Candidate) -> None:
        number = len(self.planned) + len(self.failed) + 1
        try:
            made = Planned(candidate, self.estimates[candidate], self.plan(candidate))
        except MpiflowError as error:
            if not isinstance(error, CompileError) and candidate == self.candidates[0]:
                raise
            self.reason = self.reason or error
            self.failed[candidate] = _first_line(error)
            self.progress(number, candidate, self.failed[candidate])
            return
        if 0.0 < made.estimate.seconds < float("inf"):
            self.time_factors[candidate.mesh] = made.seconds / made.estimate.seconds
            self.byte_factors[candidate.mesh] = made.nbytes / max(made.estimate.nbytes, 1.0)
        if self.limit and made.nbytes > self.limit:
            over = size_text(made.nbytes - self.limit)
            why = f"holds {size_text(made.nbytes)}, {over} too much"
            self.failed[candidate] = why
            self.reason = self.reason or CompileError(f"{candidate}: {why}")
            self.progress(number, candidate, why)
            return
        self.planned.append(made)
        self.fits.add(candidate)
        self.progress(number, candidate, made)

    def _most_promising(self, waiting: list[Candidate]) -> Candidate | None:
        """The fastest of those that may fit, if it is worth a plan; if nothing fits, the least."""
        fitting = [c for c in waiting if self._may_fit(c)]
        if not fitting and not self.planned and waiting:
            return min(waiting, key=self._bytes)
        best = min((p.seconds for p in self.planned), default=float("inf"))
        chosen = min(fitting, key=self._seconds, default=None)
        if chosen is None or self._seconds(chosen) > _HOPELESS * best:
            return None
        return chosen

    def _may_fit(self, candidate: Candidate) -> bool:
        return not self.limit or self._bytes(candidate) <= _OVER * self.limit

    def _seconds(self, candidate: Candidate) -> float:
        return self.estimates[candidate].seconds * _factor(self.time_factors, candidate.mesh)

    def _bytes(self, candidate: Candidate) -> float:
        return self.estimates[candidate].nbytes * _factor(self.byte_factors, candidate.mesh)


def _factor(known: dict[Mesh, float], mesh: Mesh) -> float:
    """How many times its estimate a plan is: on this mesh, or on average over the others."""
    return known.get(mesh) or (fmean(known.values()) if known else 1.0)


def _saving_less(candidate: Candidate) -> Iterator[Candidate]:
    """Candidates that are like it, but hold more and take no longer."""
    if candidate.zero == 2 or (candidate.zero == 3 and candidate.micro_batches > 1):
        yield replace(candidate, zero=1)
    if candidate.recompute is not None:
        yield replace(candidate, recompute=None)
    if candidate.recompute == FULL:
        yield replace(candidate, recompute=SELECTIVE)
    if candidate.mesh.stages == 1:
        count = candidate.micro_batches
        yield from (replace(candidate, micro_batches=n) for n in range(1, count) if count % n == 0)


def _first_line(error: MpiflowError) -> str:
    return str(error).partition("\n")[0]
