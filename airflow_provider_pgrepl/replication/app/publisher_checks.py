"""What a publisher refuses to begin with: settings that would publish nothing, too much, or elsewhere."""

from __future__ import annotations

import logging
from contextlib import closing

from airflow_provider_pgrepl.errors import ConfigError, SourceError, StateError
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.evidence import gather
from airflow_provider_pgrepl.replication.app.ownership import Answer, Evidence, differences
from airflow_provider_pgrepl.replication.events.fault import changelog_errors
from airflow_provider_pgrepl.replication.events.publish.record import PublisherRecord
from airflow_provider_pgrepl.replication.events.relations import KnownRelations
from airflow_provider_pgrepl.replication.events.table_selection import TableSelection
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.publisher_settings import PublisherSettings
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.state.store import Store

log = logging.getLogger(__name__)


def check_recorded_lake(pipeline: Pipeline, store: Store) -> None:
    """Raise what says that the lake is not the one that the state has for the pipeline, or was not written
    from the connected database; LakeError, ChangelogError.

    A state that has none, as after a teardown, contradicts nothing: only the lake is read. Nor does another
    history of the source: what was received from it before is published.
    """
    evidence = _gather(pipeline, store)
    for difference in differences(evidence):
        is_told = evidence.recorded is not None or difference.answer is not Answer.CANNOT_TELL
        if is_told and not difference.doubted:
            raise difference.error


def _gather(pipeline: Pipeline, store: Store) -> Evidence:
    """A copy of lake and state has all that they say of each other, and another database: the source is
    compared where it can be asked."""
    try:
        with closing(connect(process.source_dsn(), f"publish {pipeline.name}", read_only=True)) as source:
            return gather(pipeline, store, source)
    except (SourceError, ConfigError, StateError) as error:
        log.info("the source is not compared with the lake: %s", error.message)
    return gather(pipeline, store, None)


def check_tables(pipeline: Pipeline, settings: PublisherSettings) -> None:
    """Raise ConfigError when settings name a table that there never was: it would wait for ever, and what a
    rule was to hide would be sent.

    A table that comes under a pattern of the pipeline may yet be made; of one that is to hide nothing it is
    only said.
    """
    listed = TableSelection.parse(pipeline.tables)
    known = {*(listed.names or ()), *map(TableName.parse, pipeline.insert_only)}
    with changelog_errors():
        known |= KnownRelations(pipeline.lake_root).names()
    if unknown := sorted(map(str, {*settings.column_rules.tables(), *settings.rows.tables} - known)):
        raise ConfigError(
            f"publisher {settings.name} has rules for columns of {', '.join(unknown)}, and the changelog"
            " has never had such a table",
            "mend the name; one that comes later is named in the pipeline's tables, beside its schema",
        )
    chosen = TableSelection.parse(settings.tables, settings.messages)
    wanted = set(chosen.names or ()) | set(settings.rules)
    missing = sorted(table for table in wanted - known if table.schema not in listed.schemas)
    schemas = listed.schemas | {table.schema for table in known}
    what = [*map(str, missing), *(f"{schema}.*" for schema in sorted(chosen.schemas - schemas))]
    if what:
        raise ConfigError(
            f"publisher {settings.name} names {', '.join(what)}, which the pipeline does not replicate and"
            " the changelog has never had",
            "mend the name in its tables, outbox or transform, or add the table to the pipeline's tables",
        )
    for table in sorted(wanted - known):
        log.warning("the changelog has no table %s yet: its events begin when it comes", table)


def check_place(settings: PublisherSettings, record: PublisherRecord) -> None:
    """Raise ConfigError when the settings name another place than where a publisher has sent events: who
    reads there would miss all that came before, and nobody would have said so."""
    if record.place and record.place != settings.full_place:
        raise ConfigError(
            f"publisher {settings.name} has sent its events to {record.place}, and its settings now name"
            f" {settings.full_place}",
            f"to go on there where it is: --after {record.needed_after}. To send there all that is kept, give"
            " the new place a publisher of another name",
        )


def check_stopped(settings: PublisherSettings, record: PublisherRecord) -> None:
    """Raise ConfigError when tables wait whose changes would be given to a function without the others'."""
    if settings.whole is not None and record.stopped:
        names = ", ".join(sorted(one.table for one in record.stopped.values()))
        raise ConfigError(
            f"publisher {settings.name} has transform_transaction, and {names} stopped before it had",
            f"begin again where the first of them stopped: --after {record.needed_after}",
        )
