"""The report at the end of a run: seconds and budget of each ring, missing parts, unstable tests.

With `--times` the run also measures fixtures and the CPU time of all processes that tests start, and leaves
them in `.pytest_cache/times-TIER.json`; `tests/times.py` makes tables of these.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

RINGS = ("unit", "property", "integration", "airflow", "spark", "fault", "end_to_end")
BUDGETS_S = {
    "fast": {"unit": 180, "property": 80, "integration": 900},
    "test": {
        "unit": 290,
        "property": 115,
        "integration": 1600,
        "airflow": 280,
        "spark": 520,
        "fault": 180,
        "end_to_end": 70,
    },
    "rest": {
        "unit": 150,
        "property": 400,
        "integration": 1400,
        "airflow": 250,
        "spark": 1200,
        "fault": 2500,
        "end_to_end": 600,
    },
}
"""Seconds of all workers together, on two idle cores."""
TIME_SAID_EVERY_S = 300
"""Of a run that is ended from outside only this tells whether it was slow or hung."""
_SAMPLE_S = 2.0
MOST_LISTED = 20
"""Failures that the end of the output repeats."""
MOST_UNSTABLE = 3
"""A run with more tests that passed only when run again has failed."""


class Report:
    """The report that the controller of a run makes of the tests' reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager
        self.tier = str(config.getoption("tier"))
        self.with_times = bool(config.getoption("times"))
        self.began = time.monotonic()
        self._time_is_said_at = TIME_SAID_EVERY_S
        self.seconds: Counter[str] = Counter()
        self.tests: Counter[str] = Counter()
        self.missing: Counter[str] = Counter()
        self.unstable: list[tuple[str, str]] = []
        self.failed: list[tuple[str, str]] = []
        self.measured: dict[str, dict[str, Any]] = defaultdict(dict)
        self.programs: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = _without_group(report.nodeid)
        name = test.split("/")[1]
        self.seconds[name] += report.duration
        self.tests[name] += report.when == "call"
        if report.skipped and isinstance(report.longrepr, tuple) and not hasattr(report, "wasxfail"):
            self.missing[str(report.longrepr[2]).removeprefix("Skipped: ")] += 1
        if report.outcome == "rerun":  # type: ignore[comparison-overlap]
            self.unstable.append((test, str(report.longrepr)))
        if report.outcome == "failed":
            self.failed.append((f"{test} ({report.when})", _shortened(report.longreprtext)))
        measured = self.measured[test]
        measured[report.when or ""] = report.duration
        measured.update(dict(report.user_properties))
        if report.when == "teardown":
            self._say_time()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.programs.update(getattr(node, "workeroutput", {}).get("programs", {}))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if len(self.unstable) > MOST_UNSTABLE and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.with_times:
            folder = session.config.rootpath / ".pytest_cache"
            folder.mkdir(exist_ok=True)
            text = json.dumps({"tests": self.measured, "programs": self.programs, "wall": self._elapsed()})
            (folder / f"times-{self.tier}.json").write_text(text)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        budgets = BUDGETS_S.get(self.tier, {})
        terminalreporter.section(f"{self._elapsed():.0f} s, tier {self.tier}; seconds of all workers by ring")
        for name in sorted(self.seconds, key=RINGS.index):
            budget = budgets.get(name)
            over = budget is not None and self.seconds[name] > budget
            write(
                f"{name:12} {self.tests[name]:5} tests {self.seconds[name]:6.0f} s"
                f"{'' if budget is None else f' of {budget} s'}{'   OVER ITS BUDGET' if over else ''}",
                red=over,
            )
        for why, count in self.missing.items():
            write(f"not run: {count} tests: {why}", yellow=True)
        for test, failure in self.unstable:
            write(f"unstable, passed or failed when run again: {test}; at first:", yellow=True)
            write(failure)
        if len(self.unstable) > MOST_UNSTABLE:
            write(f"failed: more than {MOST_UNSTABLE} tests were unstable", red=True)

    def pytest_unconfigure(self) -> None:
        """Say last of all what failed: of a long output often only the end is kept."""
        if reporter := self._terminal():
            for test, failure in self.failed[:MOST_LISTED]:
                reporter.write_line(f"failed: {test}\n{failure}")

    def _say_time(self) -> None:
        reporter = self._terminal()
        if reporter and self._elapsed() >= self._time_is_said_at:
            self._time_is_said_at += TIME_SAID_EVERY_S
            reporter.ensure_newline()
            reporter.write_line(f"{sum(self.tests.values())} tests in {self._elapsed():.0f} s")

    def _terminal(self) -> pytest.TerminalReporter | None:
        return self._plugins.get_plugin("terminalreporter")

    def _elapsed(self) -> float:
        return time.monotonic() - self.began


def _shortened(failure: str) -> str:
    """Return the lines of a failure that say what was wrong, or else its last lines, none of them long."""
    lines = failure.splitlines()
    said = [line for line in lines if line.startswith("E  ")] or lines
    return "\n".join(line[:200] for line in (said if len(said) <= 12 else [*said[:4], "  ...", *said[-7:]]))


def _without_group(nodeid: str) -> str:
    """Return the test's own id; xdist adds `@group`."""
    return nodeid.rpartition("@")[0] if nodeid.rfind("@") > nodeid.rfind("]") else nodeid


class Measured:
    """A meter of fixtures and CPU in a process that runs tests with `--times`."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._process = psutil.Process()
        self._programs: dict[int, tuple[str, float]] = {}
        self._fixtures: dict[str, float] = {}
        self._cpu_before = self._total = self._sampled_at = 0.0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        threading.Thread(target=self._sample_often, daemon=True).start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        self._fixtures = {}
        self._cpu_before = self._sampled()
        item.user_properties.append(("fixtures", self._fixtures))
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        try:
            return (yield)
        finally:
            item.user_properties.append(("cpu", max(0.0, self._sampled() - self._cpu_before)))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[Any]:
        began = time.monotonic()
        try:
            return (yield)
        finally:
            self._fixtures[fixturedef.argname] = time.monotonic() - began

    def pytest_sessionfinish(self) -> None:
        self._ended.set()
        programs: Counter[str] = Counter({"not seen in a sample": self._sample()})
        for name, cpu in self._programs.values():
            programs[name] += cpu
            programs["not seen in a sample"] -= cpu
        getattr(self._config, "workeroutput", {})["programs"] = dict(programs)

    def _sample_often(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            self._sample()

    def _sampled(self) -> float:
        """Return the CPU seconds as of a sample that is half a second old at most: each costs some itself."""
        return self._total if time.monotonic() - self._sampled_at < _SAMPLE_S / 4 else self._sample()

    def _sample(self) -> float:
        """Return the CPU seconds of this process, of those below it, and of those that they waited for."""
        total = 0.0
        with self._lock:
            for process in (self._process, *self._process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    own = times.user + times.system
                    total += own + times.children_user + times.children_system
                    name = "the tests' own processes" if process == self._process else process.name()
                    self._programs[process.pid] = (name, own)
            self._total, self._sampled_at = total, time.monotonic()
        return total
