"""Example inputs for the ops of transformers and recurrent networks; see op_examples.py."""

import numpy as np

from mpiflow.graph.op import REGISTRY


def f(*shape, low=-2.0, high=2.0):
    """Numbers away from 0, where some functions bend."""
    draw = np.random.default_rng(sum(shape) + 7)
    x = draw.uniform(low, high, shape)
    return np.asarray(np.where(abs(x) < 0.1, 0.5, x))


def g(*shape):
    """Other numbers of the same shape, such as a gradient."""
    return np.asarray(np.random.default_rng(sum(shape) + 70).uniform(0.2, 2.5, shape))


def ids(*shape, rows, seed=1):
    """Row numbers, the first and the last row among them, with repetitions."""
    flat = np.random.default_rng(seed).integers(0, rows, shape).reshape(-1)
    flat[:1], flat[-1:] = 0, rows - 1
    return flat.reshape(shape)


def b(*shape, seed=2):
    return np.asarray(np.random.default_rng(seed).integers(0, 2, shape).astype(bool))


def made(name, *arrays, **attributes):
    return REGISTRY[name](**attributes), arrays


UNARY = [f(5, 4), f(), f(7), f(2, 1, 3)]
PAIRS = [(f(5, 4), g(5, 4)), (f(5, 4), f(5, 4)), (f(5, 4), g(4)), (f(3, 5, 2), g(5, 1)),
         (f(4, 1), g(1, 5)), (f(), g()), (f(2, 3), g())]  # fmt: skip
ROWS = [f(5, 4), f(7), f(2, 3, 5), f(3, 1)]
FUNCTIONS = ("Absolute", "Gelu", "GeluTanh", "Sigmoid", "Silu", "Softplus", "Tanh")
COMPARISONS = ("greater", "greater_equal", "less", "less_equal", "not_equal")
KEY = (3, 4)
STEP = np.array(5)


def compare():
    pairs = zip((PAIRS[1], *PAIRS[1:]), (*COMPARISONS, *COMPARISONS), strict=False)
    return [made("Compare", *pair, by=by) for pair, by in pairs]


def heads():
    split, merge = [], []
    for parts, k in (((1,), 3), ((2,), 2), ((2, 1, 1), 2), ((1, 1, 1), 1)):
        width = k * sum(parts) * 2
        split.append(made("SplitHeads", f(2, 3, width), groups_of_heads=k, parts=parts))
        merge.append(made("MergeHeads", *(f(2, k, p * 3, 2) for p in parts), groups_of_heads=k,
                          parts=parts))  # fmt: skip
    return {"SplitHeads": split, "MergeHeads": merge}


EXAMPLES = {
    **{name: [made(name, a) for a in UNARY] for name in FUNCTIONS},
    **{f"{name}Grad": [made(f"{name}Grad", g(*a.shape), a) for a in UNARY] for name in FUNCTIONS},
    "Power": [made("Power", np.asarray(abs(a)), exponent=-1.5) for a in UNARY]
             + [made("Power", f(5), exponent=3.0)],
    "PowerGrad": [made("PowerGrad", g(5, 4), g(5, 4), exponent=-1.5)],
    "Compare": compare(),
    "Logical": [made("Logical", b(5, 4), b(5, 4, seed=3), by=by)
                for by in ("logical_and", "logical_or")]
               + [made("Logical", b(5, 4), b(4), by="logical_or"),
                  made("Logical", b(3, 1, 4), b(3, 2, 1), by="logical_and")],
    "LogicalNot": [made("LogicalNot", b(5, 4)), made("LogicalNot", b())],
    "Where": [made("Where", b(5, 4), f(5, 4), g(5, 4)), made("Where", b(5, 4), f(5, 4), g()),
              made("Where", b(5, 1), f(5, 4), g(1, 4)), made("Where", b(2, 1, 4), f(), g(2, 3, 4)),
              made("Where", b(7), ids(7, rows=9), ids(7, rows=9, seed=4)),
              made("Where", b(4), b(4, seed=5), b(4, seed=6))],
    "Keep": [made("Keep", f(5, 4), b(5, 4), holds=h) for h in (True, False)]
            + [made("Keep", f(4), b(5, 4)), made("Keep", f(5, 4), b(5, 1)),
               made("Keep", ids(5, rows=9), b(5)), made("Keep", f(), b(3))],
    "Maximum": [made("Maximum", *a) for a in [*PAIRS, (ids(5, rows=9), ids(5, rows=9, seed=3))]],
    "Minimum": [made("Minimum", *a) for a in [*PAIRS, (ids(5, rows=9), ids(5, rows=9, seed=3))]],
    "LargerGrad": [made("LargerGrad", g(5, 4), f(5, 4), f(5, 4)[::-1].copy()),
                   made("LargerGrad", g(5, 4), f(5, 4), f(5, 4)),
                   made("LargerGrad", g(5, 4), f(4), g(5, 4))],
    "Clip": [made("Clip", f(5, 4), low=-0.7, high=0.9), made("Clip", f(7), low=0.25),
             made("Clip", f(), high=0.1), made("Clip", ids(7, rows=9), low=2, high=5)],
    "ClipGrad": [made("ClipGrad", g(5, 4), f(5, 4), low=-0.7, high=0.9),
                 made("ClipGrad", g(7), f(7), low=0.25), made("ClipGrad", g(), f(), high=0.1)],
    "EntropySums": [made("EntropySums", f(5, 4), g(5), ids(5, rows=4)),
                    made("EntropySums", f(2, 3, 7), g(2, 3), ids(2, 3, rows=7).astype("uint8"),
                         label_share=0.9, even_share=0.1 / 7),
                    made("EntropySums", f(6), g(), ids(rows=6), even_share=0.25),
                    made("EntropySums", f(3, 5), g(3), ids(3, rows=5), label_share=0.5)],
    "EntropySumsGrad": [made("EntropySumsGrad", f(5), g(5), g(5, 4), ids(5, rows=4)),
                        made("EntropySumsGrad", f(2, 3), g(2, 3), g(2, 3, 7),
                             ids(2, 3, rows=7).astype("uint8"), label_share=0.9,
                             even_share=0.1 / 7),
                        made("EntropySumsGrad", f(), g(), g(6), ids(rows=6))],
    **{name: [made(name, a) for a in ROWS] for name in ("LogSoftmax", "Normalise", "Softmax")},
    **{f"{name}Grad": [made(f"{name}Grad", g(*a.shape), a) for a in ROWS]
       for name in ("LogSoftmax", "Normalise", "Softmax")},
    "MaskedSoftmax": [
        made("MaskedSoftmax", f(2, 3, 5, 4)), made("MaskedSoftmax", f(5, 4), b(5, 4)),
        made("MaskedSoftmax", f(2, 3, 5, 4), b(2, 1, 1, 4)),
        made("MaskedSoftmax", f(2, 3, 5, 5), b(2, 1, 1, 5), causal=True),
        made("MaskedSoftmax", f(5, 5), causal=True),
        made("MaskedSoftmax", f(2, 6, 3), b(2, 1, 3), causal=True, group=2),
        made("MaskedSoftmax", f(2, 3, 6, 5), np.zeros((2, 1, 1, 5), bool), group=3)],
    "Dropout": [made("Dropout", f(*s), STEP, rate=0.3, key=KEY, shape=s)
                for s in ((5, 4), (), (7,), (2, 2, 19), (3, 1))],
    "Embedding": [made("Embedding", f(7, 3), ids(5, rows=7)),
                  made("Embedding", f(7, 3), ids(2, 4, rows=7).astype("uint8")),
                  made("Embedding", f(4, 1), ids(rows=4)),
                  made("Embedding", f(1, 3), ids(5, rows=1).astype("int32"))],
    "EmbeddingGrad": [made("EmbeddingGrad", g(5, 3), ids(5, rows=7), rows=7),
                      made("EmbeddingGrad", g(2, 4, 3), ids(2, 4, rows=3).astype("uint8"), rows=3),
                      made("EmbeddingGrad", g(3), ids(rows=4), rows=4)],
    "OneHot": [made("OneHot", ids(5, rows=4), classes=4),
               made("OneHot", ids(2, 3, rows=5).astype("uint8"), classes=5, dtype="float64"),
               made("OneHot", ids(rows=3), classes=3, dtype="bool")],
    "AddAt": [made("AddAt", f(5, 4), g(5), ids(5, rows=4)),
              made("AddAt", f(2, 3, 7), g(2, 3), ids(2, 3, rows=7).astype("uint8")),
              made("AddAt", f(6), g(), ids(rows=6))],
    "Gather": [made("Gather", f(3, 5, 2), ids(3, 4, rows=5)),
               made("Gather", f(2, 7), ids(2, 3, rows=7).astype("uint16")),
               made("Gather", f(5, 1, 2, 3), ids(5, 2, rows=1).astype("int32")),
               made("Gather", ids(3, 6, rows=9), ids(3, 2, rows=6))],
    "GatherGrad": [made("GatherGrad", g(3, 4, 2), ids(3, 4, rows=5), places=5),
                   made("GatherGrad", g(2, 3), ids(2, 3, rows=7).astype("uint16"), places=7),
                   made("GatherGrad", g(5, 2, 2, 3), ids(5, 2, rows=1), places=1)],
    "Concat": [made("Concat", f(5, 2), g(5, 3), dim=1), made("Concat", f(2, 3), g(4, 3), dim=0),
               made("Concat", f(5, 2), dim=1), made("Concat", f(2, 1, 3), f(2, 4, 3), g(2, 2, 3),
                                                     dim=1),
               made("Concat", ids(5, rows=9), ids(3, rows=9), dim=0)],
    "Split": [made("Split", f(5, 6), dim=1, parts=(2, 1, 3)), made("Split", f(6), dim=0,
                                                                   parts=(3, 3)),
              made("Split", f(5, 2), dim=1, parts=(2,)), made("Split", b(5, 2), dim=1,
                                                              parts=(1, 1))],
    "Cut": [made("Cut", f(5, 6), dim=1, start=1, stop=4), made("Cut", f(6), dim=0, start=0, stop=2),
            made("Cut", ids(2, 6, rows=9), dim=1, start=5, stop=6)],
    "Pad": [made("Pad", f(5, 3), dim=1, start=1, size=6), made("Pad", f(2), dim=0, start=0, size=2),
            made("Pad", ids(2, 3, rows=9), dim=1, start=2, size=5)],
    "Stack": [made("Stack", f(5, 3), g(5, 3), dim=0), made("Stack", f(5), g(5), f(5), dim=1),
              made("Stack", f(), g(), dim=0), made("Stack", f(2, 3), dim=1)],
    "Unstack": [made("Unstack", f(5, 3), dim=1, count=3), made("Unstack", f(2, 5), dim=0, count=2),
                made("Unstack", f(2, 1), dim=1, count=1)],
    **heads(),
    "Rotary": [made("Rotary", f(2, 3, 5, 4)), made("Rotary", f(7, 6), base=100.0, inverse=True),
               made("Rotary", f(2, 6, 4), positions=3), made("Rotary", f(3, 2), positions=1)],
}  # fmt: skip

NO_GRADIENT = {
    "AbsoluteGrad", "ClipGrad", "Compare", "EmbeddingGrad", "EntropySumsGrad", "GeluGrad",
    "GeluTanhGrad", "LargerGrad", "LogSoftmaxGrad", "Logical", "LogicalNot", "NormaliseGrad",
    "OneHot", "PowerGrad", "SigmoidGrad", "SiluGrad", "SoftmaxGrad", "SoftplusGrad", "TanhGrad",
}  # fmt: skip

LARGE_EXAMPLES = {
    "MaskedSoftmax": [({}, [(500, 4, 30)]), ({"causal": True}, [(60, 40, 40)])],
    "Pad": [({"dim": 1, "start": 1, "size": 5}, [(60_000, 3)])],
    "Rotary": [({}, [(4, 1000, 16)]), ({"positions": 500}, [(4, 1000, 16)])],
    "Split": [({"dim": 1, "parts": (2, 1, 3)}, [(60_000, 6)])],
    "Stack": [({"dim": 0}, [(60_000, 4), (60_000, 4)])],
    "Unstack": [({"dim": 1, "count": 3}, [(60_000, 3)])],
}
"""(attributes, shapes) of ops whose examples cannot simply be given more rows."""
