"""Models have the published sizes, traced without weights, files or ranks."""

import pytest

from mpiflow.models.count import flops, parameters, traced
from mpiflow.models.gpt import SIZES as GPT_SIZES


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
