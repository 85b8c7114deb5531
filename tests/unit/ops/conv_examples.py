"""Example inputs for the ops of convolutional networks."""

import numpy as np

from mpiflow.graph.op import REGISTRY


def made(name, *arrays, **attributes):
    return REGISTRY[name](**attributes), arrays


def floats(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def distinct(*shape):
    """Numbers of which no two are near each other, in random order."""
    size = int(np.prod(shape))
    return np.random.default_rng(size).permutation(size).reshape(shape) / 7.0


def rounded(*shape):
    """Numbers of which many are equal."""
    return np.random.default_rng(3).integers(0, 3, shape).astype("float64")


def settings(dims, stride=1, padding=(0, 0), dilation=1, groups=1):
    return dict(stride=(stride,) * dims, padding=(padding,) * dims, dilation=(dilation,) * dims,
                channel_groups=groups)  # fmt: skip


CONVS = [  # x, w, settings
    ((2, 1, 4, 3), (3, 1, 3, 2), settings(2, stride=2, padding=(1, 2))),
    ((3, 4, 2, 2), (6, 2, 2, 1), settings(2, padding=(1, 0), groups=2)),
    ((2, 3, 4), (3, 1, 3), settings(1, stride=3, padding=(1, 1), groups=3)),
    ((2, 4, 4, 3), (4, 1, 3, 2), settings(2, padding=(1, 0), groups=4)),
    ((2, 3, 5), (3, 1, 2), settings(1, padding=(3, 2), dilation=2, groups=3)),
    ((3, 5, 2), (4, 5, 1), settings(1)),
    ((5, 2, 4), (3, 2, 3), settings(1, padding=(2, 1), dilation=2)),
    ((3, 2, 3, 2), (4, 2, 1, 1), settings(2, stride=2)),
    ((2, 1, 2, 3, 2), (3, 1, 2, 2, 1), settings(3, padding=(1, 0))),
]


def convolutions():
    """Examples of the three ops, by name."""
    found = {"Conv": [], "ConvInputGrad": [], "ConvWeightGrad": []}
    for shape, kernel, attributes in CONVS:
        x, w = floats(*shape), floats(*kernel)
        y = REGISTRY["Conv"](**attributes).infer((shape, kernel))[0]
        dy = floats(*y, seed=1)
        found["Conv"].append(made("Conv", x, w, **attributes))
        found["ConvInputGrad"].append(
            made("ConvInputGrad", dy, w, size=shape[2:], **attributes))  # fmt: skip
        found["ConvWeightGrad"].append(
            made("ConvWeightGrad", x, dy, size=kernel[2:], **attributes))  # fmt: skip
    return found


POOLS = [  # x, window, stride, padding
    ((5, 2, 7), (3,), (2,), ((1, 1),)),
    ((2, 3, 3, 4), (2, 2), (2, 2), ((0, 0), (0, 0))),
    ((3, 2, 3, 4), (3, 2), (1, 2), ((1, 2), (1, 0))),
    ((2, 1, 3, 2, 4), (2, 2, 3), (1, 2, 2), ((1, 0), (0, 0), (2, 2))),
]


def poolings():
    """Examples of pooling and its gradients, by name."""
    found = {"MaxPool": [], "MaxPoolGrad": [], "MeanPool": [], "MeanPoolGrad": []}
    for shape, window, stride, padding in POOLS:
        a = dict(window=window, stride=stride, padding=padding)
        x, tied, op = distinct(*shape), rounded(*shape), REGISTRY["MaxPool"](**a)
        dy, y = floats(*op.infer((shape,))[0]), np.empty(op.infer((shape,))[0])
        found["MaxPool"].append(made("MaxPool", x, **a))
        found["MeanPool"].append(made("MeanPool", x, **a))
        found["MeanPoolGrad"].append(made("MeanPoolGrad", dy, size=shape[2:], **a))
        op.kernel(_Shard, y, tied)
        found["MaxPoolGrad"].append(made("MaxPoolGrad", dy, tied, y, **a))
    return found


def norms():
    """Examples of norms within rows, by name."""
    found = {}
    shapes = [(5, 4), (7,), (2, 3, 5), (3, 1)]
    for name, others in (("LayerNorm", 2), ("RmsNorm", 1)):
        found[name] = [
            made(name, floats(*s), *(floats(s[-1], seed=i) for i in range(others)), epsilon=0.1)
            for s in shapes]  # fmt: skip
        found[f"{name}Grad"] = [
            made(f"{name}Grad", floats(*s, seed=1), floats(*s), floats(s[-1]), epsilon=0.1)
            for s in shapes]  # fmt: skip
    grouped = [((2, 6, 1, 3), 2), ((4, 6), 3), ((2, 3, 4), 1), ((2, 4, 3), 4)]
    found["GroupNorm"] = [
        made("GroupNorm", floats(*s), floats(s[1]), floats(s[1], seed=1), width=w, epsilon=0.1)
        for s, w in grouped]  # fmt: skip
    found["GroupNormGrad"] = [
        made("GroupNormGrad", floats(*s, seed=1), floats(*s), floats(s[1]), width=w, epsilon=0.1)
        for s, w in grouped]  # fmt: skip
    return found


def batch_norms():
    """Examples of batch norm's ops, by name."""
    names = ("BatchSums", "BatchNorm", "BatchNormSlopes", "BatchNormGrad", "SlopeTotals",
             "RunningMoments")  # fmt: skip
    found = {name: [] for name in names}
    for shape, rows in [((6, 2, 3), 2), ((5, 3, 2, 2), 5), ((6, 4), 3)]:
        c, n = shape[1], rows * int(np.prod(shape[2:]))
        x, dy, scale, shift = (floats(*shape), floats(*shape, seed=1), floats(c),
                               floats(c, seed=1))  # fmt: skip
        sums = batch_sums(x, rows)
        slopes = floats(len(sums), c, 2)
        a = dict(rows=rows, count=n, epsilon=0.1)
        found["BatchSums"].append(made("BatchSums", x, rows=rows, batch=shape[0]))
        found["BatchNorm"].append(made("BatchNorm", x, sums, scale, shift, **a))
        found["BatchNormSlopes"].append(made("BatchNormSlopes", dy, x, sums, **a))
        found["BatchNormGrad"].append(made("BatchNormGrad", dy, x, sums, slopes, scale, **a))
        found["SlopeTotals"].append(made("SlopeTotals", slopes, dtype="float32"))
        found["RunningMoments"].append(
            made("RunningMoments", shift, scale**2, sums, count=n, momentum=0.1))  # fmt: skip
    return found


def batch_sums(x, rows):
    """Sums and sums of squares (groups, c, 2), by the definition."""
    groups = x.reshape(-1, rows, x.shape[1], int(np.prod(x.shape[2:])))
    return np.stack([groups.sum((1, 3)), (groups**2).sum((1, 3))], -1)


class _Shard:
    xp = np


EXAMPLES = convolutions() | poolings() | norms() | batch_norms()
NO_GRADIENT = {
    "BatchNormGrad", "BatchNormSlopes", "BatchSums", "GroupNormGrad", "LayerNormGrad",
    "MaxPoolGrad", "RmsNormGrad", "RunningMoments", "SlopeTotals",
}  # fmt: skip
JOINT_GRADIENT = {"BatchNorm"}
"""The gradient of its x is also that of another input made from x."""

_CONV = settings(2, padding=(1, 1))
_DEPTHWISE = settings(2, padding=(1, 1), groups=8)
_POOL = dict(window=(2, 2), stride=(2, 2), padding=((0, 0), (0, 0)))
_BATCH = dict(rows=50, count=5_000, epsilon=0.1)
_X, _SUMS = (100, 8, 10, 10), (2, 8, 2)
LARGE_EXAMPLES = {
    "Conv": [
        (_CONV, [_X, (8, 8, 3, 3)]),
        (settings(2), [_X, (8, 8, 1, 1)]),
        (_DEPTHWISE, [_X, (8, 1, 3, 3)]),
    ],
    "ConvInputGrad": [
        (_CONV | {"size": (10, 10)}, [_X, (8, 8, 3, 3)]),
        (_DEPTHWISE | {"size": (10, 10)}, [_X, (8, 1, 3, 3)]),
    ],
    "ConvWeightGrad": [
        (_CONV | {"size": (3, 3)}, [_X, _X]),
        (_DEPTHWISE | {"size": (3, 3)}, [_X, _X]),
    ],
    "MaxPoolGrad": [
        (_POOL, [(100, 8, 10, 10), (100, 8, 20, 20), (100, 8, 10, 10)]),
        (_POOL | {"window": (3, 3)}, [(100, 8, 9, 9), (100, 8, 20, 20), (100, 8, 9, 9)]),
    ],
    "BatchSums": [({"rows": 50, "batch": 100}, [_X])],
    "BatchNorm": [(_BATCH, [_X, _SUMS, (8,), (8,)])],
    "BatchNormSlopes": [(_BATCH, [_X, _X, _SUMS])],
    "BatchNormGrad": [(_BATCH, [_X, _X, _SUMS, _SUMS, (8,)])],
    "RunningMoments": [({"count": 9, "momentum": 0.1}, [(60_000,), (60_000,), (1, 60_000, 2)])],
    "LayerNorm": [({"epsilon": 0.1}, [(500, 200), (200,), (200,)])],
    "LayerNormGrad": [({"epsilon": 0.1}, [(500, 200), (500, 200), (200,)])],
    "RmsNorm": [({"epsilon": 0.1}, [(500, 200), (200,)])],
    "RmsNormGrad": [({"epsilon": 0.1}, [(500, 200), (500, 200), (200,)])],
    "GroupNorm": [({"epsilon": 0.1, "width": 2}, [_X, (8,), (8,)])],
    "GroupNormGrad": [({"epsilon": 0.1, "width": 2}, [_X, _X, (8,)])],
}
"""(attributes, shapes) large enough to show what a kernel allocates."""
