"""A test run that hangs outside its tests says where; one whose time is over begins no further test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.time_limits import END_VARIABLE

CONFTEST = """
import time

from tests.time_limits import Deadline, Watchdog


def pytest_configure(config):
    config.pluginmanager.register(Watchdog(config))
    config.pluginmanager.register(Deadline())


def pytest_{hook}({arguments}):
    {body}
"""


def run(
    folder: Path, hook: str, arguments: str, body: str, hang_s: int = 300
) -> subprocess.CompletedProcess[str]:
    """Run two tests with a hook of their own; a hang of `hang_s` ends them."""
    (folder / "conftest.py").write_text(CONFTEST.format(hook=hook, arguments=arguments, body=body))
    (folder / "test_two.py").write_text("def test_first(): pass\ndef test_second(): pass\n")
    (folder / "pytest.ini").write_text(f"[pytest]\nfaulthandler_timeout = {hang_s}\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "no:randomly", "-p", "no:cacheprovider", str(folder)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    ("hook", "arguments", "body"),
    [
        ("runtest_logfinish", "nodeid", "time.sleep(600 if 'first' in nodeid else 0)"),
        ("unconfigure", "", "time.sleep(600)"),
    ],
    ids=["between tests", "at the end"],
)
def test_hanging_run_says_where_and_ends(tmp_path, hook, arguments, body):
    ended = run(tmp_path, hook, arguments, body, hang_s=5)
    assert ended.returncode == 1, ended.stdout
    assert f"in pytest_{hook}" in ended.stderr


def test_no_test_begins_after_the_end_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv(END_VARIABLE, "1000000000")
    ended = run(tmp_path, "runtest_logfinish", "nodeid", "pass")
    assert ended.returncode == 0, ended.stdout
    assert "2 skipped" in ended.stdout
    assert "no time was left for test_two.py" in ended.stdout


def test_all_tests_run_before_the_end_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv(END_VARIABLE, "100000000000")
    ended = run(tmp_path, "runtest_logfinish", "nodeid", "pass")
    assert "2 passed" in ended.stdout
