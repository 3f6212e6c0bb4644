"""errors.py: errors travel between processes, say what stops and if a retry helps, and are documented."""

from __future__ import annotations

import logging
import pickle
import re
from pathlib import Path

import pytest

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import PgReplError, Remedy, Retry, Scope
from airflow_provider_pgrepl.replication.app import process, verify
from airflow_provider_pgrepl.replication.runtime import process_io

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
CLASSES = sorted(
    (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PgReplError)),
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_survives_pickling(kind: type[PgReplError]) -> None:
    error = kind("what happened", "what to do")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (again.message, again.hint, str(again)) == (error.message, error.hint, str(error))
    assert str(pickle.loads(pickle.dumps(kind("alone")))) == "alone"
    for remedy in (Remedy.GRANT, None):
        assert pickle.loads(pickle.dumps(kind("what", "to do", remedy))).remedy is remedy


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_says_how_much_stops_and_whether_a_retry_helps(kind: type[PgReplError]) -> None:
    assert kind.scope in Scope
    assert kind.retry in Retry
    expected = process.RETRY_MAY_HELP if kind.retry is Retry.TIMED else process.WILL_NOT_HELP
    assert process.exit_code(kind("")) == expected


def test_the_reference_lists_every_error_as_it_is() -> None:
    text = (REFERENCE / "errors.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \| (table|pipeline) \| (yes|no) \| \S", text, re.MULTILINE)
    actual = {
        (kind.__name__, kind.scope.value, "yes" if kind.retry is Retry.TIMED else "no")
        for kind in CLASSES
        if kind is not PgReplError
    }
    assert set(listed) == actual
    assert len(listed) == len(actual)


def test_the_tree_in_the_code_lists_every_error() -> None:
    tree = dict(
        re.findall(
            r"[├└]─ (\w+) +\S.*?(\((?:retry|table|retry, table)\))?$", errors.__doc__ or "", re.MULTILINE
        )
    )
    marks = {
        "(retry)": (Retry.TIMED, Scope.PIPELINE),
        "(table)": (Retry.NEVER, Scope.TABLE),
        "(retry, table)": (Retry.TIMED, Scope.TABLE),
    }
    plain = (Retry.NEVER, Scope.PIPELINE)
    assert {name: marks.get(mark, plain) for name, mark in tree.items()} | {"PgReplError": plain} | {
        "SourceError": plain
    } == {kind.__name__: (kind.retry, kind.scope) for kind in CLASSES}


def test_the_reference_lists_every_exit_code() -> None:
    text = (REFERENCE / "exit-codes.md").read_text(encoding="utf-8")
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    assert listed == {
        process.DONE,
        verify.DIFFERENT,
        verify.NOT_COMPARED,
        process.CRASHED,
        process.RETRY_MAY_HELP,
        process.WILL_NOT_HELP,
    }


def test_wrong_arguments_will_not_help_again() -> None:
    with pytest.raises(SystemExit) as caught:
        process.run("replicate", ["--nonsense"], lambda parser: None, lambda pipeline, arguments: 0)
    assert caught.value.code == 78


@pytest.mark.parametrize(
    "hostile", ["\x1b[31mred\x1b[0m", "a\rb", "\x07", "\u202eflow", "\x9b2J", "\ud800", "\x00"]
)
def test_an_error_shows_no_control_characters(hostile):
    error = errors.TableError(f"public.t: {hostile}", f"mend {hostile}")
    for text in (str(error), error.message, error.hint, *error.args):
        assert text.replace("\n", "").isprintable()
    again = pickle.loads(pickle.dumps(error))
    assert (again.message, again.hint) == (error.message, error.hint)


def test_lines_of_an_error_stay_and_those_of_a_name_do_not():
    assert errors.escaped("a\nb\tc") == "a\nb\tc"
    assert errors.one_line("a\nb") == "a\\nb"


def test_log_lines_contain_no_control_characters():
    record = logging.LogRecord("x", logging.INFO, "x.py", 1, "copied %s", ("\x1b]0;title\x07",), None)
    for name in ("", process_io.JSON):
        assert process_io.formatter(name).format(record).isprintable()
    assert process_io.parse("24/01/01 00:00:00 WARN \x1b[2Jgone").text == "\\x1b[2Jgone"
