"""Hints name commands, options and operators that there are: each command line is parsed as it stands."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache

import pytest

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.__main__ import _parser
from airflow_provider_pgrepl.cli.apps import split
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.targets import TARGETS
from tests.support.hint_texts import PACKAGE, VALUE, Text, texts_of_code, texts_of_reference

NO_COMMANDS = frozenset(
    {"looked", "found", "left", "ended", "maintained", "compacted", "joined", "dropped", "let", "deleted"}
    | {"failed", "to"}
)
"""Words after `pgrepl` in metrics and logs that are no commands."""
NAME_OF_CONNECTION = re.compile(r"pgrepl (?:\w+ )?\{")
COMMAND = re.compile(r"(?<![\w-])pgrepl [a-z][a-z-]*(?: (?:'[^']*'|\"[^\"]*\"|[^\s;:()`'\"])+)*")
ARGUMENT = re.compile(r"-.*|.*[/.…\d].*|[A-Z]+|try")
"""Words after a command that are its arguments and not part of the sentence: options, names, paths."""
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
EXTRA = re.compile(r"airflow-provider-pgrepl\[([^\]]+)\]")
OF_OTHERS = frozenset(
    {"--master", "--deploy-mode", "--name", "--packages", "--jars"}
    | {"--ulimit", "--schema", "--schema-only", "--exclude-schema"}
    | {"--db-parameter-group-name", "--db-cluster-parameter-group-name", "--db-instance-identifier"}
    | {"--parameters", "--database-flags", "--resource-group", "--server-name", "--value"}
    | {"--experimental", "--project-ref", "--config"}
)
"""Options of spark-submit; of containers, of pg_dump; of the command lines of providers."""


@cache
def texts() -> tuple[Text, ...]:
    """Return all texts. Parses the whole package, and so not while tests are collected."""
    return (*texts_of_code(), *texts_of_reference())


def filled(text: str) -> str:
    """Return a text with its values filled in: an LSN for an LSN, the name of a table for any other."""
    return VALUE.sub(lambda found: "0/1" if re.search("lsn|^.at.$", found[0], re.I) else "public.t", text)


@cache
def commands() -> dict[str, list[str]]:
    """Return the words of each command line, by the text that names it."""
    return dict(_commands())


def _commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the command lines in the texts, and the words of each up to where the sentence continues."""
    for file, text in texts():
        if NAME_OF_CONNECTION.match(text) or "SELECT" in text:
            continue
        for found in (found[0] for found in COMMAND.finditer(filled(text))):
            _, command, *words = shlex.split(found.rstrip(".,"))
            if command in NO_COMMANDS:
                continue
            end = next((n for n, word in enumerate(words) if not ARGUMENT.fullmatch(word.rstrip(","))), None)
            arguments = words[:end]
            end = next((n + 1 for n, word in enumerate(arguments) if word.endswith(",")), None)
            yield f"{file}: {found}", [command, *(word.rstrip(",") for word in arguments[:end])]


def test_command_lines_are_found_in_code_and_reference() -> None:
    files = {where.partition(":")[0] for where in commands()}
    assert {"errors.py", "replication/receiver/receiver.py", "docs/reference/errors.md"} <= files
    assert ["skip", "FILE.json", "--lsn", "0/1"] in commands().values()


def test_each_command_of_a_hint_is_parsed_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    """A command that is only mentioned, such as `pgrepl status`, gets a pipeline file."""
    for where, (command, *words) in commands().items():
        file = [] if "FILE.json" in words else ["FILE.json"]
        own, _ = split([command, *file, *(word.replace("LSN", "0/1") for word in words)])
        try:
            known, more = _parser().parse_known_args(own)
        except SystemExit:
            pytest.fail(f"{where}: {capsys.readouterr().err}")
        assert not more, where
        tables = getattr(known, "tables", None)
        for table in tables if isinstance(tables, list) else ():
            TableName.parse(f"public.{table}" if table.isupper() else table)


def test_tables_of_a_hint_are_arguments_as_a_shell_splits_them() -> None:
    tables = [TableName("public", "a"), TableName("My Schema", "b,c")]
    command = errors.remove(*tables).partition(", or ")[0]
    parsed = _parser().parse_args(shlex.split(command)[1:])
    assert [TableName.parse(table) for table in parsed.tables] == tables


def test_options_of_texts_are_options_of_ours() -> None:
    known = OF_OTHERS | {option for parser in _parsers(_parser()) for option in parser._option_string_actions}
    sentences = [text for _, text in texts() if " " in text.strip()]
    named = {option for text in sentences for option in OPTION.findall(text)}
    assert {"--new-epoch", "--give-up", "--yes"} <= named
    assert named <= known, named - known


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from _parsers(one)


def test_operators_of_texts_are_there_with_their_arguments() -> None:
    """The operators are read from the source, without Airflow."""
    classes: dict[str, str] = {}
    for folder in ("operators", "sensors"):
        for file in (PACKAGE / folder).glob("*.py"):
            text = file.read_text("utf-8")
            classes |= {n.name: text for n in ast.parse(text).body if isinstance(n, ast.ClassDef)}
    named = {name for _, text in texts() for name in re.findall(r"\bPg\w+(?:Operator|Sensor)\b", text)}
    assert {"PgSnapshotOperator", "PgResnapshotOperator"} <= named
    assert named <= classes.keys(), named - classes.keys()
    for _, text in texts():
        for operator, argument in re.findall(r"\b(Pg\w+Operator) with (\w+)=", text):
            assert f"{argument}:" in classes[operator]


def test_extras_that_texts_install_are_declared() -> None:
    declared = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text("utf-8"))["project"]
    named = {name for _, text in texts() for name in EXTRA.findall(text)}
    assert {"spark", "nats"} <= named
    of_target = "{settings.target}"
    assert of_target in named, "publish names the extra of its target"
    assert (named - {of_target}) | set(TARGETS) <= declared["optional-dependencies"].keys()
