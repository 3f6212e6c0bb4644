"""The arguments `pipeline=`, `tables=` and flags, as a DAG's author or a rendered template gives them."""

from __future__ import annotations

import ast
import os
from collections.abc import Sequence
from typing import Any

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline

_TEMPLATE_MARKS = ("{{", "{%", "{#")

PipelineArgument = Pipeline | dict[str, Any] | str | os.PathLike[str]


def read_pipeline(value: PipelineArgument) -> Pipeline:
    """Return the pipeline that an argument identifies.

    :param value: a Pipeline, a dict of its fields, JSON text, or the path of a file
    :raises ConfigError: for an invalid pipeline, and for another type
    """
    if isinstance(value, Pipeline):
        return value
    if isinstance(value, dict):
        return Pipeline.from_dict(value)
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return Pipeline.from_json(value)
    if isinstance(value, str | os.PathLike):
        return Pipeline.read(os.fspath(value))
    raise ConfigError(
        f"pipeline: cannot be a {type(value).__name__}", "pass a Pipeline, a dict, JSON text or a path"
    )


def check_at_parse_time(value: object) -> None:
    """Raise ConfigError for an invalid dict without templates, so that the DAG is not imported.

    A dict with templates or with results of other tasks, JSON text and a file are checked when the task runs.
    """
    if isinstance(value, dict) and _is_literal(value):
        Pipeline.from_dict(value)


def _is_literal(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_literal(item) for pair in value.items() for item in pair)
    if isinstance(value, list | tuple):
        return all(map(_is_literal, value))
    if isinstance(value, str):
        return not any(mark in value for mark in _TEMPLATE_MARKS)
    return value is None or isinstance(value, bool | int | float)


def read_tables(value: Sequence[str] | str | None) -> list[str]:
    """Return table names. Empty names and the text `None`, which a template renders, are left out.

    :param value: a list, a comma-separated string, the text of a rendered list, or None
    :raises ConfigError: for names that are not strings
    """
    if value is None:
        return []
    if isinstance(value, str):
        value = _literal(value) if value.lstrip().startswith("[") else value.split(",")
    names = [name.strip() if isinstance(name, str) else name for name in value]
    if not all(isinstance(name, str) for name in names):
        raise ConfigError("tables: must be a list of strings")
    return [name for name in names if name and name != "None"]


def parse_tables(names: Sequence[str]) -> list[TableName]:
    """Return the tables that names identify.

    :param names: names as `SCHEMA.TABLE`
    :raises ConfigError: for a name that is not valid
    """
    try:
        return [TableName.parse(name) for name in names]
    except ValueError as error:
        raise ConfigError(f"tables: {error}", "name each table as SCHEMA.TABLE") from None


def read_flag(name: str, value: bool | str) -> bool:
    """Return a flag. Text is not guessed, because a guess could start a new epoch.

    :param name: the argument, for the error
    :param value: a bool, or the text that a template prints for it
    :raises ConfigError: for any other text
    """
    known = {"true": True, "false": False}
    if isinstance(value, bool):
        return value
    if str(value).strip().lower() in known:
        return known[str(value).strip().lower()]
    raise ConfigError(f"{name}: {value!r} must be true or false")


def _literal(text: str) -> list[Any]:
    try:
        found = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        raise ConfigError(f"tables: {text!r} is not a list", 'give it as ["public.orders"]') from None
    return list(found)
