"""Models have the published sizes, traced without weights, files or ranks."""

import pytest

from mpiflow.errors import JobError
from mpiflow.models.bert import SIZES as BERT_SIZES
from mpiflow.models.bert import bert
from mpiflow.models.count import flops, parameters, traced
from mpiflow.models.faces import Faces
from mpiflow.models.gpt import SIZES as GPT_SIZES
from mpiflow.models.gpt import gpt
from mpiflow.models.images import classifier
from mpiflow.models.resnet import ResNet


def decoder_graph(size):
    decoder = GPT_SIZES[size]
    fields = {"tokens": ((decoder.context + 1,), "uint16")}
    return traced(lambda batch: decoder.loss(batch["tokens"]), fields)


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ("small", 124_439_808),
        ("medium", 354_823_168),
        ("large", 774_030_080),
        ("xl", 1_557_611_200),
        ("70b", 68_976_648_192),
    ],
)
def test_decoders_have_the_published_parameters(size, count):
    assert parameters(decoder_graph(size)) == count


def test_flops_of_a_decoder_are_those_of_its_products():
    # 2 operations a weight and token, and two products of t x t x width a block.
    decoder = GPT_SIZES["small"]
    t, d, v = decoder.context, decoder.width, decoder.vocabulary
    weights = parameters(decoder_graph("small")) - t * d  # positions are added, not multiplied
    expected = 2 * weights * t + 4 * decoder.layers * t * t * d
    assert flops(decoder_graph("small")) == pytest.approx(expected, rel=0.02)
    assert v * d < weights


def image_graph(model, size=224, channels=3, classes=1000, *, training=True):
    network = classifier(model, size, classes)
    fields = {"image": ((channels, size, size), "float32")}
    return traced(lambda batch: network(batch["image"]), fields, training=training)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ("alexnet", 61_100_840),
        ("vgg16", 138_357_544),
        ("resnet18", 11_689_512),
        ("resnet34", 21_797_672),
        ("resnet50", 25_557_032),
    ],
)
def test_classifiers_have_the_published_parameters(model, count):
    assert parameters(image_graph(model)) == count


def test_a_forward_pass_of_resnet50_is_4_09_billion_multiply_adds():
    graph = image_graph("resnet50", training=False)
    assert flops(graph) / 2 == pytest.approx(4.09e9, rel=0.02)


@pytest.mark.parametrize("size", [28, 32])
@pytest.mark.parametrize("model", ["alexnet", "vgg16", "resnet18", "resnet50"])
def test_classifiers_of_small_images(model, size):
    graph = image_graph(model, size, channels=1, classes=10)
    assert graph.nodes[-1].outputs[0].shape == (1, 10)
    assert parameters(graph) < 2_000_000


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: classifier("resnet51", 28, 10), "model 'resnet51' is none of alexnet, vgg16,"),
        (lambda: gpt("huge"), "size 'huge' is none of tiny, small, medium, large, xl, 70b"),
        (lambda: bert("small"), "size 'small' is none of tiny, base, large"),
        (lambda: Faces(ResNet((1,)), 9, margin="x").loss(None, None), "margin 'x' is none of arc"),
    ],
)
def test_an_unknown_name_is_answered_with_those_that_there_are(make, message):
    with pytest.raises(JobError, match=message):
        make()


@pytest.mark.parametrize(("size", "count"), [("base", 110_106_428), ("large", 336_226_108)])
def test_encoders_have_the_published_parameters(size, count):
    # Those of the encoder, its pooler and both heads.
    encoder = BERT_SIZES[size]
    t = encoder.positions
    fields = {"tokens": ((t,), "uint16"), "segment": ((t,), "uint8"),
              "label": ((t,), "int32"), "next": ((), "uint8")}  # fmt: skip

    def model(batch):
        return encoder.losses(*(batch[name] for name in fields))

    assert parameters(traced(model, fields)) == count
