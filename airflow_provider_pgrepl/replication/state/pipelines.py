"""Records of pipelines: what each one reads, owns and writes, so that no two are at the same thing."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import NoReturn

import psycopg2.errors

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.errors import ConfigError, StateError
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.source.connection import rows
from airflow_provider_pgrepl.replication.state.connection import StateConnection, state_errors

_REGISTER = """
INSERT INTO _pgrepl.pipelines AS p
    (name, system_identifier, slot, publication, slot_owned, publication_owned, lake, config)
VALUES (%(name)s, %(system_identifier)s, %(slot)s, %(publication)s, %(slot_owned)s, %(publication_owned)s,
        %(lake)s, %(config)s)
ON CONFLICT (name) DO UPDATE SET
    system_identifier = excluded.system_identifier, slot = excluded.slot, publication = excluded.publication,
    slot_owned = excluded.slot_owned, publication_owned = excluded.publication_owned, lake = excluded.lake,
    config = excluded.config
WHERE %(replace)s OR (p.system_identifier, p.slot, p.lake)
    = (excluded.system_identifier, excluded.slot, excluded.lake)
RETURNING 1
"""

_PIPELINE = """
SELECT name, system_identifier, slot, publication, slot_owned, publication_owned, lake, config::text,
    created_at
FROM _pgrepl.pipelines
"""


@dataclass(frozen=True)
class PipelineRecord:
    """What is recorded of a pipeline: its source, what it owns there, its lake, its last configuration."""

    name: str
    system_identifier: str
    slot: str
    publication: str
    slot_owned: bool
    publication_owned: bool
    lake: str
    config: str
    created_at: datetime


class PipelineRecords(StateConnection):
    """The recorded pipelines."""

    def register(
        self,
        pipeline: Pipeline,
        system_identifier: str,
        slot_owned: bool,
        publication_owned: bool,
        *,
        replace: bool = False,
    ) -> None:
        """Record the pipeline and what it owns; again with the same source, slot and lake it is an update.

        Raises ConfigError when slot, publication or lake are recorded for another pipeline, by whose name it
        is called; StateError when this one is recorded with another source, slot or lake and not `replace`.
        """
        fields = {
            "name": pipeline.name,
            "system_identifier": system_identifier,
            "slot": pipeline.slot,
            "publication": pipeline.publication,
            "slot_owned": slot_owned,
            "publication_owned": publication_owned,
            "lake": pipeline.lake_root,
            "config": pipeline.to_json(),
            "replace": replace,
        }
        with state_errors("recording the pipeline"):
            try:
                found = rows(self._connection, _REGISTER, fields)
            except psycopg2.errors.UniqueViolation as error:
                self._refuse_taken(pipeline, system_identifier, error.diag.constraint_name or "")
        if not found:
            self._refuse_change(pipeline, system_identifier)

    def read_pipeline(self, name: str) -> PipelineRecord | None:
        """The recorded pipeline; None when there is none of this name."""
        with state_errors("reading the pipeline"):
            found = rows(self._connection, _PIPELINE + " WHERE name = %s", (name,))
        return PipelineRecord(*found[0]) if found else None

    def forget_pipeline(self, name: str) -> None:
        """Delete all that is recorded of a pipeline; one that is not recorded is as good as forgotten."""
        with state_errors("forgetting the pipeline"):
            rows(self._connection, "DELETE FROM _pgrepl.pipelines WHERE name = %s RETURNING 1", (name,))

    def _refuse_taken(self, pipeline: Pipeline, system_identifier: str, constraint: str) -> NoReturn:
        what, condition, values = {
            "pipelines_lake": (f"lake {pipeline.lake_root}", "lake = %s", (pipeline.lake_root,)),
            "pipelines_slot": (
                f"slot {pipeline.slot}",
                "system_identifier = %s AND slot = %s",
                (system_identifier, pipeline.slot),
            ),
            "pipelines_publication": (
                f"publication {pipeline.publication}",
                "system_identifier = %s AND publication = %s AND publication_owned",
                (system_identifier, pipeline.publication),
            ),
        }[constraint]
        found = rows(self._connection, f"{_PIPELINE} WHERE {condition}", values)
        owner = f"pipeline {found[0][0]}" if found else "another pipeline"
        raise ConfigError(f"{what} belongs to {owner}", f"give pipeline {pipeline.name} one of its own")

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
            f"give this pipeline another name, or {hints.NEW_EPOCH}",
        )
