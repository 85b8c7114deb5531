"""Fits of measured seconds, by least relative squares, robust against single bad figures.

A price that is 10 % wrong is equally bad for 8 bytes and for 64 MiB, so residuals are relative.
What is fitted is never negative: no message takes less than no time, nor fewer bytes longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from mpiflow.compiler.machine import Curve, Piece
from mpiflow.errors import TaskError

_MOST_PIECES, _FEWEST_POINTS = 3, 3
_OUTLIER = 0.3
"""Relative residuals above this count less (Huber 1964)."""
_WORTH, _EXACT = 0.5, 0.05
"""A piece more must bring the loss below this share of it; errors like this need no more."""
_USELESS = 0.5
"""A median relative error above this is no fit."""


@dataclass(frozen=True, slots=True)
class Fit:
    """How far a fit lies from what was measured: the median and the largest relative error."""

    median: float
    worst: float

    def __str__(self) -> str:
        return f"median error {100 * self.median:.0f} %, largest {100 * self.worst:.0f} %"


def fit_of(predicted: ArrayLike, measured: ArrayLike) -> Fit:
    """The errors of predictions."""
    errors = np.abs(np.asarray(predicted) / np.asarray(measured) - 1)
    return Fit(float(np.median(errors)), float(errors.max()))


def fit_line(amounts: ArrayLike, seconds: ArrayLike) -> tuple[float, float]:
    """alpha and beta of seconds = alpha + beta amount, neither of them negative."""
    x, y = np.asarray(amounts, float), np.asarray(seconds, float)
    weight = np.ones_like(y)
    alpha, beta = _solve(x, y, weight)
    for _ in range(10):
        error = np.abs((alpha + beta * x) / y - 1)
        weight = np.minimum(1.0, _OUTLIER / np.maximum(error, 1e-12))
        alpha, beta = _solve(x, y, weight)
    return alpha, beta


def _solve(x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> tuple[float, float]:
    """Weighted least squares of (alpha + beta x) / y = 1 over alpha, beta >= 0."""
    one, slope = weight / y, weight * x / y
    aa, ab, bb = (one / y).sum(), (slope / y).sum(), (slope * x / y).sum()
    a, b = one.sum(), slope.sum()
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        alpha, beta = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if alpha >= 0 and beta >= 0:
            return float(alpha), float(beta)
    # The loss is convex: otherwise its least value lies on an edge, the better of the two.
    flat, steep = a / aa, b / bb if bb else 0.0
    return (float(flat), 0.0) if flat * a >= steep * b else (0.0, float(steep))


def fit_curve(what: str, nbytes: ArrayLike, seconds: ArrayLike) -> tuple[Curve, Fit]:
    """The pieces, at most three, that describe what was measured at these sizes, which rise.

    Where more bytes took less time, the fewer were disturbed: they count as the more. TaskError
    where it makes no sense: no latency, no bandwidth, or most figures far from the fit.
    """
    x, measured = np.asarray(nbytes, float), np.asarray(seconds, float)
    y = np.minimum.accumulate(measured[::-1])[::-1]
    curve = Curve(_chosen(x, y))
    fit = fit_of([curve.seconds(n) for n in x], measured)
    if not curve.pieces[0].seconds or not curve.pieces[-1].each or fit.median > _USELESS:
        rows = zip(x, measured, strict=True)
        table = "".join(f"\n  {n:12,.0f} bytes  {t * 1e6:12.1f} us" for n, t in rows)
        raise TaskError(
            f"what was measured of {what} fits no line of latency and bandwidth ({fit}); repeat it"
            f" when the machine is calmer:{table}"
        )
    return curve, fit


def _chosen(x: np.ndarray, y: np.ndarray) -> tuple[Piece, ...]:
    """One line, or as many as are worth it."""
    piece = cache(lambda a, b: _piece(x[a:b], y[a:b], first=not a))
    chosen: tuple[float, tuple[Piece, ...]] = (math.inf, ())
    for count in range(1, _MOST_PIECES + 1):
        for cuts in _cuts(len(x), count):
            found = [piece(a, b) for a, b in pairwise(cuts)]
            loss = sum(loss for loss, _ in found)
            if loss < (chosen[0] if len(chosen[1]) == count else _WORTH * chosen[0]):
                chosen = loss, tuple(piece for _, piece in found)
        if chosen[0] < len(x) * _EXACT**2:
            break
    return chosen[1]


def _cuts(points: int, count: int) -> list[tuple[int, ...]]:
    """All ways to divide points in a row into so many runs of three or more."""
    if count == 1:
        return [(0, points)] if points >= _FEWEST_POINTS else []
    return [
        (*head, points)
        for last in range(_FEWEST_POINTS * (count - 1), points - _FEWEST_POINTS + 1)
        for head in _cuts(last, count - 1)
    ]


def _piece(x: np.ndarray, y: np.ndarray, *, first: bool) -> tuple[float, Piece]:
    """A line over some figures, from the first of them on (from 0, if they are the first)."""
    start = 0.0 if first else float(x[0])
    at, each = fit_line(x - start, y)
    errors = np.minimum(np.abs((at + each * (x - start)) / y - 1), 1.0)
    loss = np.where(errors < _OUTLIER, errors**2, _OUTLIER * (2 * errors - _OUTLIER))
    return float(loss.sum()), Piece(start, at, each)
