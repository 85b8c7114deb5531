"""Activations, softmax, attention, embedding and losses against PyTorch, in float64."""

import numpy as np
import pytest

from mpiflow import ops

torch = pytest.importorskip("torch")
from compare import check  # noqa: E402  (it needs PyTorch)

functional = torch.nn.functional
SHAPES = [(5, 4), (7,), (), (2, 3, 6), (300, 70)]


def draw(*shape, seed=0, scale=3.0):
    return np.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape) * scale)


def whole(*shape, high, seed=0):
    return np.asarray(np.random.default_rng([seed, *shape]).integers(0, high, shape))


def mask(*shape, seed=0):
    return np.asarray(np.random.default_rng([seed, *shape]).random(shape) < 0.6)


UNARY = {
    "absolute": (ops.absolute, torch.abs),
    "clip": (lambda x: ops.clip(x, -1.0, 2.0), lambda x: torch.clamp(x, -1.0, 2.0)),
    "gelu": (ops.gelu, functional.gelu),
    "gelu_tanh": (
        lambda x: ops.gelu(x, approximate=True),
        lambda x: functional.gelu(x, approximate="tanh"),
    ),
    "power": (lambda x: ops.power(x, 3), lambda x: x**3),
    "sigmoid": (ops.sigmoid, torch.sigmoid),
    "silu": (ops.silu, functional.silu),
    "softplus": (ops.softplus, functional.softplus),
    "tanh": (ops.tanh, torch.tanh),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", sorted(UNARY))
def test_activations(name, shape):
    check(*UNARY[name], (draw(*shape),))


@pytest.mark.parametrize("name", sorted(UNARY))
def test_activations_far_from_zero(name):
    x = np.array([-700.0, -50.0, -9.0, -6.5, -1e-9, 0.0, 1e-9, 6.5, 9.0, 50.0, 700.0])
    check(*UNARY[name], (x,), 1e-9)


@pytest.mark.parametrize("shapes", [((5, 4), (5, 4)), ((5, 4), (4,)), ((4, 1), (1, 5))], ids=str)
def test_the_larger_and_the_smaller(shapes):
    x, y = draw(*shapes[0]), draw(*shapes[1], seed=1)
    x.reshape(-1)[0] = y.reshape(-1)[0]  # a tie
    check(ops.maximum, torch.maximum, (x, y))
    check(ops.minimum, torch.minimum, (x, y))


def test_where():
    arrays = (mask(3, 1, 4), draw(3, 5, 4), draw(3, 5, 4, seed=1))
    check(ops.where, torch.where, arrays)
    numbers = (mask(3, 1, 4), draw(3, 5, 4))
    check(lambda c, x: ops.where(c, x, -2.0), lambda c, x: torch.where(c, x, -2.0), numbers)


@pytest.mark.parametrize("shape", [(5, 4), (7,), (2, 3, 6), (3, 40_000)], ids=str)
def test_softmax_and_its_logarithm(shape):
    x = draw(*shape)
    check(ops.softmax, lambda x: torch.softmax(x, -1), (x,))
    check(ops.log_softmax, lambda x: torch.log_softmax(x, -1), (x + 300,))
    check(ops.normalise, lambda x: functional.normalize(x, dim=-1), (x,))


def qkv(n, k, group, queries, keys, d):
    return (
        draw(n, k, group * queries, d, scale=1), draw(n, k, keys, d, seed=1, scale=1),
        draw(n, k, keys, d, seed=2, scale=1),
    )  # fmt: skip


def test_attention_with_a_mask_of_keys():
    q, k, v = qkv(3, 2, 1, 5, 6, 4)
    allowed = mask(3, 1, 1, 6)
    allowed[..., 0] = True
    check(
        lambda q, k, v, m: ops.attention(q, k, v, mask=m),
        lambda q, k, v, m: functional.scaled_dot_product_attention(q, k, v, attn_mask=m),
        (q, k, v, allowed),
    )


@pytest.mark.parametrize("group", [1, 3])
def test_causal_attention_of_grouped_heads(group):
    n, heads, t, d = 2, 2, 6, 4

    def theirs(q, k, v):
        y = functional.scaled_dot_product_attention(
            q.reshape(n, heads * group, t, d), k, v, is_causal=True, enable_gqa=True
        )
        return y.reshape(n, heads, group * t, d)

    check(
        lambda q, k, v: ops.attention(q, k, v, causal=True, group=group),
        theirs,
        qkv(n, heads, group, t, t, d),
    )


def test_a_query_without_keys_attends_to_nothing():
    q, k, v = qkv(2, 1, 1, 3, 3, 4)
    allowed = np.ones((2, 1, 1, 3), bool)
    allowed[1] = False

    def theirs(q, k, v, m):
        y = functional.scaled_dot_product_attention(q[:1], k[:1], v[:1])
        return torch.cat([y, 0 * (q[1:] + k[1:] + v[1:])])

    check(lambda q, k, v, m: ops.attention(q, k, v, mask=m), theirs, (q, k, v, allowed))


def test_rotary_positions_are_complex_rotations():
    n, t, d = 2, 7, 6

    def theirs(x):
        angle = torch.outer(
            torch.arange(t, dtype=torch.float64),
            100.0 ** (-torch.arange(d // 2, dtype=torch.float64) * 2 / d),
        )
        turned = torch.complex(*x.split(d // 2, -1)) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([turned.real, turned.imag], -1)

    check(lambda x: ops.rotary(x, base=100.0), theirs, (draw(n, t, d),))


@pytest.mark.parametrize(
    ("rows", "shape", "width"), [(7, (5,), 3), (11, (4, 6), 5), (3, (9000,), 70)]
)
def test_embedding(rows, shape, width):
    ids = whole(*shape, high=rows)
    check(ops.embedding, lambda table, ids: functional.embedding(ids, table),
          (draw(rows, width), ids))  # fmt: skip


@pytest.mark.parametrize("shape", [(3, 5), (2, 7, 4), (4, 3, 2, 5), (2, 3000, 70)], ids=str)
def test_gather(shape):
    index = whole(shape[0], 4, high=shape[1])

    def theirs(x, index):
        return x[torch.arange(shape[0])[:, None], index]

    check(ops.gather, theirs, (draw(*shape), index))


def test_joining_and_parting():
    a, b = draw(3, 2, 4), draw(3, 5, 4)
    check(lambda a, b: ops.concat((a, b), 1), lambda a, b: torch.cat((a, b), 1), (a, b))
    check(lambda a, b: ops.stack((a, b), 1), lambda a, b: torch.stack((a, b), 1), (a, a + 1))
    check(lambda b: ops.split(b, (1, 3, 1), 1)[1] * 2, lambda b: b[:, 1:4] * 2, (b,))
    check(lambda b: ops.unstack(b, 1)[3], lambda b: b[:, 3], (b,))
    check(lambda b: ops.cut(b, 2, 4, 1), lambda b: b[:, 2:4], (b,))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignore", [None, 2])
def test_cross_entropy(smoothing, ignore):
    x, label = draw(6, 5), whole(6, high=5)
    label[:2] = 2, 3
    settings = {} if ignore is None else {"ignore_index": ignore}

    def theirs(reduction):
        return lambda x, label: functional.cross_entropy(
            x, label, label_smoothing=smoothing, reduction=reduction, **settings
        )

    more = {"smoothing": smoothing, "ignore": ignore}
    check(lambda x, y: ops.cross_entropy(x, y, **more), theirs("none"), (x, label))
    check(lambda x, y: ops.mean_cross_entropy(x, y, **more), theirs("mean"), (x, label))


def test_cross_entropy_with_sample_weights():
    x, label, weight = draw(6, 5), whole(6, high=5), abs(draw(6, seed=3))

    def theirs(x, label):
        rows = functional.cross_entropy(x, label, reduction="none")
        return (rows * torch.tensor(weight)).sum() / weight.sum()

    def ours(x, label):
        w = ops.stack([ops.fill((), float(v), "float64") for v in weight])
        return ops.mean_cross_entropy(x, label, weight=w)

    check(ours, theirs, (x, label))


def test_a_batch_in_which_no_row_counts_has_the_loss_zero():
    def theirs(x, label):
        return 0 * x.sum()

    def ours(x, label):
        return ops.mean_cross_entropy(x, label, ignore=-100)

    check(ours, theirs, (draw(4, 3), np.full(4, -100)))


REGRESSION = {
    "mse": (ops.mse, functional.mse_loss),
    "l1": (ops.l1, functional.l1_loss),
    "huber": (
        lambda x, y: ops.huber(x, y, delta=1.5),
        lambda x, y: functional.huber_loss(x, y, delta=1.5),
    ),
    "binary": (
        lambda x, y: ops.binary_cross_entropy(x, ops.sigmoid(y)),
        lambda x, y: functional.binary_cross_entropy_with_logits(x, torch.sigmoid(y)),
    ),
}


@pytest.mark.parametrize("shape", [(6,), (6, 5), (3, 2, 4)], ids=str)
@pytest.mark.parametrize("name", sorted(REGRESSION))
def test_losses_between_tensors(name, shape):
    ours, theirs = REGRESSION[name]
    check(lambda x, y: ops.mean(ours(x, y)), theirs, (draw(*shape), draw(*shape, seed=1)))


def test_margins_of_face_recognition():
    cosines, label = np.tanh(draw(40, 7)) * 0.999, whole(40, high=7)
    cosines[0, label[0]] = -0.97  # angle plus margin beyond pi

    def arc(x, label):
        angle = torch.acos(x) + 0.5
        target = torch.where(angle < np.pi, torch.cos(angle), x - 0.5 * np.sin(np.pi - 0.5))
        hot = functional.one_hot(label, 7)
        return 30 * torch.where(hot.bool(), target, x)

    def cos(x, label):
        return 30 * (x - 0.35 * functional.one_hot(label, 7).double())

    check(lambda x, y: ops.arc_margin(x, y, scale_by=30.0), arc, (cosines, label), 1e-8)
    check(lambda x, y: ops.cos_margin(x, y, scale_by=30.0), cos, (cosines, label))
