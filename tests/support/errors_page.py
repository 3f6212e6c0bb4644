"""Writes the table of docs/reference/errors.md from the classes: `python -m tests.support.errors_page`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import PgReplError, Retry
from airflow_provider_pgrepl.replication.app.process import exit_code

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "errors.md"
BEGIN, END = "<!-- generated from errors.py: begin -->\n", "<!-- generated from errors.py: end -->\n"


def text() -> str:
    """Return the page: a row for each error class between the marks, and the rest of the file as it is."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{''.join(_rows())}{END}{after}"


def _rows() -> Iterator[str]:
    yield "| error | stops | retry | exit code | what happened | what to do |\n|---|---|---|---|---|---|\n"
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, PgReplError) and kind is not PgReplError:
            helps = "yes" if kind.retry is Retry.TIMED else "no"
            happened = " ".join((kind.__doc__ or "").split())
            yield (
                f"| `{kind.__name__}` | {kind.scope.value} | {helps} | {exit_code(kind(''))} | {happened} |"
                f" {kind.advice} |\n"
            )


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
