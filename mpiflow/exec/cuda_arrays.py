"""What kernels call as `shard.xp` on a GPU: CuPy, with what NumPy means where the two differ.

    forwarded    what CuPy has with the same meaning
    here         keywords that CuPy lacks (`where`, `mode`, `initial`), `vecdot`, `einsum` into an
                 array, products without copies
    GPUs alone   `sum_sorted`, `put_rows`: what NumPy's kernels do by asking how many there are

Kernels write into arrays that exist. What is forwarded allocates nothing where `out` is given,
except for a copy of an operand that overlaps it, and the scratch memory of long reductions and of
scans; `ALLOCATING` names those that give a new array, which kernels of a steady step avoid.
"""

from __future__ import annotations

from typing import Any

from mpiflow.exec.cuda_driver import Driver
from mpiflow.exec.cuda_gemm import plan_product

UFUNCS = (
    "absolute", "bitwise_and", "bitwise_or", "bitwise_xor", "copysign", "cos", "divide", "divmod",
    "equal", "exp", "floor_divide", "greater", "greater_equal", "isfinite", "left_shift", "less",
    "less_equal", "log", "log1p", "logical_and", "logical_not", "logical_or", "logical_xor",
    "minimum", "negative", "not_equal", "power", "reciprocal", "right_shift", "sign", "sin", "sqrt",
    "subtract", "tanh",
)  # fmt: skip
"""Called with arrays and `out`, by position or by name."""
VIEWS = ("expand_dims", "moveaxis")
ALLOCATING = (
    "arange", "ascontiguousarray", "clip", "diff", "empty", "flatnonzero",
    "searchsorted", "stack", "where", "zeros",
)  # fmt: skip
"""They give a new array; `flatnonzero` waits for the GPU too, as its size is not known before."""
VALUES = (
    "bool_", "finfo", "float16", "float32", "float64", "iinfo", "inf", "int32", "int64", "ndarray",
    "newaxis", "pi", "uint8", "uint16", "uint32", "uint64",
)  # fmt: skip
FORWARDED = (*UFUNCS, *VIEWS, *ALLOCATING, *VALUES, "argmax", "may_share_memory")

TAKE = """
long long row = (long long)index[i / width];
row = row < 0 ? 0 : row < rows ? row : rows - 1;
out = source[row * width + i % width];
"""
"""Row by row; `i` counts the elements of out."""
SUM_SORTED = """
long long at = i / width, column = i % width, row = keys[at] >> shift;
if (row < held && (at == 0 || (keys[at - 1] >> shift) != row)) {
    long long mask = (1LL << shift) - 1;
    T sum = values[(keys[at] & mask) * width + column];
    for (long long next = at + 1; next < count && (keys[next] >> shift) == row; ++next)
        sum += values[(keys[next] & mask) * width + column];
    out[place[at] * width + column] = sum;
}
"""
"""The first of a run of equal rows adds up the run; `i` counts the elements of values."""
PUT_ROWS = """
long long row = rows[i / width];
if (row >= 0 && row < held) out[row * width + i % width] = source[i];
"""
"""`i` counts the elements of source."""
_SUMS = {"ng,ngc->gc": 0, "ngc,gc->ng": 2, "...i,...i->...": -1}
"""The einsums that ops ask for, all of products of two arrays, and the dim that is summed over."""


class Arrays:
    """NumPy's functions, as mpiflow's kernels call them, on the GPU of a driver."""

    wide_sums = True
    """Products of 16-bit floats are summed in float32; see `ops.wide`."""

    def __init__(self, driver: Driver) -> None:
        cupy = driver.arrays
        for name in FORWARDED:
            setattr(self, name, getattr(cupy, name))
        self._driver, self._cupy = driver, cupy
        self._copy = cupy.copyto
        self.add = Accumulating(cupy.add)
        self.multiply = Masked(cupy.multiply)
        self.maximum = Maximum(cupy.maximum, cupy)
        self._take = cupy.ElementwiseKernel(
            "raw T source, raw S index, int64 rows, int64 width", "T out", TAKE, "mpiflow_take"
        )
        self._sum_sorted = cupy.ElementwiseKernel(
            "raw T values, raw int64 keys, raw int64 place, int64 count, int64 width, int64 shift,"
            " int64 held",
            "raw T out", SUM_SORTED, "mpiflow_sum_sorted",
        )  # fmt: skip
        self._put_rows = cupy.ElementwiseKernel(
            "raw T source, raw int64 rows, int64 width, int64 held", "raw T out", PUT_ROWS,
            "mpiflow_put_rows",
        )  # fmt: skip
        self._lists: dict[tuple[int, ...], Any] = {}
        self._sum_products = cupy.ReductionKernel(
            "T x, T y", "T out", "x * y", "a + b", "out = a", "0", "mpiflow_sum_products"
        )

    def __getattr__(self, name: str) -> Any:
        own = (each for each in (*vars(self), *vars(Arrays)) if not each.startswith("_"))
        raise AttributeError(
            f"a kernel asks for xp.{name}, which mpiflow does not have on GPUs; it has"
            f" {', '.join(sorted(own))}"
        )

    def copyto(self, out: Any, source: Any, casting: str = "same_kind", where: Any = None) -> None:
        """As NumPy's."""
        if where is None:
            self._copy(out, source, casting)
        else:
            self._copy(out, source, casting, where)

    def matmul(self, left: Any, right: Any, out: Any) -> Any:
        """As NumPy's, by cuBLAS, without a copy of an operand; sums of 16-bit floats in float32."""
        if not out.size:
            return out
        if not left.shape[-1]:
            out.fill(0)
            return out
        product = plan_product(
            (left.shape, right.shape, out.shape), (_steps(left), _steps(right), _steps(out))
        )
        self._driver.multiply(product, out, left, right)
        return out

    def dot(self, x: Any, y: Any, out: Any) -> Any:
        """The sum of products of two flat arrays."""
        return self._sum_products(x, y, out, axis=-1)

    def vecdot(self, x: Any, y: Any, out: Any) -> Any:
        """The sum of products along the last dim."""
        return self._sum_products(x, y, out, axis=-1)

    def einsum(self, letters: str, x: Any, y: Any, out: Any) -> Any:
        """Those of two arrays that mpiflow's ops ask for."""
        if letters not in _SUMS:
            raise NotImplementedError(
                f"einsum {letters!r}: on GPUs there are {', '.join(_SUMS)}; use matmul"
            )
        if letters == "ng,ngc->gc":
            x = x[:, :, None]
        return self._sum_products(x, y, out, axis=_SUMS[letters])

    def take(
        self, source: Any, index: Any, axis: int | None = None, out: Any = None, mode: str = "clip"
    ) -> Any:
        """As NumPy's along the first dim, or of the flat array; indices are clipped."""
        if mode != "clip" or axis not in (None, 0):
            raise NotImplementedError(f"take along {axis} with mode {mode!r}: on GPUs it clips")
        if axis is None:
            source = source.reshape(-1)
        if out is None:
            out = self._cupy.empty((*index.shape, *source.shape[1:]), source.dtype)
        if out.size:
            width = out.size // index.size
            self._take(source, index, source.shape[0], width, out)
        return out

    def put(self, out: Any, index: Any, values: Any) -> None:
        """As NumPy's, of indices that are legal: nothing checks them, which would wait."""
        self._cupy.put(out, index, values, mode="clip")

    def asarray(self, values: list[int]) -> Any:
        """Numbers that a kernel knows when it is made; copied to the GPU when first asked for."""
        key = tuple(values)
        if key not in self._lists:
            self._lists[key] = self._cupy.asarray(values)
        return self._lists[key]

    def sum_sorted(
        self, out: Any, values: Any, keys: Any, place: Any, shift: int, held: int
    ) -> None:
        """Write the sums of values (n, d) of equal rows to out (m, d), where `place` (n,) says.

        `keys` (n,) ascend: the row, shifted, and which of the values. Rows from `held` on are left
        out.
        """
        if values.size:
            count, width = values.shape
            self._sum_sorted(
                values, keys, place, count, width, shift, held, out, size=values.size
            )  # fmt: skip

    def put_rows(self, out: Any, rows: Any, source: Any) -> None:
        """Write source, row by row, to the rows of out (m, ...); rows that it has not are left out.

        Rows may repeat where what is written is the same.
        """
        if source.size:
            width = source.size // rows.size
            self._put_rows(source, rows, width, len(out), out, size=source.size)


def _steps(array: Any) -> tuple[int, ...]:
    """The strides of an array, in elements."""
    size = array.itemsize
    return tuple(stride // size for stride in array.strides)


class Masked:
    """A ufunc with `where`."""

    def __init__(self, ufunc: Any) -> None:
        self._ufunc = ufunc

    def __call__(
        self, x: Any, y: Any, out: Any = None, *, where: Any = None, dtype: Any = None
    ) -> Any:
        """As NumPy's."""
        options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        if where is not None:
            options["_where"] = where
        return self._ufunc(x, y, out=out, **options)


class Accumulating(Masked):
    """Addition, and its sums."""

    def reduce(
        self, x: Any, axis: Any = 0, dtype: Any = None, out: Any = None, keepdims: bool = False
    ) -> Any:
        """As NumPy's."""
        return self._ufunc.reduce(x, axis, dtype, out, keepdims)

    def accumulate(self, x: Any, axis: int = 0, dtype: Any = None, out: Any = None) -> Any:
        """As NumPy's."""
        return self._ufunc.accumulate(x, axis, dtype, out)

    def at(self, out: Any, index: Any, values: Any) -> None:
        """As NumPy's. Floats at one place are added in no fixed order."""
        self._ufunc.at(out, index, values)


class Maximum(Masked):
    """The larger of two, and of many."""

    def __init__(self, ufunc: Any, cupy: Any) -> None:
        super().__init__(ufunc)
        self._cupy = cupy

    def reduce(
        self, x: Any, axis: Any = 0, out: Any = None, keepdims: bool = False, initial: Any = None
    ) -> Any:
        """As NumPy's. With `initial` there may be nothing to take the maximum of."""
        if initial is not None and not x.size:
            out.fill(initial)
            return out
        self._cupy.max(x, axis, out, keepdims)
        return out if initial is None else self._ufunc(out, initial, out=out)
