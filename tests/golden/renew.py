"""Write the golden plans anew: python tests/golden/renew.py, then look at `git diff`.

They are those of declared.py for two ranks, on CPUs and on accelerators whose ranks reach one
another in different ways, as JSON with a line for each record. A change
that means to leave plans alone leaves this file alone; one that does not shows here what it does.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
TARGETS = {
    "digits-2.json": {},
    "digits-2-staged.json": {"device": "fake"},
    "digits-2-nccl.json": {"device": "cuda", "route": "nccl"},
}
sys.path.insert(0, str(HERE.parent.parent))

from mpiflow.graph.mesh import parse_mesh  # noqa: E402
from mpiflow.plan.store import to_json  # noqa: E402
from mpiflow.planning import make_plan  # noqa: E402


def golden_text(options) -> str:
    """The JSON of the plan with these options; the versions of mpiflow and NumPy are left out."""
    sys.path.insert(0, str(HERE))
    try:
        import declared
    finally:
        sys.path.remove(str(HERE))
    plan = make_plan(declared.job(), HERE, parse_mesh("data=2"), HERE, **options)
    return _lines(to_json(replace(plan, version="*", numpy="*"))) + "\n"


def _lines(value, indent=""):
    """JSON with objects and lists of objects on lines of their own, records on one line."""
    nested = isinstance(value, dict) and any(isinstance(v, dict | list) for v in value.values())
    if nested and len(indent) < 4:
        parts = [f'{indent} "{k}": {_lines(v, indent + " ")}' for k, v in sorted(value.items())]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        parts = [f"{indent} {_lines(v, indent + ' ')}" for v in value]
        return "[\n" + ",\n".join(parts) + f"\n{indent}]"
    return json.dumps(value, sort_keys=True)


if __name__ == "__main__":
    for name, options in TARGETS.items():
        (HERE / name).write_text(golden_text(options))
