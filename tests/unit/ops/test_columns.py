"""Both ways to lay out the columns of a convolution, and when each is taken."""

from dataclasses import replace

import numpy as np
import pytest

from mpiflow.ops import columns
from mpiflow.ops.phases import phases
from mpiflow.ops.tiles import Geometry


def geometry(images=3, groups=2, channels=3, outputs=2, size=(7, 5), kernel=(3, 2), stride=(2, 1),
             dilation=(1, 2)):  # fmt: skip
    padding = ((1, 2), (1, 0))
    windows = tuple(
        (n + sum(pads) - (k - 1) * d - 1) // s + 1
        for n, k, s, d, pads in zip(size, kernel, stride, dilation, padding, strict=True)
    )
    return Geometry(images, groups, channels, outputs, size, kernel, windows, stride, padding,
                    dilation)  # fmt: skip


def operands(at):
    draw = np.random.default_rng(0)
    x = draw.standard_normal((at.images, at.groups * at.channels, *at.size))
    w = draw.standard_normal((at.groups * at.outputs, at.channels, *at.kernel))
    y = draw.standard_normal((at.images, at.groups * at.outputs, *at.windows))
    return x, w, y


def results(at):
    """y, dx and dw, each with the workspace that it asks for."""
    x, w, y = operands(at)
    made = []
    for run, needed, like, given in (
        (columns.convolve, columns.workspace, y, (x, w)),
        (columns.input_gradient, columns.input_workspace, x, (y, w)),
        (columns.weight_gradient, columns.weight_workspace, w, (x, y)),
    ):
        out = np.full_like(like, np.nan)
        work = np.full(needed(at, "float64"), 255, np.uint8)
        run(np, work, out, *given, at)()
        made.append(out)
    return made


@pytest.mark.parametrize("stride", [(1, 1), (2, 1), (3, 2)])
@pytest.mark.parametrize("dilation", [(1, 1), (2, 3)])
def test_rows_in_turn_give_what_whole_columns_give(stride, dilation, monkeypatch):
    at = geometry(stride=stride, dilation=dilation)
    made = {}
    for by_rows in (True, False):
        monkeypatch.setattr(Geometry, "worth_rows", lambda at, by_rows=by_rows: by_rows)
        made[by_rows] = results(at)
    for turns, whole in zip(made[True], made[False], strict=True):
        np.testing.assert_allclose(turns, whole, rtol=1e-12, atol=1e-12)


def test_rows_take_turns_where_there_are_many_channels_and_places():
    square = geometry(images=64, groups=1, channels=16, outputs=16, size=(32, 32), kernel=(3, 3),
                      stride=(1, 1), dilation=(1, 1))  # fmt: skip
    assert square.worth_rows()
    assert not replace(square, channels=3).worth_rows()  # of an image, there is little to copy
    assert not replace(square, images=1, size=(3, 3), windows=(3, 3)).worth_rows()


def test_a_shard_with_too_little_workspace_for_turns_takes_whole_columns(monkeypatch):
    at = geometry(images=1, size=(6, 6), stride=(1, 1), dilation=(1, 1))
    expected = results(at)
    monkeypatch.setattr(Geometry, "worth_rows", lambda at: False)
    planned = columns.workspace(at, "float64")
    monkeypatch.setattr(Geometry, "worth_rows", lambda at: True)
    x, w, y = operands(at)
    out, work = np.full_like(y, np.nan), np.empty(planned, np.uint8)
    columns.convolve(np, work[: at.least("float64")], out, x, w, at)()
    np.testing.assert_allclose(out, expected[0], rtol=1e-12)


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_the_phases_of_a_gradient_are_all_of_x_once(stride):
    at = geometry(stride=(stride, stride), dilation=(2, 1))
    seen = np.zeros(at.size, int)
    for phase in phases(at):
        seen[phase.places] += 1
        if phase.at is not None:
            assert seen[phase.places].shape == phase.at.windows
    assert (seen == 1).all()
