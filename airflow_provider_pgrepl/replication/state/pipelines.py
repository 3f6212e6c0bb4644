"""Records of pipelines: what each one reads, owns and writes, so that no two are at the same thing."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import psycopg2.errors

from airflow_provider_pgrepl.errors import ConfigError, StateError
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import Connection, rows
from airflow_provider_pgrepl.replication.source.server_errors import source_errors
from airflow_provider_pgrepl.replication.state.connection import StateConnection, state_errors

_REGISTER = """
INSERT INTO _pgrepl.pipelines AS p
    (name, system_identifier, database, database_oid, slot, publication, slot_owned, publication_owned, lake,
     lake_id, config)
VALUES (%(name)s, %(system_identifier)s, %(database)s, %(database_oid)s, %(slot)s, %(publication)s,
        %(slot_owned)s, %(publication_owned)s, %(lake)s, %(lake_id)s, %(config)s)
ON CONFLICT (name) DO UPDATE SET
    system_identifier = excluded.system_identifier, database = excluded.database,
    database_oid = excluded.database_oid, slot = excluded.slot, publication = excluded.publication,
    slot_owned = excluded.slot_owned, publication_owned = excluded.publication_owned, lake = excluded.lake,
    lake_id = excluded.lake_id, config = excluded.config
WHERE %(replace)s OR (p.system_identifier, p.slot, p.lake)
    = (excluded.system_identifier, excluded.slot, excluded.lake)
RETURNING 1
"""

# The oids of another database are those of other tables.
_FORGET_SELECTED = """
DELETE FROM _pgrepl.selected_relations s USING _pgrepl.pipelines p
WHERE s.pipeline = p.name AND p.name = %(name)s
    AND (p.system_identifier, p.database_oid) <> (%(system_identifier)s, %(database_oid)s)
RETURNING 1
"""

# Of a record of an earlier version, whose database is not known.
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


_RECORD_SLOT = "UPDATE _pgrepl.pipelines SET slot_owned = %s WHERE name = %s RETURNING 1"

_READABLE = """
SELECT 1 FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = '_pgrepl' AND c.relname = 'pipelines'
    AND pg_catalog.has_schema_privilege(n.oid, 'USAGE') AND pg_catalog.has_table_privilege(c.oid, 'SELECT')
"""
_LAKE_AT_SOURCE = (
    "SELECT lake::text FROM _pgrepl.pipelines WHERE system_identifier = %s AND name = %s AND slot = %s"
)


def find_lake_at_source(source: Connection, system_identifier: str, pipeline: Pipeline) -> str:
    """Return the lake that is recorded of the pipeline in the source's own database, where the state is by
    default; "" if none is, or it may not be read. For messages: its owner may be anybody."""
    with source_errors("looking for the pipeline's record at the source"):
        if not rows(source, _READABLE):
            return ""
        found = rows(source, _LAKE_AT_SOURCE, (system_identifier, pipeline.name, pipeline.slot))
    return str(found[0][0]) if found else ""


@dataclass(frozen=True)
class PipelineRecord:
    """What is recorded of a pipeline: its source, what it owns there, its lake, its last configuration.

    `id`: of this record, which the lake's changelog repeats. `database`, `database_oid` and `lake_id`, of the
    changelog, are empty in a record of an earlier version until they are recorded.
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
        """Record the pipeline and what it owns; again with the same source, slot and lake it is an update.

        Raises ConfigError when slot, publication or lake are recorded for another pipeline, by whose name it
        is called; StateError when this one is recorded with another source, slot or lake and not `replace`.
        """
        fields = {
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
        """Record which database and which lake are the pipeline's, once all else that is known agrees."""
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
        """Record that the slot was made by the pipeline, or is gone."""
        with state_errors("recording the pipeline's slot"):
            rows(self._connection, _RECORD_SLOT, (is_owned, name))

    def read_pipeline(self, name: str) -> PipelineRecord | None:
        """The recorded pipeline; None when there is none of this name."""
        with state_errors("reading the pipeline"):
            found = rows(self._connection, _PIPELINE + " WHERE name = %s", (name,))
        return PipelineRecord(*found[0]) if found else None

    def forget_pipeline(self, name: str) -> None:
        """Delete all that is recorded of a pipeline; one that is not recorded is as good as forgotten."""
        with state_errors("forgetting the pipeline"):
            rows(self._connection, "DELETE FROM _pgrepl.pipelines WHERE name = %s RETURNING 1", (name,))

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
