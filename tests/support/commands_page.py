"""Writes docs/reference/commands.md from the commands: `python -m tests.support.commands_page`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from airflow_provider_pgrepl.cli.command import Command
from airflow_provider_pgrepl.cli.commands import COMMANDS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "commands.md"
_HEAD = """# Commands

`pgrepl COMMAND FILE.json …` runs, inspects and repairs a pipeline without Airflow, and so does
`python -m airflow_provider_pgrepl`. The source's connection string is read from `PGREPL_DSN`. The state
database's is read from `PGREPL_STATE_DSN`, and is the source's if that variable is unset.
`PGREPL_PRIMARY_DSN` is that of the primary, [for a source that is a
standby](../how-to/replicate-from-a-standby.md).
[Exit codes](exit-codes.md) are the same for all commands.

This page is generated from the commands: `.venv/bin/python -m tests.support.commands_page`.
"""


def text() -> str:
    """Return the page."""
    return "\n".join([_HEAD, *(line for command in COMMANDS for line in _section(command))])


def _section(command: Command) -> Iterator[str]:
    inner = argparse.ArgumentParser(add_help=False).add_subparsers()
    command.add_to(inner)
    (parser,) = inner.choices.values()
    arguments = [one for one in parser._actions if one.dest not in ("help", "pipeline")]
    words = ["FILE.json"] if command.has_pipeline else []
    yield f"## {command.name}\n"
    yield f"`pgrepl {' '.join([command.name, *words, *map(_usage, arguments)])}`: {command.purpose}.\n"
    if not arguments:
        return
    yield "| argument | |\n|---|---|"
    for one in arguments:
        default = "" if one.default in (None, False, [], "") else f"; `{one.default}` unless given"
        shown = _shown(one).replace("|", "\\|")
        yield f"| `{shown}` | {(one.help or '').replace('%%', '%')}{default} |"
    yield ""


def _usage(action: argparse.Action) -> str:
    return _shown(action) if action.required and action.nargs != "*" else f"[{_shown(action)}]"


def _shown(action: argparse.Action) -> str:
    named = action.metavar or "|".join(map(str, action.choices or ()))
    value = f"{named} …" if action.nargs in ("*", "+") else str(named)
    words = [*action.option_strings[-1:], *([] if action.nargs == 0 else [value])]
    return " ".join(words)


if __name__ == "__main__":
    PAGE.write_text(text())
