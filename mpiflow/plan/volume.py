"""How much a rank sends in a collective, in elements.

The standard volumes of the bandwidth-optimal algorithms (Thakur, Rabenseifner, Gropp 2005), kept
exact for uneven spans: with p members and n elements spread evenly each is the textbook number,
2(p-1)/p n for all_reduce and (p-1)/p n for the others. Plan and transports share these.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpiflow.graph.sbp import span

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange")


def sent_elements(kind: str, counts: Sequence[int], members: int, index: int) -> int:
    """Elements that member `index` sends.

    `counts` is (n,) for all_reduce; the elements that each member contributes (all_gather) or
    ends up with (reduce_scatter); what this member sends to each (all_to_all, exchange).
    """
    if kind == "all_reduce":
        start, stop = span(counts[0], members, index)
        own = stop - start
        return counts[0] - own + (members - 1) * own
    if kind == "all_gather":
        return (members - 1) * counts[index]
    return sum(counts) - counts[index]
