"""The commit-msg hook accepts imperative subjects of at most 72 characters, and rejects others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HOOK = Path(__file__).parents[2] / "setup" / "commit_message.py"
ACCEPTED = (
    "Stop lagging tables from starving other tables of merge slots",
    "Process WAL\n\nThe body. It ends with a period.",
    "Add a rule\n# a comment of Git",
    "Merge branch 'x' of somewhere with a long name, which Git has written by itself.",
    "Feed the broker" + "x" * 57,
)
REJECTED = {
    "": "empty",
    "Add " + "x" * 69: "73 characters",
    "Add a rule.": "period",
    "add a rule": "capital",
    "Added a rule": "imperative",
    "Adds a rule": "imperative",
    "Tables that lag keep none out": "imperative",
    "What Maven fetches need not be jars": "imperative",
    "Have tables wait": "imperative",
    "Add a rule\nand its test": "blank",
}


def run(message: str, folder: Path) -> subprocess.CompletedProcess[str]:
    file = folder / "message"
    file.write_text(message, encoding="utf-8")
    return subprocess.run([sys.executable, str(HOOK), str(file)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("message", ACCEPTED)
def test_plain_subject_is_accepted(message: str, tmp_path: Path) -> None:
    done = run(message, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("message", REJECTED)
def test_other_subject_is_rejected_with_the_reason(message: str, tmp_path: Path) -> None:
    done = run(message, tmp_path)
    assert done.returncode == 1
    assert REJECTED[message] in done.stderr
