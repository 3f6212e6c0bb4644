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
codes = []
for arguments in json.loads(sys.argv[1]):
    try:
        codes.append(main(arguments))
    except SystemExit as end:
        codes.append(end.code)
print(json.dumps([codes, [name for name in json.loads(sys.argv[2]) if name in sys.modules]]))
"""


def run(*commands: tuple[str, ...], heavy: tuple[str, ...] = HEAVY) -> tuple[list[int], list[str]]:
    """Run commands in a new process; return their exit codes and which of the libraries were imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands), json.dumps(heavy)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    codes, found = json.loads(done.stdout.splitlines()[-1])
    return codes, found


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["events", "try", "--help"], 0),
        (["no-such-command"], 78),
        (["status", "/nowhere/pipeline.json"], 78),
    ],
)
def test_command_line_imports_no_library_to_parse_arguments(arguments: list[str], code: int) -> None:
    assert run(tuple(arguments)) == ([code], [])


COMMANDS = (
    *(("status",), ("pause", "public.t"), ("resume", "public.t"), ("retry",), ("remove", "public.t")),
    *(("drift",), ("check-migration", "/dev/null"), ("maintain",), ("teardown",), ("skip", "--lsn", "0/1")),
)


def test_commands_that_read_no_rows_import_no_compiler_and_no_spark(tmp_path: Path) -> None:
    """They are run often, and numba and pandas alone take most of a second of a processor to import."""
    file = tmp_path / "pipeline.json"
    file.write_text(json.dumps({"name": "shop", "lake": str(tmp_path), "tables": ["public.*"]}))
    heavy = ("pyarrow", "numba", "pandas", "pyspark", "airflow")
    commands = [(name, str(file), *more) for name, *more in COMMANDS]
    codes, found = run(*commands, heavy=heavy)
    assert codes == [78] * len(commands), "without a DSN each ends once everything was imported"
    assert found == ["pyarrow"]
