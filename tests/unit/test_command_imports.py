"""A command imports what it does its work with, and that only when it runs: `--help` loads no library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("numba", "numpy", "pandas", "pyarrow", "deltalake", "psycopg2", "pyspark", "airflow", "nats", "pika")
PROGRAM = """
import json, sys
from airflow_provider_pgrepl.__main__ import main
try:
    code = main(json.loads(sys.argv[1]))
except SystemExit as end:
    code = end.code
print(json.dumps([code, [name for name in json.loads(sys.argv[2]) if name in sys.modules]]))
"""


def run(*arguments: str, heavy: tuple[str, ...] = HEAVY) -> tuple[int, list[str]]:
    """Run `pgrepl` in a new process; return its exit code and which of the libraries were imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(arguments), json.dumps(heavy)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    code, found = json.loads(done.stdout.splitlines()[-1])
    return code, found


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["events", "try", "--help"], 0),
        (["no-such-command"], 78),
        (["status", "/nowhere/pipeline.json"], 78),
    ],
)
def test_command_line_imports_no_library_to_parse_arguments(arguments: list[str], code: int) -> None:
    assert run(*arguments) == (code, [])


def test_status_imports_no_compiler_and_no_spark(tmp_path: Path) -> None:
    """A status is asked for often, and numba alone takes a second of a processor to import."""
    file = tmp_path / "pipeline.json"
    file.write_text(json.dumps({"name": "shop", "lake": str(tmp_path), "tables": ["public.*"]}))
    code, found = run("status", str(file), heavy=("pyarrow", "numba", "pyspark", "airflow"))
    assert (code, found) == (78, ["pyarrow"]), "without a DSN it ends once everything was imported"
