"""Validation of a Pipeline. Each error names the field."""

from __future__ import annotations

import dataclasses
import json
import math
import posixpath
import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, get_type_hints

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.postgres.names import ColumnName, TableName
from airflow_provider_pgrepl.replication.settings.fields import describe, is_of
from airflow_provider_pgrepl.replication.settings.lake import (
    EXAMPLES,
    fault_of_uri,
    faults_of_names,
    is_object_store,
)
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings, parse_publisher
from airflow_provider_pgrepl.replication.settings.tables import (
    POLICIES,
    VALUE_CHOICES,
    LakeType,
    PartitionBy,
    overrides,
)

if TYPE_CHECKING:
    from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline

_SLOT_NAME = re.compile(r"[a-z0-9_]{1,63}")
_PIPELINE_NAME = re.compile(r"[a-z0-9_]{1,55}")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_QUOTED = re.compile(r'"[^"]*"')
_CREDENTIALS = re.compile(r"[A-Za-z0-9+.-]+://[^/@]*:[^/@]*@")
# JSON can represent these characters, but neither PostgreSQL nor a file system accepts them.
_UNUSABLE = re.compile("[\0\ud800-\udfff]")
_NAME_BYTES = 63
# Upper limits: those of times allow date arithmetic; other numbers stay exact as floats.
_MOST = {"h": 876_000, "s": 1_000_000_000}
_MOST_OF_ALL = 2**53
_MAY_BE_ZERO = {"trigger_interval_s", "reconnect_s", "freshness_s"}
_TYPES_REFERENCE = "see Choices in docs/reference/types.md"


def check_texts(pipeline: Pipeline) -> None:
    """Raise ConfigError for a value of a wrong type, for text with NUL or a surrogate, or for a pipeline name
    that cannot be part of a slot's name."""
    _check_types(pipeline)
    for setting in dataclasses.fields(pipeline):
        if any(map(_UNUSABLE.search, _texts(getattr(pipeline, setting.name)))):
            raise ConfigError(f"{setting.name}: a text in it holds a NUL or half a character")
    if not _PIPELINE_NAME.fullmatch(pipeline.name):
        raise ConfigError(
            f"name: {pipeline.name!r} may hold only a-z, 0-9 and _, and at most 55 of them",
            "it becomes part of the slot's name, and PostgreSQL allows no other characters there",
        )


def check_settings(pipeline: Pipeline) -> None:
    """Raise ConfigError for any other invalid setting. Slot and publication must have their names already."""
    if not _SLOT_NAME.fullmatch(pipeline.slot):
        raise ConfigError(f"slot: {pipeline.slot!r} may hold only a-z, 0-9 and _, and at most 63 of them")
    if len(pipeline.publication.encode()) > _NAME_BYTES:
        raise ConfigError(f"publication: is longer than the {_NAME_BYTES} bytes that PostgreSQL allows")
    _check_lake(pipeline)
    _check_catalog_names(pipeline)
    _check_tables(pipeline)
    _check_numbers(pipeline)
    _check_choices(pipeline)
    _check_paces(pipeline)
    _check_publishers(pipeline)


def _check_publishers(pipeline: Pipeline) -> None:
    first: dict[tuple[str, str], str] = {}
    for name, given in pipeline.publishers.items():
        settings = parse_publisher(pipeline.name, name, given, has_lake_tables=pipeline.has_lake_tables)
        for text in settings.tables or ():
            _check_table(f"publishers: {name}: tables", text, pattern_allowed=True)
        _check_business(f"publishers: {name}", pipeline, settings)
        other = first.setdefault((settings.conn_id, settings.place), name)
        if other != name:
            raise ConfigError(
                f"publishers: {other} and {name} both send to {settings.place}",
                "give each a place of its own: consumers could not tell what of each they have",
            )


def _check_business(where: str, pipeline: Pipeline, settings: PublisherSettings) -> None:
    """Raise ConfigError if a source of business events does not reach the publisher.

    The tables of its rules must be in `tables`, and its prefixes in the pipeline's `message_prefixes`.
    """
    patterns = [text for text in settings.tables or () if text.endswith(".*")]
    schemas = {TableName.parse(f"{text[:-1]}any").schema for text in patterns}
    named = {TableName.parse(text) for text in settings.tables or () if text not in patterns}
    for table in settings.rules:
        if settings.tables is not None and table not in named and table.schema not in schemas:
            raise ConfigError(
                f"{where}: {table}, which outbox or transform names, is none of tables",
                "name it in tables, too",
            )
    kept = pipeline.message_prefixes
    if "*" not in kept and (unkept := sorted(set(settings.messages) - set(kept))):
        raise ConfigError(
            f"{where}: messages: the pipeline does not keep those of {', '.join(unkept)}",
            "name the prefix in message_prefixes of the pipeline",
        )


def columns_of(field: str, names: Iterable[str]) -> set[ColumnName]:
    """Return the columns that a field lists. Raises ConfigError."""
    try:
        return {ColumnName.parse(name) for name in names}
    except ValueError as error:
        raise ConfigError(f"{field}: {error}") from None


def _check_catalog_names(pipeline: Pipeline) -> None:
    for setting, named, fault in faults_of_names(
        pipeline.target_database, pipeline.target_table, pipeline.target_schemas, pipeline.target_tables
    ):
        raise ConfigError(f"{setting}: {fault}" if named is None else f"{setting}: {named!r}: {fault}")
    for text in pipeline.target_tables:
        _check_table("target_tables", text, pattern_allowed=False)


def _is_root(lake: str) -> bool:
    """Return True if a path is `/` after it is normalized."""
    return lake.startswith("/") and posixpath.normpath(lake).strip("/") == ""


def _check_lake(pipeline: Pipeline) -> None:
    if not pipeline.lake.strip():
        raise ConfigError("lake: is empty", "give the path under which the lake tables are to be")
    if _CREDENTIALS.match(pipeline.lake):
        raise ConfigError(
            "lake: the URI holds credentials",
            "those of a store come from the environment or an Airflow connection, never from the file",
        )
    if _is_root(pipeline.lake):
        raise ConfigError(
            "lake: is the root of the file system, in which folders of others lie",
            "give a folder for this pipeline alone, as /srv/lake",
        )
    if pipeline.lake != pipeline.lake.strip():
        raise ConfigError("lake: begins or ends with a blank", "give the path without it")
    if _SCHEME.match(pipeline.lake) and (fault := fault_of_uri(pipeline.lake)):
        raise ConfigError(
            f"lake: {fault}",
            f"give {EXAMPLES}",
        )
    if pipeline.lake_conn_id is not None and not is_object_store(pipeline.lake):
        raise ConfigError(
            "lake_conn_id: the lake is a directory",
            "leave it out, or give the URI of a place in an object store",
        )
    if any(mark in pipeline.lake for mark in ("{{", "{%")):
        raise ConfigError(
            f"lake: {pipeline.lake!r} holds a template that was not rendered",
            "Airflow renders templates in a dict or JSON text that an operator has as `pipeline`, in no file:"
            " write the path itself",
        )
    if "%" in pipeline.lake:
        raise ConfigError("lake: must not contain %", "Delta readers decode it in some places only")
    if not (pipeline.lake.startswith(("/", "~")) or _SCHEME.match(pipeline.lake)):
        raise ConfigError(
            f"lake: {pipeline.lake!r} is a relative path, and each process would start from its own folder",
            "give the whole path, as /srv/lake",
        )


def _check_tables(pipeline: Pipeline) -> None:
    if not pipeline.tables:
        raise ConfigError("tables: is empty", 'list tables or patterns, as ["public.orders", "sales.*"]')
    for name in ("tables", "insert_only"):
        for text in getattr(pipeline, name):
            _check_table(name, text, pattern_allowed=name == "tables")


def _check_numbers(pipeline: Pipeline) -> None:
    for name, value in vars(pipeline).items():
        _check_number(name, name, value)
    if pipeline.points_keep_h > pipeline.changelog_retention_h:
        raise ConfigError("points_keep_h: must not be longer than changelog_retention_h")
    if pipeline.on_wal_budget == "drop_slot" and pipeline.wal_budget is None:
        raise ConfigError(
            "on_wal_budget: drop_slot needs a wal_budget", "set wal_budget to bytes of WAL, as 53687091200"
        )


def _check_number(where: str, name: str, value: object) -> None:
    """Raise ConfigError if a setting is a number that is out of range. `name` determines the range."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    if value > (most := _MOST.get(name.rpartition("_")[2], _MOST_OF_ALL)):
        raise ConfigError(f"{where}: must not be more than {most}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}: {value} is not a finite number")
    if value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
        least = "must not be negative" if name in _MAY_BE_ZERO else "must be greater than 0"
        raise ConfigError(f"{where}: {value} {least}")


def _check_paces(pipeline: Pipeline) -> None:
    """Raise ConfigError if `max_staleness_s` is below `freshness_s`, globally or for a table."""
    for table, given in ((None, {}), *pipeline.per_table.items()):
        own = {name: given.get(name, getattr(pipeline, name)) for name in ("freshness_s", "max_staleness_s")}
        if own["max_staleness_s"] < own["freshness_s"]:
            where = "" if table is None else f"per_table: {table}: "
            raise ConfigError(
                f"{where}max_staleness_s: {own['max_staleness_s']} must not be less than"
                f" freshness_s, {own['freshness_s']}"
            )


def _check_choices(pipeline: Pipeline) -> None:
    for column, given in pipeline.types.items():
        _lake_type(f"types: {column}", given)
    if not _is_of_numeric(pipeline.unconstrained_numeric):
        raise ConfigError(
            f"unconstrained_numeric: {pipeline.unconstrained_numeric!r} must be"
            " string or decimal(p,s), with p to 38",
            _TYPES_REFERENCE,
        )
    texts, excluded = (
        columns_of("text_columns", pipeline.text_columns),
        columns_of("exclude_columns", pipeline.exclude_columns),
    )
    typed = columns_of("types", pipeline.types)
    for first, second, names in (
        ("text_columns", "exclude_columns", texts & excluded),
        ("types", "exclude_columns", typed & excluded),
        ("types", "text_columns", typed & texts),
    ):
        if names:
            raise ConfigError(
                f"{first} and {second} both list {', '.join(map(str, sorted(names)))}",
                "take it out of one",
            )
    for column, given in pipeline.per_column.items():
        columns_of("per_column", (column,))
        overrides("per_column", column, given, VALUE_CHOICES)
    for table, given in pipeline.per_table.items():
        _check_table("per_table", table, pattern_allowed=False)
        for name, value in overrides("per_table", table, given, POLICIES).items():
            _check_number(f"per_table: {name} of {table}", name, value)
        _check_partition_by(table, given.get("partition_by"))
    for field_name, parse in (
        ("types", ColumnName.parse),
        ("per_column", ColumnName.parse),
        ("per_table", TableName.parse),
    ):
        _refuse_doubles(field_name, parse, getattr(pipeline, field_name))

    _check_history(pipeline)


def _check_history(pipeline: Pipeline) -> None:
    if not pipeline.history and not any(given.get("history") for given in pipeline.per_table.values()):
        return
    if not pipeline.has_lake_tables:
        raise ConfigError(
            "history: there is none without lake tables", "set history to false, or lake_tables to all"
        )
    if not (pipeline.commit_lsn_column and pipeline.commit_ts_column):
        raise ConfigError(
            "history: needs commit_lsn_column and commit_ts_column",
            "they say since when the rows of the lake tables have been as they are",
        )


def _check_partition_by(table: str, given: str | None) -> None:
    try:
        if given is not None:
            PartitionBy.parse(given)
    except ValueError as error:
        raise ConfigError(
            f"per_table: partition_by of {table}: {error}",
            'write a column, as "region", or year, month or day of one, as "month(placed_at)"; an odd name in'
            ' quotes: "day(\\"Placed at\\")"',
        ) from None


def _texts(value: object) -> Iterator[str]:
    """Yield every string in a setting, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)


def _check_table(field: str, text: str, *, pattern_allowed: bool) -> None:
    if text.endswith(".*") and pattern_allowed:
        text = text[:-1] + "any"
    try:
        if "*" in _QUOTED.sub("", text):
            raise ValueError(f"{text!r} has a * where none may be")
        TableName.parse(text)
    except ValueError as error:
        raise ConfigError(
            f"{field}: {error}", 'schema.table, "Quoted"."Names", or (in tables) schema.*'
        ) from None


def _refuse_doubles(field: str, parse: Callable[[str], Hashable], names: Iterable[str]) -> None:
    """Raise ConfigError if two spellings of a name denote the same table or column."""
    first: dict[Hashable, str] = {}
    for name in names:
        if (other := first.setdefault(parse(name), name)) != name:
            raise ConfigError(f"{field}: {other} and {name} are the same", "take one out")


def _lake_type(field: str, text: object) -> LakeType:
    try:
        return LakeType.parse(text if isinstance(text, str) else json.dumps(text))
    except ValueError as error:
        raise ConfigError(f"{field}: {error}", _TYPES_REFERENCE) from None


def _is_of_numeric(text: str) -> bool:
    """Return True if a lake type is allowed for numeric without precision."""
    try:
        return LakeType.parse(text).name in ("string", "decimal")
    except ValueError:
        return False


def _check_types(pipeline: Pipeline) -> None:
    for name, hint in get_type_hints(type(pipeline)).items():
        value = getattr(pipeline, name)
        if not is_of(value, hint):
            shown = list(value) if isinstance(value, tuple) else value
            raise ConfigError(f"{name}: {shown!r} must be {describe(hint)}")
