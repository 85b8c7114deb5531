import tracemalloc

from jobs import classifier_plan, on_ranks


def test_steady_steps_allocate_nothing_that_stays():
    plan = classifier_plan("data=1")

    def work(session):
        session.expect("train", range(110))
        for step in range(60):
            session.run("train", step)
        tracemalloc.start()
        try:
            begin = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            for step in range(60, 110):
                session.run("train", step)
            now, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        return now - begin, peak - begin

    ((grown, peak),) = on_ranks(plan, work)
    # A batch of images is 768 bytes a step for the test's own reader; one array of the hidden
    # layer would be 3584 bytes and stay below nothing.
    assert grown < 2_000
    assert peak < 20_000
