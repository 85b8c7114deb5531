"""Example inputs for the ops of optimizers; see op_examples.py."""

import numpy as np

from mpiflow.graph.op import REGISTRY


def made(name, *arrays, **attributes):
    return REGISTRY[name](**attributes), arrays


def array(*shape, seed=0, low=-1.0, high=1.0, dtype="float64"):
    return np.random.default_rng(seed).uniform(low, high, shape).astype(dtype)


def step(count):
    return np.asarray(count, np.int64)


def scalar(value, dtype="float64"):
    return np.asarray(value, dtype)


def update(name, scalars, kept, *, shape=(5, 3), dtype="float64", **attributes):
    """An update of a weight of this shape with so many scalars and arrays kept."""
    arrays = [array(*shape, seed=i, dtype=dtype) for i in (1, 2)]
    arrays += [scalar(0.1 + i, dtype) for i in range(scalars)]
    arrays += [array(*shape, seed=3 + i, low=0.1, dtype=dtype) for i in range(kept)]
    return made(name, *arrays, **attributes)


def several(name, scalars, kept, shapes, **attributes):
    """One update of weights of these shapes: all weights, gradients, the scalars, what is kept."""
    arrays = [array(*shape, seed=i) for i in (1, 2) for shape in shapes]
    arrays += [scalar(0.1 + i) for i in range(scalars)]
    arrays += [array(*shape, seed=3 + i, low=0.1) for i in range(kept) for shape in shapes]
    return made(name, *arrays, members=len(shapes), **attributes)


def not_finite(*shape):
    flat = array(*shape, dtype="float32").reshape(-1).copy()
    flat[[0, 2, -1]] = np.inf, np.inf, -np.inf
    return flat.reshape(shape)


def schedule(name, *steps, **attributes):
    return [made(name, step(count), **attributes) for count in steps]


EXAMPLES = {
    "SgdUpdate": [
        update("SgdUpdate", 1, 0), update("SgdUpdate", 1, 0, weight_decay=0.2, shape=()),
        update("SgdUpdate", 2, 0, clipped=True, shape=(7,)),
        update("SgdUpdate", 1, 1, momentum=0.9, dtype="float32"),
        update("SgdUpdate", 2, 2, momentum=0.9, weight_decay=0.01, nesterov=True, clipped=True,
               ema=0.9),
        several("SgdUpdate", 1, 0, [(5,), (3,)]),
        several("SgdUpdate", 2, 2, [(7,), (), (5, 3)], momentum=0.9, clipped=True, ema=0.9)],
    "LarsUpdate": [update("LarsUpdate", 1, 1), update("LarsUpdate", 2, 2, momentum=0.5, ema=0.9,
                                                      weight_decay=0.1, clipped=True)],
    "AdagradUpdate": [update("AdagradUpdate", 1, 1, shape=(7,)),
                      update("AdagradUpdate", 2, 2, weight_decay=0.1, clipped=True, ema=0.9)],
    "AdamUpdate": [update("AdamUpdate", 3, 2), update("AdamUpdate", 3, 2, weight_decay=0.1),
                   update("AdamUpdate", 3, 2, shape=(), dtype="float32"),
                   update("AdamUpdate", 4, 3, weight_decay=0.1, decoupled=True, clipped=True,
                          ema=0.9, shape=(2, 5, 3)),
                   several("AdamUpdate", 3, 2, [(5,), (2, 3)], weight_decay=0.1)],
    "AdamSquares": [update("AdamSquares", 2, 2), update("AdamSquares", 2, 2, dtype="float32"),
                    update("AdamSquares", 3, 2, weight_decay=0.1, decoupled=True, clipped=True,
                           shape=(7,))],
    "SumOfSquares": [made("SumOfSquares", array(*s)) for s in ((5, 3), (), (7,), (2, 5, 3))]
                    + [made("SumOfSquares", array(5, 3, dtype="float32"))],
    "SumScalars": [made("SumScalars", *map(scalar, v)) for v in ((1.5,), (1.5, 2.0, -0.5))],
    "ClipFactor": [made("ClipFactor", scalar(v), limit=1.0) for v in (0.0, 0.25, 4.0)],
    "TrustRatio": [made("TrustRatio", *map(scalar, v), dtype=d)
                   for v in ((0.1, 4.0, 9.0), (0.1, 0.0, 9.0), (0.1, 4.0, 0.0))
                   for d in ("float32", "float64")]
                  + [made("TrustRatio", *map(scalar, (0.1, 4.0, 9.0)), trust=0.001, decay=0.1)],
    "CountNonFinite": [made("CountNonFinite", not_finite(*shape)) for shape in ((5, 3), (7,))],
    "NextLossScale": [made("NextLossScale", *map(scalar, v), interval=3, most=64.0)
                      for v in ((0.0, 8.0, 1.0), (0.0, 64.0, 2.0), (2.0, 8.0, 2.0))],
    "BiasCorrection": schedule("BiasCorrection", 0, 9, beta=0.9),
    "Constant": schedule("Constant", 0, 3, lr=0.1) + schedule("Constant", 0, 9, lr=0.1, warmup=5),
    "StepDecay": schedule("StepDecay", 2, 3, 7, lr=0.1, every=3, factor=0.5, warmup=2),
    "Cosine": schedule("Cosine", 0, 4, 20, lr=0.1, steps=10, end=0.01, warmup=3),
    "LinearDecay": schedule("LinearDecay", 0, 4, 20, lr=0.1, steps=10, end=0.01, warmup=3),
    "Polynomial": schedule("Polynomial", 0, 4, 20, lr=0.1, steps=10, end=0.01, power=1.5),
    "InverseSqrt": schedule("InverseSqrt", 0, 4, 20, lr=0.1, warmup=4),
}  # fmt: skip

NO_GRADIENT = set(EXAMPLES)

# Larger inputs, on which kernels are seen to allocate nothing: (attributes, shapes).
LARGE = (300, 400)
LARGE_EXAMPLES = {
    "SgdUpdate": [({"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "clipped": True},
                   [LARGE, LARGE, (), (), LARGE])],
    "LarsUpdate": [({"weight_decay": 0.1}, [LARGE, LARGE, (), LARGE])],
    "AdagradUpdate": [({"weight_decay": 0.1}, [LARGE, LARGE, (), LARGE])],
    "AdamUpdate": [({"decoupled": True, "weight_decay": 0.1, "ema": 0.9},
                    [LARGE, LARGE, (), (), (), LARGE, LARGE, LARGE])],
    "AdamSquares": [({"clipped": True}, [LARGE, LARGE, (), (), (), LARGE, LARGE])],
    "SumOfSquares": [({}, [LARGE])],
    "CountNonFinite": [({}, [LARGE])],
}  # fmt: skip
