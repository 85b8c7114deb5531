import gc

import pytest

from mpiflow.garbage import no_collection


def test_collection_is_as_it_was_after_work_that_paused_it_also_within_other_such_work():
    assert gc.isenabled()
    with no_collection():
        assert not gc.isenabled()
        with no_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collection_goes_on_after_an_error():
    with pytest.raises(ValueError, match="wrong"), no_collection():
        raise ValueError("wrong")
    assert gc.isenabled()
