"""Layouts that no price would choose: random legal ones, forced on a job while it is compiled."""

from contextlib import contextmanager
from unittest.mock import patch

import numpy as np

from mpiflow.compiler.domains import Domains
from mpiflow.graph.sbp import UNION

_SHARE, _LEFT = 1 / 3, 2


@contextmanager
def forced(seed):
    """Plans made inside have a random legal layout for a third of nodes, variables and inputs.

    The others choose between few, so that a plan is found fast. Nothing is forced where a layout is
    the union of rows, which converts to no other. None forces nothing at all.
    """
    if seed is None:
        yield
        return
    draw = np.random.default_rng(seed)

    def thin(domain):
        if any(UNION in layout for choice in domain for layout in choice.inputs + choice.outputs):
            return domain
        if draw.random() < _SHARE:
            return [domain[draw.integers(len(domain))]]
        left = draw.choice(len(domain), min(_LEFT, len(domain)), replace=False)
        return [domain[i] for i in sorted({0, *left.tolist()})]

    def thinned(name):
        real = getattr(Domains, name)
        return patch.object(Domains, name, lambda self, of: thin(real(self, of)))

    of_inputs = Domains.of_inputs

    def of_thin_inputs(self):
        return [(tensors, thin(domain)) for tensors, domain in of_inputs(self)]

    inputs = patch.object(Domains, "of_inputs", of_thin_inputs)
    with thinned("of_node"), thinned("of_variable"), inputs:
        yield
