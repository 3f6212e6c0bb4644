"""The end of a test run: budgets, missing parts, unstable tests, and the tables of CONTRIBUTING.md."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.report import BUDGETS_S, MOST_UNSTABLE, Report
from tests.times import tables


class Written:
    """A terminal that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def section(self, title: str) -> None:
        self.lines.append(title)

    def write_line(self, line: str, **_: Any) -> None:
        self.lines.append(line)

    def ensure_newline(self) -> None:
        pass


@pytest.fixture
def terminal() -> Written:
    return Written()


@pytest.fixture
def report(tmp_path, terminal) -> Report:
    options = {"tier": "test", "times": True}
    plugins = SimpleNamespace(get_plugin={"terminalreporter": terminal}.get)
    return Report(SimpleNamespace(getoption=options.__getitem__, rootpath=tmp_path, pluginmanager=plugins))


def reported(node: str, seconds: float = 1.0, outcome: str = "passed", why: str | None = None) -> Any:
    skipped = why is not None
    return SimpleNamespace(
        nodeid=node,
        when="setup" if skipped else "call",
        duration=seconds,
        outcome="skipped" if skipped else outcome,
        skipped=skipped,
        longrepr=("file", 1, f"Skipped: {why}") if skipped else "assert 1 == 2",
        longreprtext="\n".join(["def test_a():", *(f"E   {'x' * 300}{n}" for n in range(20)), "test_a.py:1"]),
        user_properties=[("cpu", 2.0), ("fixtures", {"spark": 3.0})],
    )


def lines_of(report: Report) -> list[str]:
    terminal = Written()
    report.pytest_terminal_summary(terminal)
    return terminal.lines


def finish(report: Report, folder: Any) -> pytest.ExitCode:
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK, config=SimpleNamespace(rootpath=folder))
    report.pytest_sessionfinish(session)
    return session.exitstatus


def test_ring_over_its_budget_is_named(report):
    report.pytest_runtest_logreport(reported("tests/unit/test_a.py::test_a", BUDGETS_S["test"]["unit"] + 1.0))
    report.pytest_runtest_logreport(reported("tests/spark/test_b.py::test_b"))
    unit, spark = lines_of(report)[1:]
    assert unit.startswith("unit ")
    assert "OVER ITS BUDGET" in unit
    assert spark.startswith("spark ")
    assert "OVER" not in spark


def test_missing_part_is_one_line_with_the_number_of_its_tests(report):
    for name in ("a", "b"):
        report.pytest_runtest_logreport(
            reported(f"tests/integration/test_a.py::test_{name}", why="no NATS: sh setup/nats.sh")
        )
    assert lines_of(report)[-1] == "not run: 2 tests: no NATS: sh setup/nats.sh"


@pytest.mark.parametrize("more", [0, 1])
def test_run_fails_when_more_tests_were_unstable_than_allowed(report, tmp_path, more):
    for number in range(MOST_UNSTABLE + more):
        report.pytest_runtest_logreport(reported(f"tests/fault/test_a.py::test_{number}", outcome="rerun"))
    unstable = [line for line in lines_of(report) if line.startswith("unstable")]
    assert len(unstable) == MOST_UNSTABLE + more
    assert lines_of(report).count("assert 1 == 2") == len(unstable)
    assert finish(report, tmp_path) == (pytest.ExitCode.TESTS_FAILED if more else pytest.ExitCode.OK)


def test_last_lines_of_a_run_say_what_failed(report, terminal):
    report.pytest_runtest_logreport(reported("tests/unit/test_a.py::test_a"))
    report.pytest_runtest_logreport(reported("tests/unit/test_a.py::test_b", outcome="failed"))
    report.pytest_unconfigure()
    lines = "\n".join(terminal.lines).splitlines()
    assert lines[0] == "failed: tests/unit/test_a.py::test_b (call)"
    assert len(lines) == 13
    assert all(line == "  ..." or line.startswith("E  ") for line in lines[1:])
    assert max(map(len, lines)) == 200


def test_long_run_says_now_and_then_how_far_it_is(report, terminal):
    for minutes in (4.9, 5.1, 5.2, 10.1):
        report.began = time.monotonic() - minutes * 60
        report.pytest_runtest_logreport(reported("tests/unit/test_a.py::test_a"))
        ended = reported("tests/unit/test_a.py::test_a")
        ended.when = "teardown"
        report.pytest_runtest_logreport(ended)
    assert terminal.lines == ["2 tests in 306 s", "4 tests in 606 s"]


def test_measured_runs_become_tables(report, tmp_path):
    report.pytest_runtest_logreport(reported("tests/spark/test_b.py::test_dear@spark-0", 40.0))
    report.programs.update({"java": 12.0})
    finish(report, tmp_path)
    measured = (tmp_path / ".pytest_cache" / "times-test.json").read_text()
    text = tables({"test": json.loads(measured)})
    assert "| `tests/spark` | 1 | 40 | 2 |" in text
    assert "| `spark/test_b.py::test_dear` | test | 0 | 40 | 0 | 2 |" in text
    assert "| `spark` | 3 |" in text
    assert "| java | 12 |" in text
