"""Records of pipelines: what each one reads, owns and writes, so that no two share a slot, publication or
lake.

The store of pipelines, table states and progress is schema `_pgrepl` in PostgreSQL. Methods run short
autocommit statements, and only `migrate` and `remove_schema` a short transaction, so that none of them holds
back the source's vacuum.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, NoReturn

import psycopg2.errors

from airflow_provider_pgrepl.errors import ConfigError, StateError
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog import refused_changes
from airflow_provider_pgrepl.replication.source.connection import Connection, row, rows
from airflow_provider_pgrepl.replication.source.server_errors import source_errors

from . import schema
from .actor import ACTOR
from .connection import StateConnection, state_errors, text_of
from .locks import PipelineLocks, Purpose
from .progress import Progress, TableBytes, TableMerges
from .recorded_events import INSERT, EventRecords
from .reports import CopyRecords, PublisherReports
from .samples import SampleRecords
from .tables import SelectedRelations, TableRecord, TableRecords

_REGISTER = f"""
WITH earlier AS (
    SELECT system_identifier, slot, publication, lake FROM _pgrepl.pipelines WHERE name = %(name)s FOR UPDATE
), changed AS (
    INSERT INTO _pgrepl.pipelines AS p
        (name, system_identifier, database, database_oid, slot, publication, slot_owned, publication_owned,
         lake, lake_id, config)
    VALUES (%(name)s, %(system_identifier)s, %(database)s, %(database_oid)s, %(slot)s, %(publication)s,
            %(slot_owned)s, %(publication_owned)s, %(lake)s, %(lake_id)s, %(config)s)
    ON CONFLICT (name) DO UPDATE SET
        system_identifier = excluded.system_identifier, database = excluded.database,
        database_oid = excluded.database_oid, slot = excluded.slot, publication = excluded.publication,
        slot_owned = excluded.slot_owned, publication_owned = excluded.publication_owned,
        lake = excluded.lake, lake_id = excluded.lake_id, config = excluded.config
    WHERE %(replace)s OR (p.system_identifier, p.slot, p.lake)
        = (excluded.system_identifier, excluded.slot, excluded.lake)
    RETURNING system_identifier, slot, publication, lake
), event AS (
    {INSERT} NULL, NULL, 'registered', NULL, NULL, {ACTOR}, '', '', '', NULL,
        pg_catalog.to_jsonb(changed)
    FROM changed WHERE NOT EXISTS (SELECT FROM earlier WHERE earlier = changed)
)
SELECT 1 FROM changed
"""

# In another database, the same oids identify other tables.
_FORGET_SELECTED = """
DELETE FROM _pgrepl.selected_relations s USING _pgrepl.pipelines p
WHERE s.pipeline = p.name AND p.name = %(name)s
    AND (p.system_identifier, p.database_oid) <> (%(system_identifier)s, %(database_oid)s)
RETURNING 1
"""

# Match records of earlier versions, which lack the database: it may be this one.
_SAME_PUBLICATION = """
SELECT name FROM _pgrepl.pipelines WHERE system_identifier = %(system_identifier)s
    AND publication = %(publication)s AND publication_owned AND %(publication_owned)s AND name <> %(name)s
    AND 0 IN (database_oid, %(database_oid)s) AND database_oid <> %(database_oid)s
"""

_PIPELINE = """
SELECT name, system_identifier, slot, publication, slot_owned, publication_owned, lake, config::text,
    created_at, id::text, database, database_oid, lake_id
FROM _pgrepl.pipelines
"""

_RECORD_EVIDENCE = """
UPDATE _pgrepl.pipelines SET database = %(database)s, database_oid = %(database_oid)s, lake = %(lake)s,
    lake_id = %(lake_id)s
WHERE name = %(name)s RETURNING 1
"""


_RECORD_SLOT = f"""
WITH changed AS (
    UPDATE _pgrepl.pipelines SET slot_owned = %(owned)s
    WHERE name = %(pipeline)s AND slot_owned <> %(owned)s RETURNING slot
), event AS (
    {INSERT} NULL, NULL, 'slot_changed', NULL, NULL, {ACTOR}, '', '', '', NULL,
        pg_catalog.jsonb_build_object('slot', slot, 'owned', %(owned)s)
    FROM changed
)
SELECT 1 FROM changed
"""
_FORGET = f"""
WITH changed AS (
    DELETE FROM _pgrepl.pipelines WHERE name = %(pipeline)s RETURNING slot, publication, lake
), event AS (
    {INSERT} NULL, NULL, 'torn_down', NULL, NULL, {ACTOR}, '', '', '', NULL, pg_catalog.to_jsonb(changed)
    FROM changed
)
SELECT 1 FROM changed
"""

_READABLE = """
SELECT 1 FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = '_pgrepl' AND c.relname = 'pipelines'
    AND pg_catalog.has_schema_privilege(n.oid, 'USAGE') AND pg_catalog.has_table_privilege(c.oid, 'SELECT')
"""
_LAKE_AT_SOURCE = (
    "SELECT lake::text FROM _pgrepl.pipelines WHERE system_identifier = %s AND name = %s AND slot = %s"
)
_WRITE_PROGRESS = """
INSERT INTO _pgrepl.progress AS p (pipeline, received_lsn, durable_lsn, confirmed_lsn, applied_lsn,
    applied_commit_ts, changes_per_s, holder, idle_at, table_bytes,
    table_merges, complete_at)
VALUES (%(pipeline)s,
    coalesce(%(received)s::pg_lsn, '0/0'), coalesce(%(durable)s::pg_lsn, '0/0'),
    coalesce(%(confirmed)s::pg_lsn, '0/0'), coalesce(%(applied)s::pg_lsn, '0/0'),
    %(applied_ts)s::timestamptz, coalesce(%(rate)s::float8, 0), coalesce(%(holder)s::text, ''),
    %(idle)s::timestamptz, coalesce(%(bytes)s::jsonb, '{}'), coalesce(%(merges)s::jsonb, '{}'),
    %(complete)s::timestamptz)
ON CONFLICT (pipeline) DO UPDATE SET
    received_lsn = coalesce(%(received)s::pg_lsn, p.received_lsn),
    durable_lsn = coalesce(%(durable)s::pg_lsn, p.durable_lsn),
    confirmed_lsn = coalesce(%(confirmed)s::pg_lsn, p.confirmed_lsn),
    applied_lsn = coalesce(%(applied)s::pg_lsn, p.applied_lsn),
    applied_commit_ts = coalesce(%(applied_ts)s::timestamptz, p.applied_commit_ts),
    changes_per_s = coalesce(%(rate)s::float8, p.changes_per_s),
    holder = coalesce(%(holder)s::text, p.holder),
    idle_at = coalesce(%(idle)s::timestamptz, p.idle_at),
    table_bytes = coalesce(%(bytes)s::jsonb, p.table_bytes),
    table_merges = coalesce(%(merges)s::jsonb, p.table_merges),
    complete_at = coalesce(%(complete)s::timestamptz, p.complete_at),
    updated_at = now()
"""
_PROGRESS = """
SELECT received_lsn::text, durable_lsn::text, confirmed_lsn::text, applied_lsn::text, applied_commit_ts,
    changes_per_s, holder, updated_at, idle_at, table_bytes, table_merges, complete_at
FROM _pgrepl.progress WHERE pipeline = %s
"""
__all__ = ["PipelineRecord", "Purpose", "StateDatabase", "TableRecord"]
_OTHER_PLACE = (
    "nothing was created. Give another database for the state (state_conn_id, or PGREPL_STATE_DSN), or let"
    " those publications list their tables"
)


def find_lake_at_source(source: Connection, system_identifier: str, pipeline: Pipeline) -> str:
    """Return the lake recorded for the pipeline in the source's own database, where the state is by default;
    "" if there is no record, or it may not be read. Use it in messages only: the record's owner may be any
    role."""
    with source_errors("looking for the pipeline's record at the source"):
        if not rows(source, _READABLE):
            return ""
        found = rows(source, _LAKE_AT_SOURCE, (system_identifier, pipeline.name, pipeline.slot))
    return str(found[0][0]) if found else ""


@dataclass(frozen=True)
class PipelineRecord:
    """The record of a pipeline: its source, what it owns there, its lake, and its last configuration.

    `id`: identifies this record; the lake's changelog repeats it. `lake_id`: identifies the changelog. In a
    record of an earlier version, `database`, `database_oid` and `lake_id` are empty until they are recorded.
    """

    name: str
    system_identifier: str
    slot: str
    publication: str
    slot_owned: bool
    publication_owned: bool
    lake: str
    config: str
    created_at: datetime
    id: str = ""
    database: str = ""
    database_oid: int = 0
    lake_id: str = ""

    def owns(self, publication: str) -> bool:
        return self.publication_owned and self.publication == publication


class PipelineRecords(StateConnection):
    """The recorded pipelines."""

    def register(
        self,
        pipeline: Pipeline,
        system_identifier: str,
        slot_owned: bool,
        publication_owned: bool,
        *,
        database: str = "",
        database_oid: int = 0,
        lake_id: str = "",
        replace: bool = False,
    ) -> None:
        """Record the pipeline and what it owns; update the record if it has the same source, slot and lake.

        Raises ConfigError, which names the other pipeline, if the slot, publication or lake is recorded for
        it. Raises StateError if this pipeline is recorded with another source, slot or lake, unless `replace`
        is set.
        """
        fields = {
            **self._actor,
            "pipeline": pipeline.name,
            "name": pipeline.name,
            "system_identifier": system_identifier,
            "database": database,
            "database_oid": database_oid,
            "lake_id": lake_id,
            "slot": pipeline.slot,
            "publication": pipeline.publication,
            "slot_owned": slot_owned,
            "publication_owned": publication_owned,
            "lake": pipeline.lake_root,
            "config": pipeline.to_json(),
            "replace": replace,
        }
        with state_errors("recording the pipeline"):
            if owners := rows(self._connection, _SAME_PUBLICATION, fields):
                _refuse_doubted(pipeline, owners[0][0])
            try:
                if replace:
                    rows(self._connection, _FORGET_SELECTED, fields)
                found = rows(self._connection, _REGISTER, fields)
            except psycopg2.errors.UniqueViolation as error:
                self._refuse_taken(fields, error.diag.constraint_name or "")
        if not found:
            self._refuse_change(pipeline, system_identifier)

    def record_evidence(
        self, name: str, *, database: str, database_oid: int, lake: str, lake_id: str
    ) -> None:
        """Record the pipeline's database and lake, once all other known values agree."""
        fields = {
            "name": name,
            "database": database,
            "database_oid": database_oid,
            "lake": lake,
            "lake_id": lake_id,
        }
        with state_errors("recording the pipeline's source and lake"):
            rows(self._connection, _RECORD_EVIDENCE, fields)

    def record_slot(self, name: str, *, is_owned: bool) -> None:
        """Record that the pipeline owns its slot, or that it no longer does."""
        with state_errors("recording the pipeline's slot"):
            rows(self._connection, _RECORD_SLOT, {**self._actor, "pipeline": name, "owned": is_owned})

    def read_pipeline(self, name: str) -> PipelineRecord | None:
        """Return the record of the pipeline; None if there is none."""
        with state_errors("reading the pipeline"):
            found = rows(self._connection, _PIPELINE + " WHERE name = %s", (name,))
        return PipelineRecord(*found[0]) if found else None

    def owns_publication(self, pipeline: Pipeline) -> bool:
        """Return True if the pipeline's publication is recorded as its own.

        The pipeline file may have another `publication_mode` than when the publication was recorded.
        """
        recorded = self.read_pipeline(pipeline.name)
        return recorded is not None and recorded.owns(pipeline.publication)

    def forget_pipeline(self, name: str) -> None:
        """Delete all records of a pipeline, except for its events. Does nothing if the pipeline is not
        recorded."""
        with state_errors("forgetting the pipeline"):
            rows(self._connection, _FORGET, {**self._actor, "pipeline": name})

    def _refuse_taken(self, fields: dict[str, Any], constraint: str) -> NoReturn:
        what, condition = {
            "pipelines_lake": ("lake", "lake = %(lake)s"),
            "pipelines_slot": ("slot", "(system_identifier, slot) = (%(system_identifier)s, %(slot)s)"),
            "pipelines_publication": (
                "publication",
                "(system_identifier, database_oid, publication)"
                " = (%(system_identifier)s, %(database_oid)s, %(publication)s) AND publication_owned",
            ),
        }[constraint]
        found = rows(self._connection, f"{_PIPELINE} WHERE {condition}", fields)
        owner = f"pipeline {found[0][0]}" if found else "another pipeline"
        raise ConfigError(
            f"{what} {fields[what]} belongs to {owner}", f"give pipeline {fields['name']} one of its own"
        )

    def _refuse_change(self, pipeline: Pipeline, system_identifier: str) -> NoReturn:
        recorded = self.read_pipeline(pipeline.name)
        pairs = (
            ("source system identifier", system_identifier, recorded and recorded.system_identifier),
            ("slot", pipeline.slot, recorded and recorded.slot),
            ("lake", pipeline.lake_root, recorded and recorded.lake),
        )
        changed = ", ".join(f"{what} {old} (now {new})" for what, new, old in pairs if new != old)
        raise StateError(
            f"pipeline {pipeline.name} is recorded with {changed}",
            "set these back in the pipeline file, or give this pipeline another name. Nothing was changed",
        )


def _refuse_doubted(pipeline: Pipeline, owner: str) -> NoReturn:
    raise ConfigError(
        f"publication {pipeline.publication} may belong to pipeline {owner}, whose database is not recorded",
        f"start the replication of pipeline {owner} once, which records its database; or set `publication` of"
        f" pipeline {pipeline.name} to a name of its own",
    )


class ProgressRecords(StateConnection):
    """The recorded progress of pipelines."""

    def write_progress(
        self,
        pipeline: str,
        *,
        received_lsn: LSN | None = None,
        durable_lsn: LSN | None = None,
        confirmed_lsn: LSN | None = None,
        applied_lsn: LSN | None = None,
        applied_commit_ts: datetime | None = None,
        changes_per_s: float | None = None,
        holder: str | None = None,
        idle_at: datetime | None = None,
        table_bytes: Mapping[str, TableBytes] | None = None,
        table_merges: Mapping[str, TableMerges] | None = None,
        complete_at: datetime | None = None,
    ) -> None:
        """Record the given values and leave the others unchanged: the receiver and the applier each know some
        of them."""
        fields = {
            "pipeline": pipeline,
            "received": text_of(received_lsn),
            "durable": text_of(durable_lsn),
            "confirmed": text_of(confirmed_lsn),
            "applied": text_of(applied_lsn),
            "applied_ts": applied_commit_ts,
            "rate": changes_per_s,
            "holder": holder,
            "idle": idle_at,
            "bytes": None if table_bytes is None else _by_table(table_bytes),
            "merges": None if table_merges is None else _by_table(table_merges),
            "complete": complete_at,
        }
        with state_errors("writing progress"), self._connection.cursor() as cursor:
            cursor.execute(_WRITE_PROGRESS, fields)

    def now(self) -> datetime:
        """Return the time by the clock of this database, by which its records are dated."""
        with state_errors("asking for the time"):
            found: datetime = row(self._connection, "SELECT pg_catalog.clock_timestamp()")[0]
            return found

    def read_progress(self, pipeline: str) -> Progress | None:
        """Return the last recorded progress; None if there is none yet."""
        with state_errors("reading progress"):
            found = rows(self._connection, _PROGRESS, (pipeline,))
        if not found:
            return None
        received, durable, confirmed, applied = (LSN.parse(position) for position in found[0][:4])
        commit_ts, rate, holder, updated_at, idle_at, table_bytes, table_merges, complete_at = found[0][4:]
        measured = {path: TableBytes(**fields) for path, fields in table_bytes.items()}
        merges = {path: TableMerges(**fields) for path, fields in table_merges.items()}
        return Progress(
            received,
            durable,
            confirmed,
            applied,
            commit_ts,
            rate,
            holder,
            updated_at,
            idle_at,
            measured,
            merges,
            complete_at,
        )


def _by_table(measured: Mapping[str, TableBytes] | Mapping[str, TableMerges]) -> str:
    return json.dumps({path: asdict(one) for path, one in measured.items()})


class StateDatabase(
    PipelineLocks,
    PipelineRecords,
    TableRecords,
    SelectedRelations,
    CopyRecords,
    ProgressRecords,
    EventRecords,
    SampleRecords,
    PublisherReports,
):
    """A connection to the state database, with all records and locks. Its locks last as long as the
    connection.

    Raises SourceConnectionError if the database cannot be reached or the connection is lost, and StateError
    if the schema is missing.
    """

    def migrate(self) -> None:
        """Create the schema, or migrate it to this version; see `schema.migrate`."""
        schema.migrate(self._connection)

    def check_not_published(self, slot: str, used: str) -> None:
        """Raise PublicationError if publications FOR ALL TABLES would send the tables that `migrate` creates
        to their subscribers. Does nothing if the schema exists.

        `slot` and `used`: as in `all_tables_publications`.
        """
        if not self.is_set_up():
            refused_changes.check_not_published(self._connection, slot, used, _OTHER_PLACE)

    def is_set_up(self) -> bool:
        """Return True if the schema exists, in any version. Raises StateError for a newer one."""
        return schema.is_set_up(self._connection)

    def remove_schema(self) -> bool:
        """Drop the schema if it records no pipeline, and return True if it no longer exists."""
        return schema.remove_schema(self._connection)

    def now(self) -> datetime:
        """Return the time by the clock of the state database, which dates all of its records."""
        with state_errors("asking for the time"):
            found: datetime = row(self._connection, "SELECT pg_catalog.clock_timestamp()")[0]
        return found
