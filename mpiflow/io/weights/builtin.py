"""The name maps that come with mpiflow: `mpiflow.models` in the names of published weights.

torchvision-resnet           ResNet-18 to 152, as torchvision saves them
hf-bert:heads=12             BertForPreTraining, or the encoder alone, as Hugging Face saves them
hf-gpt2:heads=12             GPT2LMHeadModel, or GPT2Model
hf-llama:heads=64,kv_heads=8 LlamaForCausalLM

The number of heads cannot be read off a tensor, but decides where queries, keys and values stand.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mpiflow.errors import UsageError
from mpiflow.io.weights.names import SAME, NameMap, Rule, read_map

_TURNED = "o i -> i o"


def name_map(text: str, folder: Path = Path()) -> NameMap:
    """The map that `--names` means: one of ours by name, a file in `folder`, or our own names."""
    if not text:
        return SAME
    if text.endswith((".toml", ".json")):
        return read_map(folder / text)
    name, _, given = text.partition(":")
    if name not in _MAPS:
        raise UsageError(
            f"names {text!r}: give a .toml or .json file, or one of {', '.join(_MAPS)}"
        )
    function, wanted = _MAPS[name]
    settings = _settings(text, given)
    if set(settings) != set(wanted):
        example = ",".join(f"{key}=12" for key in wanted)
        raise UsageError(
            f"names {text!r}: " + (f"write {name}:{example}" if wanted else f"write {name}")
        )
    return function(**settings)


def _settings(text: str, given: str) -> dict[str, int]:
    pairs = [pair.partition("=") for pair in given.split(",") if pair]
    if not all(value.isdecimal() and int(value) for _, _, value in pairs):
        raise UsageError(f"names {text!r}: settings are numbers, as in hf-gpt2:heads=12")
    return {key: int(value) for key, _, value in pairs}


def _linear(ours: str, theirs: str) -> tuple[Rule, ...]:
    """A dense layer, whose weight PyTorch has the other way round."""
    return (
        Rule(f"{ours}.weight", (f"{theirs}.weight",), _TURNED),
        Rule(f"{ours}.bias", (f"{theirs}.bias",)),
    )


def _norm(ours: str, theirs: str) -> tuple[Rule, ...]:
    return (
        Rule(f"{ours}.scale", (f"{theirs}.weight",)),
        Rule(f"{ours}.shift", (f"{theirs}.bias",)),
    )


def _old_norm(ours: str, theirs: str) -> tuple[Rule, ...]:
    """A norm in today's names, or in TensorFlow's, which published files of BERT still have."""
    return (
        *_norm(ours, theirs),
        Rule(f"{ours}.scale", (f"{theirs}.gamma",)),
        Rule(f"{ours}.shift", (f"{theirs}.beta",)),
    )


def _batch_norm(ours: str, theirs: str) -> tuple[Rule, ...]:
    return (
        *_norm(ours, theirs),
        Rule(f"{ours}.running_mean", (f"{theirs}.running_mean",)),
        Rule(f"{ours}.running_variance", (f"{theirs}.running_var",)),
    )


def torchvision_resnet() -> NameMap:
    """torchvision.models.resnet; ours is `mpiflow.models.resnet`."""
    block = "layer*.*."
    rules = (
        *(Rule(name, (name,)) for name in ("conv1.weight", f"{block}conv*.weight")),
        *_batch_norm("bn1", "bn1"),
        *_batch_norm(f"{block}bn*", f"{block}bn*"),
        Rule(f"{block}downsample.conv.weight", (f"{block}downsample.0.weight",)),
        *_batch_norm(f"{block}downsample.bn", f"{block}downsample.1"),
        *_linear("fc", "fc"),
    )
    return NameMap("torchvision-resnet", rules, ("*.num_batches_tracked",))


def hf_bert(heads: int) -> NameMap:
    """transformers.BertForPreTraining; ours is `mpiflow.models.bert`.

    Its order of two sentences counts the other way round than our examples: 0 means "follows".
    """
    embeddings, layer = "bert.embeddings", "bert.encoder.layer.*"
    parts = [f"{layer}.attention.self.{part}" for part in ("query", "key", "value")]
    rules = (
        Rule("words.weight", (f"{embeddings}.word_embeddings.weight",)),
        Rule("positions.weight", (f"{embeddings}.position_embeddings.weight",)),
        Rule("segments.weight", (f"{embeddings}.token_type_embeddings.weight",)),
        *_old_norm("norm", f"{embeddings}.LayerNorm"),
        Rule("block*.attention.qkv.weight", tuple(f"{part}.weight" for part in parts),
             "(r h d) i -> i (h r d)", "r", (1, 1, 1), (("h", heads),)),
        Rule("block*.attention.qkv.bias", tuple(f"{part}.bias" for part in parts),
             "(r h d) -> (h r d)", "r", (1, 1, 1), (("h", heads),)),
        *_linear("block*.attention.out", f"{layer}.attention.output.dense"),
        *_old_norm("block*.norm1", f"{layer}.attention.output.LayerNorm"),
        *_linear("block*.feed_forward.up", f"{layer}.intermediate.dense"),
        *_linear("block*.feed_forward.down", f"{layer}.output.dense"),
        *_old_norm("block*.norm2", f"{layer}.output.LayerNorm"),
        *_linear("pooler", "bert.pooler.dense"),
        *_linear("masked.dense", "cls.predictions.transform.dense"),
        *_old_norm("masked.norm", "cls.predictions.transform.LayerNorm"),
        Rule("masked.bias", ("cls.predictions.bias",)),
        *_linear("next", "cls.seq_relationship"),
    )  # fmt: skip
    tied = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")
    ignore = ("bert.embeddings.position_ids", "embeddings.position_ids", *tied)
    # The encoder alone is saved without "bert." before its names.
    bare = tuple(
        Rule(r.ours, tuple(name.removeprefix("bert.") for name in r.theirs), r.pattern, r.join,
             r.parts, r.sizes)
        for r in rules
        if r.theirs[0].startswith("bert.")
    )  # fmt: skip
    return NameMap("hf-bert", rules + bare, ignore, heads=heads)


def hf_gpt2(heads: int) -> NameMap:
    """transformers.GPT2LMHeadModel; ours is `mpiflow.models.gpt`. Its weights are not turned."""
    fused = (("r", 3), ("h", heads))
    rules = (
        Rule("tokens.weight", ("wte.weight",)),
        Rule("positions.weight", ("wpe.weight",)),
        *_norm("block*.norm1", "h.*.ln_1"),
        Rule("block*.attention.qkv.weight", ("h.*.attn.c_attn.weight",),
             "i (r h d) -> i (h r d)", sizes=fused),
        Rule("block*.attention.qkv.bias", ("h.*.attn.c_attn.bias",),
             "(r h d) -> (h r d)", sizes=fused),
        *(Rule(f"block*.{ours}.{what}", (f"h.*.{theirs}.{what}",))
          for ours, theirs in (("attention.out", "attn.c_proj"), ("feed_forward.up", "mlp.c_fc"),
                               ("feed_forward.down", "mlp.c_proj"))
          for what in ("weight", "bias")),
        *_norm("block*.norm2", "h.*.ln_2"),
        *_norm("norm", "ln_f"),
    )  # fmt: skip
    ignore = ("h.*.attn.bias", "h.*.attn.masked_bias", "lm_head.weight")
    return NameMap("hf-gpt2", rules, ignore, ("transformer.", ""), heads)


def hf_llama(heads: int, kv_heads: int) -> NameMap:
    """transformers.LlamaForCausalLM; ours is `mpiflow.models.gpt` in Llama's form."""
    layer = "model.layers.*"
    parts = tuple(f"{layer}.self_attn.{part}_proj.weight" for part in "qkv")
    group = heads // kv_heads
    turned = (
        ("block*.attention.out", f"{layer}.self_attn.o_proj"),
        ("block*.feed_forward.gate", f"{layer}.mlp.gate_proj"),
        ("block*.feed_forward.up", f"{layer}.mlp.up_proj"),
        ("block*.feed_forward.down", f"{layer}.mlp.down_proj"),
    )
    rules = (
        Rule("tokens.weight", ("model.embed_tokens.weight",)),
        Rule("head.weight", ("lm_head.weight",)),
        Rule("block*.attention.qkv.weight", parts, "(k r d) i -> i (k r d)", "r",
             (group, 1, 1), (("k", kv_heads),)),
        *(Rule(f"{ours}.weight", (f"{theirs}.weight",), _TURNED) for ours, theirs in turned),
        Rule("block*.norm1.scale", (f"{layer}.input_layernorm.weight",)),
        Rule("block*.norm2.scale", (f"{layer}.post_attention_layernorm.weight",)),
        Rule("norm.scale", ("model.norm.weight",)),
    )  # fmt: skip
    return NameMap("hf-llama", rules, ("*.rotary_emb.inv_freq",), heads=kv_heads)


_MAPS: dict[str, tuple[Callable[..., NameMap], tuple[str, ...]]] = {
    "torchvision-resnet": (torchvision_resnet, ()),
    "hf-bert": (hf_bert, ("heads",)),
    "hf-gpt2": (hf_gpt2, ("heads",)),
    "hf-llama": (hf_llama, ("heads", "kv_heads")),
}
