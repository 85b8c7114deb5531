"""Whole small models against PyTorch with the same weights, in float64: loss and every gradient."""

import numpy as np
import pytest
from op_harness import evaluate

import mpiflow as mf
from mpiflow.graph.grad import gradients
from mpiflow.graph.graph import building
from mpiflow.models.bert import BERT
from mpiflow.models.count import traced
from mpiflow.models.faces import Faces
from mpiflow.models.field import Field
from mpiflow.models.gpt import GPT
from mpiflow.models.images import classifier
from mpiflow.models.resnet import ResNet
from mpiflow.models.widedeep import WideDeep

torch = pytest.importorskip("torch")
F = torch.nn.functional
N, T, WORDS = 4, 7, 23


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def integers(high, *shape, seed=0):
    return np.random.default_rng([seed, high, *shape]).integers(0, high, shape)


def check(model, theirs, **arrays):
    """`model`, which gives a loss, and `theirs` of (weights by name, arrays) agree to 1e-8."""
    fields = {name: (a.shape[1:], a.dtype.name) for name, a in arrays.items()}
    losses = []
    graph = traced(lambda batch: losses.append(model(batch)), fields, rows=N)
    trained = {name: v.tensor for name, v in graph.variables.items() if v.trainable}
    with building(graph):
        found = gradients(graph, losses[0], list(trained.values()))
    values = {}
    for i, (name, v) in enumerate(graph.variables.items()):
        values[name] = draw(*v.tensor.shape, seed=i) / np.sqrt(v.tensor.shape[-1])
        if name.endswith((".scale", ".running_variance")):
            values[name] = 1 + 0.1 * values[name]
        assert v.tensor.dtype == "float64"
    feeds = {graph.inputs[name]: array for name, array in arrays.items()}
    feeds |= {v.tensor: values[name] for name, v in graph.variables.items()}
    loss, *ours = evaluate(graph, [losses[0], *found], feeds)

    weights = {name: torch.tensor(values[name], requires_grad=name in trained) for name in values}
    given = {name: torch.tensor(a.astype(np.int64) if a.dtype.kind == "u" else a)
             for name, a in arrays.items()}  # fmt: skip
    expected = theirs(weights, **given)
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=1e-8)
    for name, gradient in zip(trained, ours, strict=True):
        wanted = weights[name].grad.numpy()
        scale = max(np.abs(wanted).max(), 1e-3)
        np.testing.assert_allclose(gradient, wanted, rtol=0, atol=1e-8 * scale, err_msg=name)


def linear(w, name, x):
    y = x @ w[f"{name}.weight"]
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def turned(x, base):
    """Rotary positions as Hugging Face's Llama has them."""
    t, d = x.shape[-2:]
    angle = torch.arange(t)[:, None] * base ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = torch.cat([angle, angle], -1)
    half = torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1)
    return x * angle.cos() + half * angle.sin()


def attention(w, name, x, heads, kv_heads, *, base=None, mask=None, causal=False):
    n, t, width = x.shape
    group, d = heads // kv_heads, width // heads
    columns = linear(w, f"{name}.qkv", x).reshape(n, t, kv_heads, group + 2, d)
    q = columns[:, :, :, :group].reshape(n, t, heads, d).transpose(1, 2)
    k, v = (columns[:, :, :, group + i].transpose(1, 2) for i in (0, 1))
    if base:
        q, k = turned(q, base), turned(k, base)
    k, v = (a.repeat_interleave(group, 1) for a in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    return linear(w, f"{name}.out", y.transpose(1, 2).reshape(n, t, width))


def layer_norm(w, name, x, epsilon=1e-5):
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.scale"], w[f"{name}.shift"], epsilon)


def test_gpt2():
    decoder = GPT(2, 12, 3, vocabulary=WORDS, context=T, dtype="float64")

    def theirs(w, tokens):
        x = w["tokens.weight"][tokens[:, :-1]] + w["positions.weight"]
        for i in range(2):
            name = f"block{i}"
            x = x + attention(w, f"{name}.attention", layer_norm(w, f"{name}.norm1", x), 3, 3,
                              causal=True)  # fmt: skip
            y = linear(w, f"{name}.feed_forward.up", layer_norm(w, f"{name}.norm2", x))
            x = x + linear(w, f"{name}.feed_forward.down", F.gelu(y, approximate="tanh"))
        logits = layer_norm(w, "norm", x) @ w["tokens.weight"].T
        return F.cross_entropy(logits.reshape(-1, WORDS), tokens[:, 1:].reshape(-1))

    check(lambda b: decoder.loss(b["tokens"]), theirs, tokens=integers(WORDS, N, T + 1))


def test_llama():
    decoder = GPT(2, 16, 4, vocabulary=WORDS, context=T, kv_heads=2, hidden=20, rotary_base=100.0,
                  gated=True, rms=True, bias=False, tied=False, dtype="float64")  # fmt: skip

    def norm(w, name, x):
        return F.rms_norm(x, x.shape[-1:], w[f"{name}.scale"], 1e-5)

    def theirs(w, tokens):
        x = w["tokens.weight"][tokens[:, :-1]]
        for i in range(2):
            name = f"block{i}"
            x = x + attention(w, f"{name}.attention", norm(w, f"{name}.norm1", x), 4, 2,
                              base=100.0, causal=True)  # fmt: skip
            y = norm(w, f"{name}.norm2", x)
            gate = F.silu(linear(w, f"{name}.feed_forward.gate", y))
            y = gate * linear(w, f"{name}.feed_forward.up", y)
            x = x + linear(w, f"{name}.feed_forward.down", y)
        logits = norm(w, "norm", x) @ w["head.weight"].T
        return F.cross_entropy(logits.reshape(-1, WORDS), tokens[:, 1:].reshape(-1))

    check(lambda b: decoder.loss(b["tokens"]), theirs, tokens=integers(WORDS, N, T + 1))


def test_bert():
    encoder = BERT(2, 12, 3, vocabulary=WORDS, positions=T + 2, dropout=0.0, dtype="float64")

    def norm(w, name, x):
        return layer_norm(w, name, x, 1e-12)

    def theirs(w, tokens, segment, label, follows):
        x = w["words.weight"][tokens] + w["segments.weight"][segment] + w["positions.weight"][:T]
        x = norm(w, "norm", x)
        mask = (tokens != 0)[:, None, None, :]
        for i in range(2):
            name = f"block{i}"
            x = norm(w, f"{name}.norm1", x + attention(w, f"{name}.attention", x, 3, 3, mask=mask))
            y = F.gelu(linear(w, f"{name}.feed_forward.up", x))
            x = norm(w, f"{name}.norm2", x + linear(w, f"{name}.feed_forward.down", y))
        h = norm(w, "masked.norm", F.gelu(linear(w, "masked.dense", x)))
        logits = h @ w["words.weight"].T + w["masked.bias"]
        order = linear(w, "next", torch.tanh(linear(w, "pooler", x[:, 0])))
        return (F.cross_entropy(logits.reshape(-1, WORDS), label.reshape(-1), ignore_index=-1)
                + F.cross_entropy(order, follows))  # fmt: skip

    def model(batch):
        masked, order = encoder.losses(*(batch[name] for name in arrays))
        return masked + order

    tokens = integers(WORDS - 1, N, T) + 1
    tokens[1, -2:] = tokens[2, -1:] = 0
    label = np.where(integers(3, N, T) == 0, integers(WORDS, N, T, seed=1), -1)
    arrays = {"tokens": tokens, "segment": integers(2, N, T), "label": label,
              "follows": integers(2, N)}  # fmt: skip
    check(model, theirs, **arrays)


def conv_norm(w, name, norm, x, stride):
    weight = w[f"{name}.weight"]
    x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
    scale, shift = w[f"{norm}.scale"], w[f"{norm}.shift"]
    return F.batch_norm(x, None, None, scale, shift, training=True, eps=1e-5)


def resnet_features(w, x, blocks, *, small):
    x = F.relu(conv_norm(w, "conv1", "bn1", x, 1 if small else 2))
    x = x if small else F.max_pool2d(x, 3, 2, 1)
    for stage, count in enumerate(blocks):
        for i in range(count):
            name = f"layer{stage + 1}.{i}"
            stride = 2 if stage and not i else 1
            depth = 3 if f"{name}.conv3.weight" in w else 2
            y = x
            for j in range(1, depth + 1):
                step = stride if j == depth - 1 else 1
                y = conv_norm(w, f"{name}.conv{j}", f"{name}.bn{j}", y, step)
                y = F.relu(y) if j < depth else y
            if f"{name}.downsample.conv.weight" in w:
                x = conv_norm(w, f"{name}.downsample.conv", f"{name}.downsample.bn", x, stride)
            x = F.relu(x + y)
    return x.mean((2, 3))


@pytest.mark.parametrize("bottleneck", [False, True])
@pytest.mark.parametrize("small", [False, True])
def test_resnet(bottleneck, small):
    blocks = (1, 2, 1, 1)
    network = ResNet(blocks, bottleneck, classes=5, width=4, small=small)

    def theirs(w, image, label):
        features = resnet_features(w, image, blocks, small=small)
        return F.cross_entropy(linear(w, "fc", features), label)

    def model(batch):
        return mf.mean(mf.cross_entropy(network(batch["image"]), batch["label"]))

    side = 16 if small else 64
    check(model, theirs, image=draw(N, 3, side, side), label=integers(5, N))


def test_alexnet_of_small_images():
    network = classifier("alexnet", 28, 5)
    flat = type(network)(network.groups, network.pool, network.hidden, 5, dropout=0.0)

    def theirs(w, image, label):
        x = image
        for i, group in enumerate(network.groups):
            for j in range(len(group)):
                name = f"conv{i + 1}.{j}"
                x = F.relu(F.conv2d(x, w[f"{name}.weight"], w[f"{name}.bias"], padding=1))
            x = F.max_pool2d(x, 2)
        x = x.flatten(1)
        x = F.relu(linear(w, "fc2", F.relu(linear(w, "fc1", x))))
        return F.cross_entropy(linear(w, "fc3", x), label)

    def model(batch):
        return mf.mean(mf.cross_entropy(flat(batch["image"]), batch["label"]))

    check(model, theirs, image=draw(N, 1, 28, 28), label=integers(5, N))


@pytest.mark.parametrize("margin", ["arc", "cos"])
def test_faces(margin):
    blocks, by, scale = (1, 1, 1, 1), 0.3, 8.0
    faces = Faces(ResNet(blocks, width=4, small=True), 6, 10, margin, by, scale)

    def theirs(w, image, label):
        x = resnet_features(w, image, blocks, small=True) @ w["features.weight"]
        x = F.batch_norm(x, None, None, w["features_norm.scale"], w["features_norm.shift"],
                         training=True)  # fmt: skip
        cosines = F.normalize(x) @ F.normalize(w["classes.weight"]).T
        hit = F.one_hot(label, 6).bool()
        apart = torch.cos(torch.acos(cosines) + by) if margin == "arc" else cosines - by
        return F.cross_entropy(scale * torch.where(hit, apart, cosines), label)

    def model(batch):
        return faces.loss(faces.cosines(faces(batch["image"])), batch["label"])

    check(model, theirs, image=draw(N, 1, 16, 16), label=integers(6, N))


def test_field():
    network = Field(2, pools=2, width=3, hidden=(6, 5))

    def theirs(w, volume, numbers):
        x = volume
        for i in range(2):
            x = F.conv3d(x, w[f"conv{i}.weight"], w[f"conv{i}.bias"], padding=1)
            x = F.max_pool3d(F.leaky_relu(x, 0.3), 2)
        x = x.flatten(1)
        for i in range(2):
            x = F.leaky_relu(linear(w, f"dense{i}", x), 0.3)
        return F.mse_loss(linear(w, "numbers", x), numbers)

    def model(batch):
        return mf.mean(mf.mse(network(batch["volume"]), batch["numbers"]))

    check(model, theirs, volume=draw(N, 1, 8, 8, 8), numbers=draw(N, 2))


def test_wide_and_deep():
    network = WideDeep((5, 7), 3, (6, 4), dtype="float64")

    def theirs(w, id0, id1, numbers, click):
        ids = (id0, id1)
        x = torch.cat([w[f"deep_table{i}.weight"][a] for i, a in enumerate(ids)] + [numbers], 1)
        for i in range(2):
            x = F.relu(linear(w, f"deep{i}", x))
        logits = linear(w, "deep", x) + linear(w, "wide", numbers)
        logits = logits + sum(w[f"wide_table{i}.weight"][a] for i, a in enumerate(ids))
        return F.binary_cross_entropy_with_logits(logits[:, 0], click.double())

    def model(batch):
        logits = network([batch["id0"], batch["id1"]], batch["numbers"])
        return mf.mean(mf.binary_cross_entropy(logits, batch["click"]))

    check(model, theirs, id0=integers(5, N), id1=integers(7, N), numbers=draw(N, 3),
          click=integers(2, N))  # fmt: skip
