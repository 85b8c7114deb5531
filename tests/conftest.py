"""Ends every test session with one line that says how many tests ran on several ranks."""

import pytest


class RankReport:
    """Counts the passed tests that are marked `ranks(n)` with n of two or more."""

    def __init__(self, config):
        self.config = config
        self.on_ranks = set()

    @pytest.hookimpl
    def pytest_collection_modifyitems(self, items):
        for item in items:
            marks = item.iter_markers("ranks")
            if any(mark.args[0] >= 2 for mark in marks):
                self.on_ranks.add(item.nodeid)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self):
        # Outermost, so that it runs after the terminal reporter has printed its closing line.
        yield
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is None or self.config.option.collectonly:
            return
        passed = [report.nodeid for report in terminal.stats.get("passed", [])]
        counts = {
            kind: len(terminal.stats.get(kind, [])) for kind in ("failed", "error", "skipped")
        }
        several = sum(nodeid in self.on_ranks for nodeid in passed)
        terminal.write_line(
            f"{len(passed)} passed, {counts['failed'] + counts['error']} failed, "
            f"{counts['skipped']} skipped; {several} of them ran on two or more ranks"
        )


def pytest_configure(config):
    config.pluginmanager.register(RankReport(config), "rank-report")
