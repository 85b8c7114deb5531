"""Weights in torchvision's and Hugging Face's names give the logits of those definitions.

The definitions are written here from the published structure of their modules, small, in float64.
Each test goes the whole way: state_dict -> .safetensors -> the plan of predictions on two ranks ->
logits; and back: a checkpoint made of the file, exported by the same names, is the state_dict.
"""

import h5py
import numpy as np
import pytest

import mpiflow as mf
from mpiflow.errors import CheckpointError
from mpiflow.exec.failure import Failure
from mpiflow.exec.local import run_local
from mpiflow.graph.mesh import parse_mesh
from mpiflow.io.pack import pack
from mpiflow.io.weights import safetensors
from mpiflow.io.weights.builtin import name_map
from mpiflow.io.weights.export import export
from mpiflow.io.weights.source import find_checkpoint, open_tensors
from mpiflow.io.weights.tensors import TensorInfo
from mpiflow.models.bert import BERT
from mpiflow.models.gpt import GPT
from mpiflow.models.resnet import ResNet
from mpiflow.planning import make_plan
from mpiflow.predict import Options, Request, prediction_plan, run
from mpiflow.weights import import_weights

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
N, T, WORDS = 5, 7, 23


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def integers(high, *shape):
    return np.random.default_rng([high, *shape]).integers(0, high, shape)


def randomise(module):
    """Every parameter and buffer of floats is drawn, so that none is what it is by default."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in module.state_dict().items():
            if value.is_floating_point():
                scale = value.shape[-1] ** -0.5 if value.ndim > 1 else 0.3
                value.copy_(torch.randn_like(value) * scale)
                if name.endswith(("running_var", "norm.weight")) or value.ndim == 1:
                    value.copy_(value.abs() + 0.5)
    return module.double().eval()


def save(path, state):
    arrays = {name: value.numpy() for name, value in state.items()}
    infos = [TensorInfo(name, a.shape, a.dtype.name) for name, a in arrays.items()]
    safetensors.write(path, infos, iter(arrays.values()), {"format": "pt"})


def job_of(network, loss):
    """A job whose model is `network`; its outputs have rows."""

    def model(batch):
        outputs = network(batch)
        return {"loss": loss(outputs), **outputs}

    test = mf.Dataset("rows-*.h5", batch=2)
    return mf.Job("theirs", model, train=test, evaluate=test, optimizer=mf.SGD(lr=0.1))


def check(folder, network, names, state, expected, *, dropped=(), mesh="data=2", **arrays):
    """`network` with the weights of `state` gives `expected`, and gives the weights back."""
    save(folder / "model.safetensors", state)
    pack(arrays, str(folder / "rows-*.h5"))
    job = job_of(network, lambda outputs: mf.mean(next(iter(outputs.values()))))
    request = Request(str(folder / "model.safetensors"), folder, names=names)
    plan = prediction_plan(job, folder, parse_mesh(mesh), request)
    run_local(2, lambda t: run(plan, t, Failure(t), Options(folder, folder / "out.h5")))
    with h5py.File(folder / "out.h5") as file:
        for name, value in expected.items():
            found = file[name][:]
            assert found.dtype == np.float64
            np.testing.assert_allclose(found, value.detach().numpy(), rtol=1e-9, atol=1e-9)

    plan = make_plan(job, folder, parse_mesh("data=1"), folder)
    weights = mf.Weights("model.safetensors", names)
    import_weights(plan, weights, folder / "run", folder)
    done = export(find_checkpoint(folder / "run"), folder / "back.safetensors", name_map(names))
    kept = {name: value for name, value in state.items() if name not in dropped}
    assert done.left_out == ()
    with open_tensors(folder / "back.safetensors") as back:
        assert sorted(back.tensors) == sorted(kept)
        for name, value in kept.items():
            box = tuple((0, n) for n in value.shape)
            np.testing.assert_array_equal(back.read(name, box), value.numpy(), err_msg=name)


# -- torchvision.models.resnet -------------------------------------------------------------------


class Block(nn.Module):
    """BasicBlock, or Bottleneck with the stride in its 3x3."""

    def __init__(self, inputs, width, stride, bottleneck):
        super().__init__()
        kernels = (1, 3, 1) if bottleneck else (3, 3)
        widths = (width, width, 4 * width) if bottleneck else (width, width)
        strides = (1, stride, 1) if bottleneck else (stride, 1)
        for i, (kernel, out, step) in enumerate(zip(kernels, widths, strides, strict=True), 1):
            conv = nn.Conv2d(inputs if i == 1 else widths[i - 2], out, kernel, step, kernel // 2,
                             bias=False)  # fmt: skip
            setattr(self, f"conv{i}", conv)
            setattr(self, f"bn{i}", nn.BatchNorm2d(out))
        self.depth, self.downsample = len(kernels), None
        if stride != 1 or inputs != widths[-1]:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, widths[-1], 1, stride, bias=False), nn.BatchNorm2d(widths[-1])
            )

    def forward(self, x):
        y = x
        for i in range(1, self.depth + 1):
            y = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(y))
            y = F.relu(y) if i < self.depth else y
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class TorchResNet(nn.Module):
    def __init__(self, blocks, bottleneck, classes, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        inputs = width
        for stage, count in enumerate(blocks):
            layers = []
            for i in range(count):
                stride = 2 if stage and not i else 1
                layers.append(Block(inputs, width << stage, stride, bottleneck))
                inputs = (width << stage) * (4 if bottleneck else 1)
            setattr(self, f"layer{stage + 1}", nn.Sequential(*layers))
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for stage in range(1, 5):
            x = getattr(self, f"layer{stage}")(x)
        return self.fc(x.mean((2, 3)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bottleneck", [True, False])
def test_resnet_in_torchvisions_names(tmp_path, bottleneck):
    theirs = randomise(TorchResNet((1, 2, 1, 1), bottleneck, 6, 4))
    ours = ResNet((1, 2, 1, 1), bottleneck, 6, 4)
    image, state = draw(N, 3, 64, 64), theirs.state_dict()
    assert "layer2.0.downsample.1.running_var" in state
    check(
        tmp_path, lambda batch: {"logits": ours(batch["image"])}, "torchvision-resnet", state,
        {"logits": theirs(torch.tensor(image))}, image=image,
        dropped=[name for name in state if name.endswith("num_batches_tracked")],
    )  # fmt: skip


# -- transformers: BERT --------------------------------------------------------------------------


def modules(**named):
    return nn.ModuleDict(named)


class TorchBert(nn.Module):
    """BertForPreTraining: `bert` is the encoder, `cls` its heads."""

    def __init__(self, layers, width, heads):
        super().__init__()
        self.heads = heads

        def norm():
            return nn.LayerNorm(width, eps=1e-12)

        def block():
            projections = {key: nn.Linear(width, width) for key in ("query", "key", "value")}
            return nn.ModuleDict({
                "attention": nn.ModuleDict({
                    "self": nn.ModuleDict(projections),
                    "output": modules(dense=nn.Linear(width, width), LayerNorm=norm()),
                }),
                "intermediate": modules(dense=nn.Linear(width, 4 * width)),
                "output": modules(dense=nn.Linear(4 * width, width), LayerNorm=norm()),
            })  # fmt: skip

        self.bert = modules(
            embeddings=modules(
                word_embeddings=nn.Embedding(WORDS, width),
                position_embeddings=nn.Embedding(T, width),
                token_type_embeddings=nn.Embedding(2, width),
                LayerNorm=norm(),
            ),
            encoder=modules(layer=nn.ModuleList(block() for _ in range(layers))),
            pooler=modules(dense=nn.Linear(width, width)),
        )
        predictions = modules(
            transform=modules(dense=nn.Linear(width, width), LayerNorm=norm()),
            decoder=nn.Linear(width, WORDS),
        )
        predictions.bias = nn.Parameter(torch.zeros(WORDS))
        self.cls = modules(predictions=predictions, seq_relationship=nn.Linear(width, 2))
        self.bert["embeddings"].register_buffer("position_ids", torch.arange(T)[None])

    def attend(self, part, x, seen):
        n, t, width = x.shape
        q, k, v = (part["self"][key](x).view(n, t, self.heads, -1).transpose(1, 2)
                   for key in ("query", "key", "value"))  # fmt: skip
        scores = q @ k.transpose(2, 3) / (width // self.heads) ** 0.5
        scores = scores.masked_fill(~seen[:, None, None, :], -torch.inf)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(n, t, width)
        return part["output"]["LayerNorm"](x + part["output"]["dense"](y))

    def forward(self, tokens, segment):
        e = self.bert["embeddings"]
        x = e["word_embeddings"](tokens) + e["token_type_embeddings"](segment)
        x = e["LayerNorm"](x + e["position_embeddings"](e.position_ids))
        for layer in self.bert["encoder"]["layer"]:
            x = self.attend(layer["attention"], x, tokens != 0)
            h = F.gelu(layer["intermediate"]["dense"](x))
            x = layer["output"]["LayerNorm"](x + layer["output"]["dense"](h))
        heads = self.cls["predictions"]
        h = heads["transform"]["LayerNorm"](F.gelu(heads["transform"]["dense"](x)))
        masked = h @ e["word_embeddings"].weight.T + heads.bias
        pooled = torch.tanh(self.bert["pooler"]["dense"](x[:, 0]))
        return masked, self.cls["seq_relationship"](pooled)


TIED = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias",
        "bert.embeddings.position_ids")  # fmt: skip


def bert_case():
    theirs = randomise(TorchBert(2, 12, 3))
    ours = BERT(2, 12, 3, vocabulary=WORDS, positions=T, dropout=0.0, dtype="float64")
    tokens = integers(WORDS - 1, N, T) + 1
    tokens[1, -2:] = tokens[3, -1:] = 0
    segment = integers(2, N, T)
    expected = theirs(torch.tensor(tokens), torch.tensor(segment))
    return ours, theirs.state_dict(), dict(zip(("masked", "order"), expected, strict=True)), {
        "tokens": tokens, "segment": segment
    }  # fmt: skip


def bert_network(ours):
    def network(batch):
        heads = ours.heads_of(batch["tokens"], batch["segment"])
        return dict(zip(("masked", "order"), heads, strict=True))

    return network


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", ["data=2", "model=2"])
def test_bert_in_hugging_faces_names(tmp_path, mesh):
    ours, state, expected, arrays = bert_case()
    check(tmp_path, bert_network(ours), "hf-bert:heads=3", state, expected, dropped=TIED,
          mesh=mesh, **arrays)  # fmt: skip


@pytest.mark.ranks(2)
def test_berts_encoder_alone_and_its_old_names(tmp_path):
    ours, state, _, arrays = bert_case()
    for old, new in (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")):
        state = {name.replace(old, new): value for name, value in state.items()}
    encoder = {n.removeprefix("bert."): v for n, v in state.items() if n.startswith("bert.")}
    save(tmp_path / "whole.safetensors", state)
    save(tmp_path / "encoder.safetensors", encoder)
    pack(arrays, str(tmp_path / "rows-*.h5"))

    def network(batch):
        return {"hidden": ours(batch["tokens"], batch["segment"])}

    found = []
    for name in ("whole", "encoder"):
        job = job_of(network, lambda outputs: mf.mean(outputs["hidden"]))
        request = Request(str(tmp_path / f"{name}.safetensors"), tmp_path, names="hf-bert:heads=3")
        plan = prediction_plan(job, tmp_path, parse_mesh("data=2"), request)
        out = tmp_path / f"{name}.h5"
        run_local(2, lambda t, plan=plan, out=out: run(plan, t, Failure(t), Options(tmp_path, out)))
        with h5py.File(out) as file:
            found.append(file["hidden"][:])
    np.testing.assert_array_equal(*found)


# -- transformers: GPT-2 and Llama ---------------------------------------------------------------


class Conv1D(nn.Module):
    """What GPT-2 has for dense layers: the weight is (inputs, outputs)."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


class TorchGPT2(nn.Module):
    """GPT2LMHeadModel, whose head is the table of tokens."""

    def __init__(self, layers, width, heads):
        super().__init__()
        self.heads = heads

        def block():
            attention = modules(c_attn=Conv1D(width, 3 * width), c_proj=Conv1D(width, width))
            attention.register_buffer("bias", torch.ones(T, T).tril().bool()[None, None])
            return modules(
                ln_1=nn.LayerNorm(width), attn=attention, ln_2=nn.LayerNorm(width),
                mlp=modules(c_fc=Conv1D(width, 4 * width), c_proj=Conv1D(4 * width, width)),
            )  # fmt: skip

        self.transformer = modules(
            wte=nn.Embedding(WORDS, width), wpe=nn.Embedding(T, width),
            h=nn.ModuleList(block() for _ in range(layers)), ln_f=nn.LayerNorm(width),
        )  # fmt: skip
        self.lm_head = nn.Linear(width, WORDS, bias=False)

    def forward(self, tokens):
        parts = self.transformer
        x = parts["wte"](tokens) + parts["wpe"].weight[: tokens.shape[1]]
        for block in parts["h"]:
            n, t, width = x.shape
            qkv = block["attn"]["c_attn"](block["ln_1"](x)).split(width, 2)
            q, k, v = (a.view(n, t, self.heads, -1).transpose(1, 2) for a in qkv)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block["attn"]["c_proj"](y.transpose(1, 2).reshape(n, t, width))
            h = F.gelu(block["mlp"]["c_fc"](block["ln_2"](x)), approximate="tanh")
            x = x + block["mlp"]["c_proj"](h)
        return parts["ln_f"](x) @ parts["wte"].weight.T


def gpt2_case():
    theirs = randomise(TorchGPT2(2, 12, 3))
    ours = GPT(2, 12, 3, vocabulary=WORDS, context=T, dtype="float64")
    state, tokens = theirs.state_dict(), integers(WORDS, N, T)
    dropped = ["lm_head.weight", *(name for name in state if name.endswith(".attn.bias"))]
    expected = {"logits": theirs(torch.tensor(tokens))}
    return lambda batch: {"logits": ours(batch["tokens"])}, state, dropped, expected, tokens


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", ["data=2", "model=2"])
def test_gpt2_in_hugging_faces_names(tmp_path, mesh):
    network, state, dropped, expected, tokens = gpt2_case()
    check(tmp_path, network, "hf-gpt2:heads=3", state, expected, dropped=dropped, mesh=mesh,
          tokens=tokens)  # fmt: skip


def test_another_number_of_heads_is_refused(tmp_path):
    network, state, _, _, tokens = gpt2_case()
    save(tmp_path / "w.safetensors", state)
    pack({"tokens": tokens}, str(tmp_path / "rows-*.h5"))
    job = job_of(network, lambda outputs: mf.mean(outputs["logits"]))
    plan = make_plan(job, tmp_path, parse_mesh("data=1"), tmp_path)
    weights = mf.Weights("w.safetensors", "hf-gpt2:heads=4")  # divides the width as well as 3
    with pytest.raises(CheckpointError, match="for 4 heads, the model of theirs has 3"):
        import_weights(plan, weights, tmp_path / "run", tmp_path)
    request = Request(str(tmp_path / "w.safetensors"), tmp_path, names="hf-gpt2:heads=4")
    with pytest.raises(CheckpointError, match="for 4 heads, the model of theirs has 3"):
        prediction_plan(job, tmp_path, parse_mesh("data=1"), request)


def test_gpt2_as_it_is_published_has_shorter_names(tmp_path):
    network, state, dropped, _, tokens = gpt2_case()
    short = {name.removeprefix("transformer."): value for name, value in state.items()}
    save(tmp_path / "short.safetensors", short)
    pack({"tokens": tokens}, str(tmp_path / "rows-*.h5"))
    job = job_of(network, lambda outputs: mf.mean(outputs["logits"]))
    plan = make_plan(job, tmp_path, parse_mesh("data=1"), tmp_path)
    names = "hf-gpt2:heads=3"
    import_weights(plan, mf.Weights("short.safetensors", names), tmp_path / "run", tmp_path)
    export(find_checkpoint(tmp_path / "run"), tmp_path / "long.safetensors", name_map(names))
    with open_tensors(tmp_path / "long.safetensors") as found:
        assert sorted(found.tensors) == sorted(set(state) - set(dropped))


class TorchLlama(nn.Module):
    """LlamaForCausalLM."""

    def __init__(self, layers, width, heads, kv_heads, hidden, base):
        super().__init__()
        self.heads, self.kv_heads, self.base = heads, kv_heads, base
        narrow = width // heads * kv_heads

        def linear(inputs, outputs):
            return nn.Linear(inputs, outputs, bias=False)

        def block():
            return modules(
                self_attn=modules(
                    q_proj=linear(width, width), k_proj=linear(width, narrow),
                    v_proj=linear(width, narrow), o_proj=linear(width, width),
                ),
                mlp=modules(
                    gate_proj=linear(width, hidden), up_proj=linear(width, hidden),
                    down_proj=linear(hidden, width),
                ),
                input_layernorm=nn.RMSNorm(width, eps=1e-5),
                post_attention_layernorm=nn.RMSNorm(width, eps=1e-5),
            )  # fmt: skip

        self.model = modules(
            embed_tokens=nn.Embedding(WORDS, width),
            layers=nn.ModuleList(block() for _ in range(layers)),
            norm=nn.RMSNorm(width, eps=1e-5),
        )
        self.lm_head = linear(width, WORDS)

    def turned(self, x):
        t, d = x.shape[-2:]
        angle = self.base ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
        angle = (torch.arange(t)[:, None] * angle).repeat(1, 2)
        half = torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1)
        return x * angle.cos() + half * angle.sin()

    def forward(self, tokens):
        x = self.model["embed_tokens"](tokens)
        for block in self.model["layers"]:
            n, t, width = x.shape
            h, own = block["input_layernorm"](x), block["self_attn"]
            q, k, v = (own[f"{key}_proj"](h).view(n, t, count, -1).transpose(1, 2)
                       for key, count in zip("qkv", (self.heads, *[self.kv_heads] * 2),
                                             strict=True))  # fmt: skip
            y = F.scaled_dot_product_attention(
                self.turned(q), self.turned(k), v, is_causal=True, enable_gqa=True
            )
            x = x + own["o_proj"](y.transpose(1, 2).reshape(n, t, width))
            h, mlp = block["post_attention_layernorm"](x), block["mlp"]
            x = x + mlp["down_proj"](F.silu(mlp["gate_proj"](h)) * mlp["up_proj"](h))
        return self.lm_head(self.model["norm"](x))


@pytest.mark.ranks(2)
def test_llama_in_hugging_faces_names(tmp_path):
    theirs = randomise(TorchLlama(2, 16, 4, 2, 20, 100.0))
    ours = GPT(2, 16, 4, vocabulary=WORDS, context=T, kv_heads=2, hidden=20, rotary_base=100.0,
               gated=True, rms=True, bias=False, tied=False, dtype="float64")  # fmt: skip
    tokens = integers(WORDS, N, T)
    check(tmp_path, lambda batch: {"logits": ours(batch["tokens"])}, "hf-llama:heads=4,kv_heads=2",
          theirs.state_dict(), {"logits": theirs(torch.tensor(tokens))}, tokens=tokens)  # fmt: skip
