"""Ends every test session with one line that says how many tests ran on several ranks.

--no-skips FOLDER lets the tests below a folder fail where they would be skipped.
--cases N lets tests of random cases have so many.
--seeds N tries so many orders of the streams of a fake device.
--device fake runs the plans of tests/local, and the command lines of tests/mpi, on a fake device.
--route NAME says by which route its ranks reach one another (default: staged).
"""

import pytest


class RankReport:
    """Counts the passed tests that are marked `ranks(n)` with n of two or more."""

    def __init__(self, config):
        self.config = config

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item):
        # Noted in the report, which is all that comes from a worker of pytest-xdist.
        report = yield
        report.on_ranks = any(mark.args[0] >= 2 for mark in item.iter_markers("ranks"))
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self):
        # Outermost, so that it runs after the terminal reporter has printed its closing line.
        yield
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is None or self.config.option.collectonly:
            return
        passed = terminal.stats.get("passed", [])
        counts = {
            kind: len(terminal.stats.get(kind, [])) for kind in ("failed", "error", "skipped")
        }
        several = sum(report.on_ranks for report in passed)
        terminal.write_line(
            f"{len(passed)} passed, {counts['failed'] + counts['error']} failed, "
            f"{counts['skipped']} skipped; {several} of them ran on two or more ranks"
        )


class NoSkips:
    """Makes failures of skipped tests, and of skipped files of tests, below some folders."""

    def __init__(self, folders):
        self.folders = [f"{folder.rstrip('/')}/" for folder in folders]
        self.damaged = False  # a file of tests could not be read

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self):
        return self._checked((yield))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        return self._checked((yield))

    def _checked(self, report):
        forbidden = report.nodeid.startswith(tuple(self.folders))
        if forbidden and report.skipped and not hasattr(report, "wasxfail"):
            _, _, reason = report.longrepr
            report.outcome = "failed"
            report.longrepr = f"--no-skips: {report.nodeid} would be skipped. {reason}"
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, session, items):
        if not hasattr(session.config, "workerinput"):
            self._all_have_tests([item.nodeid for item in items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        # Asked where tests are dealt out, as an error of a worker would not be shown.
        self._all_have_tests(ids)

    def pytest_collectreport(self, report):
        self.damaged |= report.failed

    def _all_have_tests(self, nodeids):
        for folder in self.folders if not self.damaged else ():
            if not any(nodeid.startswith(folder) for nodeid in nodeids):
                raise pytest.UsageError(f"--no-skips {folder}: there are no tests")


def pytest_addoption(parser):
    parser.addoption(
        "--no-skips",
        action="append",
        default=[],
        metavar="FOLDER",
        help="tests below this folder, relative to the root, fail where they would be skipped",
    )

    parser.addoption(
        "--cases", type=int, default=3, metavar="N", help="how many random cases tests have"
    )

    parser.addoption(
        "--seeds", type=int, default=1, metavar="N",
        help="how many orders of the streams of a fake device are tried, and faults planted there",
    )  # fmt: skip
    parser.addoption("--device", choices=("cpu", "fake"), default="cpu", help="what runs plans")
    parser.addoption("--route", default="staged", help="between the ranks of --device fake")


def pytest_generate_tests(metafunc):
    """A test of random cases takes the number of each as its argument `seed_of_case`."""
    if "seed_of_case" in metafunc.fixturenames:
        metafunc.parametrize("seed_of_case", range(metafunc.config.option.cases))


def pytest_make_parametrize_id(config, val, argname):
    """Bytes are no names: processes must agree on these, and a compressed file holds its time."""
    return f"{len(val)} bytes" if isinstance(val, bytes) else None


def pytest_runtest_setup(item):
    """What only the CPU promises is not asked of the fake device."""
    mark = item.get_closest_marker("host")
    if mark and item.config.option.device == "fake":
        pytest.skip(mark.args[0] if mark.args else "the fake device does not promise this")


def pytest_configure(config):
    if config.option.device == "fake":
        import jobs

        jobs.ROUTE = config.option.route
    if config.pluginmanager.hasplugin("xdist"):
        import turns

        if plugin := turns.plugin_of(config):
            config.pluginmanager.register(plugin, "turns")
    config.pluginmanager.register(RankReport(config), "rank-report")
    config.pluginmanager.register(NoSkips(config.getoption("--no-skips")), "no-skips")
