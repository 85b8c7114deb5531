import tracemalloc

from jobs import classifier_plan, on_ranks

WARM, WINDOW = 60, 50


def test_steady_steps_allocate_no_array():
    plan = classifier_plan("data=1", width=256)  # arrays of 128 KB and more

    def work(session):
        session.expect("train", range(WARM + 3 * WINDOW))
        for step in range(WARM):
            session.run("train", step)
        found = []
        tracemalloc.start()
        try:
            for first in range(WARM, WARM + 3 * WINDOW, WINDOW):
                begin = tracemalloc.get_traced_memory()[0]
                tracemalloc.reset_peak()
                for step in range(first, first + WINDOW):
                    session.run("train", step)
                now, peak = tracemalloc.get_traced_memory()
                found.append((now - begin, peak - begin))
        finally:
            tracemalloc.stop()
        return found

    grown, peaks = zip(*on_ranks(plan, work)[0], strict=True)
    # An array kept a step, of 112 bytes without its data, would show in every window.
    assert min(grown) < 100 * WINDOW
    assert min(peaks) < 50_000  # the test's own reader, and the outputs
