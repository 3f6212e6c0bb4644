"""A command of `pgrepl`: its arguments for the parser, and the function that runs it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.process import AddArguments
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline

Arguments = argparse.Namespace


@dataclass(frozen=True)
class Option:
    """An argument of a command: its name and its keyword arguments for `argparse`."""

    name: str
    how: dict[str, object]

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(self.name, **self.how)  # type: ignore[arg-type]


def flag(name: str, text: str) -> Option:
    """Return an option without a value. `text`: its help text."""
    return Option(name, {"action": "store_true", "help": text})


@dataclass(frozen=True)
class Command:
    """A command of `pgrepl`.

    :param name: one word, or two for a subcommand: `events try` is `try` below `events`
    :param work: called with the pipeline (only if `has_pipeline`) and the arguments. Returns the exit code.
    :param add: adds further arguments to the parser
    :param is_app: True if arguments after `--` are passed to spark-submit
    """

    name: str
    purpose: str
    work: Callable[..., int]
    options: tuple[Option, ...] = ()
    add: AddArguments | None = None
    has_pipeline: bool = True
    is_app: bool = False
    epilog: str | None = None

    def add_to(self, parent: Any) -> None:
        """Add a parser of its arguments. It stores this command as `command` in the parsed arguments."""
        *_, name = self.name.split()
        parser = parent.add_parser(name, help=self.purpose, description=self.purpose, epilog=self.epilog)
        if self.has_pipeline:
            parser.add_argument("pipeline", metavar="FILE.json", help="the pipeline file")
        if self.add is not None:
            self.add(parser)
        for option in self.options:
            option.add_to(parser)
        parser.set_defaults(command=self)

    def run(self, arguments: Arguments) -> int:
        """Run the command and return its exit code. Raises PgReplError."""
        if not self.has_pipeline:
            return self.work(arguments)
        return self.work(Pipeline.read(arguments.pipeline), arguments)


def add_commands(
    parser: argparse.ArgumentParser, commands: tuple[Command, ...], groups: dict[str, str]
) -> None:
    """Add the parsers of all commands.

    :param groups: the help text of each command group, by the first word of its commands' names
    """
    parents = {
        "": parser.add_subparsers(required=True, metavar="COMMAND", parser_class=process.CommandParser)
    }
    for command in commands:
        group = command.name.rpartition(" ")[0]
        if group not in parents:
            inner = parents[""].add_parser(group, help=groups[group], description=groups[group])
            parents[group] = inner.add_subparsers(
                required=True, metavar="COMMAND", parser_class=process.CommandParser
            )
        command.add_to(parents[group])
