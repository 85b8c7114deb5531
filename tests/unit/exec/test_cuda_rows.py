"""Sums and updates by row on a GPU: as NumPy's, without asking how many there are."""

import numpy as np
import pytest
from gpu_stand_in import StandIn, device, host

from mpiflow.exec.bind import Shard
from mpiflow.exec.cuda_arrays import Arrays
from mpiflow.graph.op import OUT
from mpiflow.ops.embedding import EmbeddingGrad
from mpiflow.ops.rows import PADDING, SumRows
from mpiflow.ops.rowupdate import SgdRowUpdate
from mpiflow.testing.kernels import poisoned

draw = np.random.default_rng(0)
driver = StandIn()


def both(op, arrays, outs, start=0):
    """What the kernel makes of `outs`, shapes or arrays, with NumPy and on the GPU."""
    found = []
    shapes = tuple(array.shape for array in arrays)
    for xp, put in ((np, np.copy), (Arrays(driver), device)):
        made = [put(poisoned(*out) if isinstance(out, tuple) else out.copy()) for out in outs]
        nbytes = op.workspace(shapes, tuple(out.shape for out in made), arrays[0].dtype.name)
        work = np.full(nbytes, 0xFF, np.uint8)
        shard = Shard(xp, put(work), {OUT: (start, 0)}, True)
        call = op.bind(shard, made[0] if len(made) == 1 else tuple(made), *map(put, arrays))
        with driver.strict():
            call()
        found.append([host(out) for out in made])
    return found


@pytest.mark.parametrize("count", [1, 7, 300])
@pytest.mark.parametrize("start", [0, 4])
def test_gradients_of_a_part_of_a_table(count, start):
    ids = draw.integers(0, 12, count)
    values = draw.standard_normal((count, 3))
    numpys, gpus = both(EmbeddingGrad(12), [values, ids], [((5, 3), "float64")], start)
    np.testing.assert_allclose(gpus[0], numpys[0], rtol=1e-12)
    assert count < 300 or numpys[0].all()


@pytest.mark.parametrize("count", [0, 1, 40])
def test_sums_by_row_and_the_padding_behind_them(count):
    ids = draw.integers(-1, 10, count)  # -1 and 9 are no rows
    values = draw.standard_normal((count, 2))
    outs = [((count, 2), "float64"), ((count,), "int64")]
    (sums, rows), (our_sums, our_rows) = both(SumRows(9), [values, ids], outs)
    np.testing.assert_array_equal(our_rows, rows)
    np.testing.assert_allclose(our_sums, sums, rtol=1e-12)


@pytest.mark.parametrize("start", [0, 6])
def test_updates_leave_alone_what_is_not_there(start):
    op = SgdRowUpdate(block=0)
    table = draw.standard_normal((6, 2))
    ids = np.array([0, 3, 5, 6, 9, 30, PADDING, PADDING])
    values = draw.standard_normal((8, 2))
    values[6:] = np.nan
    (numpys,), (gpus,) = both(op, [table, values, ids, np.array(0.1)], [table], start)
    np.testing.assert_array_equal(gpus, numpys)
    changed = np.flatnonzero((numpys != table).any(1)).tolist()
    assert changed == ([0, 3, 5] if not start else [0, 3])
