"""The checks of a pipeline's settings that compare several of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from airflow_provider_pgrepl.replication.postgres.names import ColumnName, TableName
from airflow_provider_pgrepl.replication.settings.lake import is_object_store
from airflow_provider_pgrepl.replication.settings.mistakes import Check, Mistake
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings, read_publisher

if TYPE_CHECKING:
    from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline


def _check_lake_conn_id(pipeline: Pipeline) -> Iterator[Mistake]:
    if pipeline.lake_conn_id is not None and not is_object_store(pipeline.lake):
        hint = "leave it out, or give the URI of a place in an object store"
        yield Mistake(("lake_conn_id",), "the lake is a directory", hint)


def _check_points(pipeline: Pipeline) -> Iterator[Mistake]:
    if pipeline.consistent_point_retention_h > pipeline.changelog_retention_h:
        yield Mistake(("consistent_point_retention_h",), "must not be longer than changelog_retention_h")


def _check_wal_budget(pipeline: Pipeline) -> Iterator[Mistake]:
    if pipeline.on_wal_budget == "drop_slot" and pipeline.wal_budget is None:
        hint = "set wal_budget to bytes of WAL, as 53687091200"
        yield Mistake(("on_wal_budget",), "drop_slot needs a wal_budget", hint)


def _check_paces(pipeline: Pipeline) -> Iterator[Mistake]:
    for path, given in (((), {}), *((("per_table", name), own) for name, own in pipeline.per_table.items())):
        least = given.get("merge_interval_s", pipeline.merge_interval_s)
        most = given.get("max_staleness_s", pipeline.max_staleness_s)
        if most < least:
            problem = f"{most} must not be less than merge_interval_s, {least}"
            yield Mistake((*path, "max_staleness_s"), problem)


def _check_columns(pipeline: Pipeline) -> Iterator[Mistake]:
    for first, second in (
        ("text_columns", "exclude_columns"),
        ("types", "exclude_columns"),
        ("types", "text_columns"),
    ):
        columns, others = (set(map(ColumnName.parse, getattr(pipeline, name))) for name in (first, second))
        if names := columns & others:
            listed = ", ".join(map(str, sorted(names)))
            yield Mistake((first,), f"{first} and {second} both list {listed}", "take it out of one")


def _check_history(pipeline: Pipeline) -> Iterator[Mistake]:
    if not pipeline.history and not any(given.get("history") for given in pipeline.per_table.values()):
        return
    if pipeline.lake_tables == "none":
        hint = "set history to false, or lake_tables to all"
        yield Mistake(("history",), "there is none without lake tables", hint)
    if not (pipeline.commit_lsn_column and pipeline.commit_ts_column):
        yield Mistake(
            ("history",),
            "needs commit_lsn_column and commit_ts_column",
            "they say since when the rows of the lake tables have been as they are",
        )


def _name(pipeline: Pipeline) -> str:
    """Return the pipeline's name; a mistaken one must not hide the mistakes of publishers."""
    return getattr(pipeline, "name", "pipeline")


def check_publishers(pipeline: Pipeline) -> Iterator[Mistake]:
    """Check each publisher alone, then its business events, then that no two have one destination."""
    first: dict[tuple[str, str], str] = {}
    has_lake_tables = getattr(pipeline, "lake_tables", "all") == "all"
    publishers: Mapping[str, Any] = pipeline.publishers
    for name, given in publishers.items():
        if not isinstance(given, dict):
            continue
        settings, mistakes = read_publisher(_name(pipeline), name, given, has_lake_tables=has_lake_tables)
        yield from (mistake.below("publishers", name) for mistake in mistakes)
        if settings is None:
            continue
        for mistake in _check_business(pipeline, settings):
            yield mistake.below("publishers", name)
        other = first.setdefault((settings.conn_id, settings.place), name)
        if other != name:
            yield Mistake(
                ("publishers", name),
                f"{other} and {name} both send to {settings.place}",
                "give each a place of its own: consumers could not tell what of each they have",
            )


def _check_business(pipeline: Pipeline, settings: PublisherSettings) -> Iterator[Mistake]:
    """Yield the sources of business events that do not reach the publisher.

    The tables of its rules must be in `tables`, and its prefixes in the pipeline's `message_prefixes`.
    """
    patterns = [text for text in settings.tables or () if text.endswith(".*")]
    schemas = {TableName.parse(f"{text[:-1]}any").schema for text in patterns}
    named = {TableName.parse(text) for text in settings.tables or () if text not in patterns}
    for table in settings.rules:
        if settings.tables is not None and table not in named and table.schema not in schemas:
            problem = f"{table}, which outbox or transform names, is none of tables"
            yield Mistake(("tables",), problem, "name it in tables, too")
    kept = pipeline.message_prefixes
    if "*" not in kept and (unkept := sorted(set(settings.messages) - set(kept))):
        problem = f"the pipeline does not keep those of {', '.join(unkept)}"
        yield Mistake(("messages",), problem, "name the prefix in message_prefixes of the pipeline")


CHECKS: tuple[Check, ...] = (
    _check_lake_conn_id,
    _check_points,
    _check_wal_budget,
    _check_paces,
    _check_columns,
    _check_history,
)
