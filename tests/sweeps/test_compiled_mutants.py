"""Every kind of fault planted in compiled plans is found."""

import pytest
from jobs import PLANS
from mutants import MUTATIONS, mutants

from mpiflow.errors import VerifyError
from mpiflow.plan.verify import verify


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_mutants_of_compiled_plans_are_rejected_by_the_names_of_what_they_broke(plan):
    plan, count, kinds = plan(), 0, set()
    for mutant in mutants(plan, 3, seed=2):
        with pytest.raises(VerifyError) as caught:
            verify(mutant.plan)
        message = str(caught.value)
        assert any(name in message for name in mutant.names), (mutant.what, message)
        count += 1
        kinds.add(mutant.kind)
    assert count >= 60
    assert len(kinds) > len(MUTATIONS) * 2 // 3
