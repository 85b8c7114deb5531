"""Small models of every kind, each with its definition in PyTorch from functions of `weights`.

A case is the model's function, as a job has it, and that definition: (weights by our name, fields
of a batch by name) -> loss. It is given running statistics to move, as torch.nn.BatchNorm does.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

import mpiflow as mf
from mpiflow.models.bert import BERT
from mpiflow.models.faces import Faces
from mpiflow.models.field import Field
from mpiflow.models.gpt import GPT
from mpiflow.models.images import classifier
from mpiflow.models.resnet import ResNet
from mpiflow.models.widedeep import WideDeep

F = torch.nn.functional
T, WORDS, CLASSES = 7, 23, 5


@dataclass(frozen=True)
class Case:
    """`example` has the job whose optimizer the model is trained with; `draw(rows)` gives data."""

    example: str
    model: Callable
    theirs: Callable
    draw: Callable


def draw(*shape, seed=0):
    """Numbers that are the same in float32 and float64."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape, "float32")


def integers(high, *shape, seed=0):
    return np.random.default_rng([seed, high, *shape]).integers(0, high, shape)


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


def rms_norm(w, name, x):
    return F.rms_norm(x, x.shape[-1:], w[f"{name}.scale"], 1e-5)


def batch_norm(w, name, x):
    running = w[f"{name}.running_mean"], w[f"{name}.running_variance"]
    return F.batch_norm(x, *running, w[f"{name}.scale"], w[f"{name}.shift"], training=True)


def text(rows):
    return {"tokens": integers(WORDS, rows, T + 1)}


def gpt2(dtype):
    decoder = GPT(2, 12, 3, vocabulary=WORDS, context=T, dtype=dtype)

    def theirs(w, tokens):
        x = w["tokens.weight"][tokens[:, :-1]] + w["positions.weight"]
        for i in range(2):
            name = f"block{i}"
            y = layer_norm(w, f"{name}.norm1", x)
            x = x + attention(w, f"{name}.attention", y, 3, 3, causal=True)
            y = linear(w, f"{name}.feed_forward.up", layer_norm(w, f"{name}.norm2", x))
            x = x + linear(w, f"{name}.feed_forward.down", F.gelu(y, approximate="tanh"))
        logits = layer_norm(w, "norm", x) @ w["tokens.weight"].T
        return F.cross_entropy(logits.reshape(-1, WORDS), tokens[:, 1:].reshape(-1))

    return Case("gpt", lambda b: decoder.loss(b["tokens"]), theirs, text)


def llama(dtype):
    decoder = GPT(2, 16, 4, vocabulary=WORDS, context=T, kv_heads=2, hidden=20, rotary_base=100.0,
                  gated=True, rms=True, bias=False, tied=False, dtype=dtype)  # fmt: skip

    def theirs(w, tokens):
        x = w["tokens.weight"][tokens[:, :-1]]
        for i in range(2):
            name = f"block{i}"
            y = rms_norm(w, f"{name}.norm1", x)
            x = x + attention(w, f"{name}.attention", y, 4, 2, base=100.0, causal=True)
            y = rms_norm(w, f"{name}.norm2", x)
            gate = F.silu(linear(w, f"{name}.feed_forward.gate", y))
            y = gate * linear(w, f"{name}.feed_forward.up", y)
            x = x + linear(w, f"{name}.feed_forward.down", y)
        logits = rms_norm(w, "norm", x) @ w["head.weight"].T
        return F.cross_entropy(logits.reshape(-1, WORDS), tokens[:, 1:].reshape(-1))

    return Case("gpt", lambda b: decoder.loss(b["tokens"]), theirs, text)


def bert(dtype):
    encoder = BERT(2, 12, 3, vocabulary=WORDS, positions=T + 2, dropout=0.0, dtype=dtype)

    def norm(w, name, x):
        return layer_norm(w, name, x, 1e-12)

    def theirs(w, tokens, segment, label, follows, positions):
        x = w["words.weight"][tokens] + w["segments.weight"][segment] + w["positions.weight"][:T]
        x = norm(w, "norm", x)
        mask = (tokens != 0)[:, None, None, :]
        for i in range(2):
            name = f"block{i}"
            x = norm(w, f"{name}.norm1", x + attention(w, f"{name}.attention", x, 3, 3, mask=mask))
            y = F.gelu(linear(w, f"{name}.feed_forward.up", x))
            x = norm(w, f"{name}.norm2", x + linear(w, f"{name}.feed_forward.down", y))
        h = x[torch.arange(len(x))[:, None], positions]
        h = norm(w, "masked.norm", F.gelu(linear(w, "masked.dense", h)))
        logits = h @ w["words.weight"].T + w["masked.bias"]
        order = linear(w, "next", torch.tanh(linear(w, "pooler", x[:, 0])))
        return (F.cross_entropy(logits.reshape(-1, WORDS), label.reshape(-1), ignore_index=-1)
                + F.cross_entropy(order, follows))  # fmt: skip

    def model(batch):
        fields = "tokens", "segment", "label", "follows", "positions"
        masked, order = encoder.losses(*(batch[name] for name in fields))
        return masked + order

    def rows_of(rows):
        tokens = integers(WORDS - 1, rows, T) + 1
        tokens[1::4, -2:] = tokens[2::4, -1:] = 0
        label = integers(WORDS, rows, 3, seed=1)
        label[3::4, -1] = -1
        return {"tokens": tokens, "segment": integers(2, rows, T), "label": label,
                "follows": integers(2, rows), "positions": integers(T, rows, 3)}  # fmt: skip

    return Case("bert", model, theirs, rows_of)


def conv_norm(w, name, norm, x, stride):
    weight = w[f"{name}.weight"]
    return batch_norm(w, norm, F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2))


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


def classified(network):
    return lambda b: mf.mean(mf.cross_entropy(network(b["image"]), b["label"]))


def images(dtype, *shape, classes=CLASSES):
    def rows_of(rows):
        return {"image": draw(rows, *shape).astype(dtype), "label": integers(classes, rows)}

    return rows_of


def resnet(dtype, *, bottleneck=False):
    """Basic blocks in the form for small images, or bottlenecks in the full form."""
    blocks, small = (1, 2, 1, 1), not bottleneck
    network = ResNet(blocks, bottleneck, classes=CLASSES, width=4, small=small)

    def theirs(w, image, label):
        return F.cross_entropy(
            linear(w, "fc", resnet_features(w, image, blocks, small=small)), label
        )

    side = 16 if small else 64
    return Case("images", classified(network), theirs, images(dtype, 3, side, side))


def bottleneck(dtype):
    return resnet(dtype, bottleneck=True)


def alexnet(dtype):
    network = replace(classifier("alexnet", 28, CLASSES), dropout=0.0)

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

    return Case("images", classified(network), theirs, images(dtype, 1, 28, 28))


def faces(dtype, *, margin="arc"):
    blocks, by, scale = (1, 1, 1, 1), 0.3, 8.0
    network = Faces(ResNet(blocks, width=4, small=True), 6, 10, margin, by, scale)

    def theirs(w, image, label):
        x = resnet_features(w, image, blocks, small=True) @ w["features.weight"]
        cosines = F.normalize(batch_norm(w, "features_norm", x))
        cosines = cosines @ F.normalize(w["classes.weight"]).T
        hit = F.one_hot(label, 6).bool()
        apart = torch.cos(torch.acos(cosines) + by) if margin == "arc" else cosines - by
        return F.cross_entropy(scale * torch.where(hit, apart, cosines), label)

    def model(batch):
        return network.loss(network.cosines(network(batch["image"])), batch["label"])

    return Case("faces", model, theirs, images(dtype, 1, 16, 16, classes=6))


def cosface(dtype):
    return faces(dtype, margin="cos")


def field(dtype):
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

    def rows_of(rows):
        return {"volume": draw(rows, 1, 8, 8, 8).astype(dtype),
                "numbers": draw(rows, 2).astype(dtype)}  # fmt: skip

    return Case("field", model, theirs, rows_of)


def wide_and_deep(dtype):
    network = WideDeep((5, 7), 3, (6, 4), dtype=dtype)

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

    def rows_of(rows):
        return {"id0": integers(5, rows), "id1": integers(7, rows),
                "numbers": draw(rows, 3).astype(dtype), "click": integers(2, rows)}  # fmt: skip

    return Case("widedeep", model, theirs, rows_of)


CASES = (
    gpt2, llama, bert, resnet, bottleneck, alexnet, faces, cosface, field, wide_and_deep
)  # fmt: skip
"""Functions of a dtype."""
