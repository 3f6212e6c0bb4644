"""An app's process ends with its exit code, whatever libraries do while an interpreter ends."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

# Acts as a library whose native thread outlives the modules that it uses, and crashes without them.
CRASHES_AT_ITS_END = """
import atexit, os, signal, sys
from airflow_provider_pgrepl.replication.app.process import leave
class Library:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGSEGV):
        kill(pid, number)
library = Library()
atexit.register(print, "exit function")
print("done")
"""


@pytest.mark.parametrize("code", [0, 75])
def test_process_that_leaves_runs_exit_functions_and_ends_with_its_code(code):
    result = run(f"{CRASHES_AT_ITS_END}leave({code})")
    assert (result.returncode, result.stdout.split("\n")) == (code, ["done", "exit function", ""])


def test_process_that_ends_by_itself_would_crash():
    assert run(f"{CRASHES_AT_ITS_END}sys.exit(0)").returncode == -signal.SIGSEGV


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
