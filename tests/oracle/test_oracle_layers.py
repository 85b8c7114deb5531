"""Attention and recurrent layers against torch.nn, with copied weights, in float64."""

import numpy as np
import pytest
from op_harness import evaluate

from mpiflow import nn, ops
from mpiflow.graph.grad import gradients
from mpiflow.graph.graph import Graph, building

torch = pytest.importorskip("torch")
N, T, WIDTH = 3, 5, 12


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def run(function, arrays):
    """Value, and gradients of a random sum of it by name, of a model whose weights are random."""
    graph = Graph("test")
    with building(graph):
        tensors = [graph.input(f"x{i}", a.shape, a.dtype.name) for i, a in enumerate(arrays)]
        y = function(*tensors)
        weight = graph.input("weight", y.shape, y.dtype)
        wanted = [t for t in tensors if t.dtype == "float64"]
        wanted += [v.tensor for v in graph.variables.values()]
        found = gradients(graph, ops.reduce_sum(y * weight), wanted)
    values = {name: draw(*v.tensor.shape, seed=i) / 2
              for i, (name, v) in enumerate(graph.variables.items())}  # fmt: skip
    dy = draw(*y.shape, seed=99)
    feeds = dict(zip(tensors, arrays, strict=True)) | {weight: dy}
    feeds |= {v.tensor: values[name] for name, v in graph.variables.items()}
    result, *grads = evaluate(graph, [y, *found], feeds)
    names = [t.name for t in wanted]
    return result, dict(zip(names, grads, strict=True)), values, dy


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-8, atol=1e-8)


def put(parameter, value):
    with torch.no_grad():
        parameter.copy_(torch.tensor(np.ascontiguousarray(value)))


def apart(columns, heads, parts):
    """(..., heads parts d) -> parts arrays (..., heads d), as PyTorch orders them."""
    d = columns.shape[-1] // (heads * parts)
    grouped = columns.reshape(*columns.shape[:-1], heads, parts, d)
    return [grouped[..., i, :].reshape(*columns.shape[:-1], heads * d) for i in range(parts)]


def in_projection(get, heads):
    """PyTorch's stacked weight and bias of queries, keys and values from ours."""
    weight = np.concatenate(apart(get("layer.qkv.weight"), heads, 3), -1).T
    return weight, np.concatenate(apart(get("layer.qkv.bias"), heads, 3))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_self_attention(causal, masked):
    heads = 3
    allowed = np.ones((N, T), bool)
    if masked:
        allowed[0, 3:] = allowed[1, 2] = False
    layer = nn.MultiHeadAttention(WIDTH, heads, causal=causal, name="layer")
    x = draw(N, T, WIDTH)
    y, found, values, dy = run(lambda x, m: layer(x, mask=m), (x, allowed))

    theirs = torch.nn.MultiheadAttention(WIDTH, heads, batch_first=True, dtype=torch.float64)
    weight, bias = in_projection(values.get, heads)
    put(theirs.in_proj_weight, weight)
    put(theirs.in_proj_bias, bias)
    put(theirs.out_proj.weight, values["layer.out.weight"].T)
    put(theirs.out_proj.bias, values["layer.out.bias"])
    given = torch.tensor(x, requires_grad=True)
    later = torch.triu(torch.ones(T, T, dtype=torch.bool), 1) if causal else None
    expected, _ = theirs(given, given, given, key_padding_mask=torch.tensor(~allowed),
                         attn_mask=later, need_weights=False)  # fmt: skip
    expected.backward(torch.tensor(dy))
    close(y, expected)
    close(found["batch/x0"], given.grad)
    weight, bias = in_projection(found.get, heads)
    close(weight, theirs.in_proj_weight.grad)
    close(bias, theirs.in_proj_bias.grad)
    close(found["layer.out.weight"].T, theirs.out_proj.weight.grad)
    close(found["layer.out.bias"], theirs.out_proj.bias.grad)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_to_a_memory(masked):
    heads, length = 2, 4
    allowed = np.ones((N, length), bool)
    if masked:
        allowed[0, 2:] = allowed[2, 0] = False
    layer = nn.MultiHeadAttention(WIDTH, heads, name="layer")
    x, memory = draw(N, T, WIDTH), draw(N, length, WIDTH, seed=1)
    arrays = x, memory, allowed
    y, found, values, dy = run(lambda x, m, a: layer(x, memory=m, mask=a), arrays)

    theirs = torch.nn.MultiheadAttention(WIDTH, heads, batch_first=True, dtype=torch.float64)
    kv = np.concatenate(apart(values["layer.memory.weight"], heads, 2), -1)
    put(theirs.in_proj_weight, np.concatenate([values["layer.query.weight"], kv], -1).T)
    bias = [values["layer.query.bias"], *apart(values["layer.memory.bias"], heads, 2)]
    put(theirs.in_proj_bias, np.concatenate(bias))
    put(theirs.out_proj.weight, values["layer.out.weight"].T)
    put(theirs.out_proj.bias, values["layer.out.bias"])
    given, kept = (torch.tensor(a, requires_grad=True) for a in (x, memory))
    expected, _ = theirs(
        given, kept, kept, key_padding_mask=torch.tensor(~allowed), need_weights=False
    )
    expected.backward(torch.tensor(dy))
    close(y, expected)
    close(found["batch/x0"], given.grad)
    close(found["batch/x1"], kept.grad)
    close(found["layer.query.weight"].T, theirs.in_proj_weight.grad[:WIDTH])
    kv = np.concatenate(apart(found["layer.memory.weight"], heads, 2), -1)
    close(kv.T, theirs.in_proj_weight.grad[WIDTH:])


def test_grouped_keys_are_those_of_repeated_heads():
    heads, kv_heads = 6, 2
    d, group = WIDTH // heads, heads // kv_heads
    layer = nn.MultiHeadAttention(WIDTH, heads, kv_heads=kv_heads, causal=True, bias=False,
                                  rotary_base=50.0, name="layer")  # fmt: skip
    x = draw(N, T, WIDTH)
    y, _, values, _ = run(layer, (x,))

    columns = (x @ values["layer.qkv.weight"]).reshape(N, T, kv_heads, group + 2, d)
    angle = np.arange(T)[:, None] * 50.0 ** (-np.arange(d // 2) * 2 / d)
    turn = np.exp(1j * angle)[None, :, None]

    def turned(a):
        z = (a[..., : d // 2] + 1j * a[..., d // 2 :]) * turn
        return np.concatenate([z.real, z.imag], -1)

    out = np.empty((N, T, heads, d))
    for h in range(heads):
        g, i = divmod(h, group)
        q, k = turned(columns[:, :, g : g + 1, i]), turned(columns[:, :, g : g + 1, group])
        scores = q[:, :, 0] @ k[:, :, 0].transpose(0, 2, 1) / np.sqrt(d)
        scores = np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf)
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        out[:, :, h] = weight @ columns[:, :, g, group + 1]
    expected = out.reshape(N, T, WIDTH) @ values["layer.out.weight"]
    np.testing.assert_allclose(y, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3)])
def test_recurrent_layers(kind, gates, last):
    inputs, width = 4, 6
    layer = getattr(nn, kind)(width, last=last, name="layer")
    x = draw(N, T, inputs)
    y, found, values, dy = run(layer, (x,))

    theirs = getattr(torch.nn, kind)(inputs, width, batch_first=True, dtype=torch.float64)
    nothing = np.zeros(gates * width)
    names = {"weight_ih_l0": "layer.input.weight", "weight_hh_l0": "layer.hidden.weight",
             "bias_ih_l0": "layer.input.bias", "bias_hh_l0": "layer.hidden.bias"}  # fmt: skip
    for name, ours in names.items():
        put(getattr(theirs, name), values.get(ours, nothing).T)
    given = torch.tensor(x, requires_grad=True)
    expected, _ = theirs(given)
    expected = expected[:, -1] if last else expected
    expected.backward(torch.tensor(dy))
    close(y, expected)
    close(found["batch/x0"], given.grad)
    for name, ours in names.items():
        if ours in found:
            close(found[ours].T, getattr(theirs, name).grad)


def test_tied_weights_add_up_the_gradients_of_both_uses():
    rows, width = 7, 4
    layer = nn.Embedding(rows, width, name="layer", dtype="float64")
    ids = np.random.default_rng(0).integers(0, rows, (N, T))
    y, found, values, dy = run(lambda i: layer.as_logits(layer(i)), (ids,))
    table = torch.tensor(values["layer.weight"], requires_grad=True)
    expected = table[torch.tensor(ids)] @ table.T
    expected.backward(torch.tensor(dy))
    close(y, expected)
    close(found["layer.weight"], table.grad)


def test_gated_feed_forward():
    layer = nn.FeedForward(9, activation=ops.silu, gated=True, bias=False, name="layer")
    x = draw(N, T, WIDTH)
    y, found, values, dy = run(layer, (x,))
    gate, up, down = (
        torch.tensor(values[f"layer.{k}.weight"], requires_grad=True)
        for k in ("gate", "up", "down")
    )
    given = torch.tensor(x, requires_grad=True)
    expected = (torch.nn.functional.silu(given @ gate) * (given @ up)) @ down
    expected.backward(torch.tensor(dy))
    close(y, expected)
    close(found["batch/x0"], given.grad)
    close(found["layer.gate.weight"], gate.grad)
    close(found["layer.down.weight"], down.grad)
