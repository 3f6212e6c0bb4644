"""Tables as they were when a snapshot selected them, before an epoch began: what settings are bound to.

The lake's relation index says it of every later selection. Before the first epoch there is no lake.
"""

from __future__ import annotations

from collections.abc import Iterable

from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.source.connection import rows
from airflow_provider_pgrepl.replication.state.connection import StateConnection, state_errors

_ADD = """
INSERT INTO _pgrepl.selected_relations (pipeline, relation_id, relation_version, relation)
SELECT %s, * FROM ROWS FROM (pg_catalog.unnest(%s::bigint[]), pg_catalog.unnest(%s::bigint[]),
    pg_catalog.unnest(%s::text[])) AS selected
ON CONFLICT DO NOTHING RETURNING 1
"""


class SelectedRelations(StateConnection):
    """The relations that snapshots of pipelines selected."""

    def record_selected(self, pipeline: str, relations: Iterable[Relation]) -> None:
        """Record relations; one whose names and attnums are recorded already is not recorded again."""
        known = {(relation.oid, relation.names) for relation in self.read_selected(pipeline)}
        new = [one for one in relations if (one.oid, one.names) not in known]
        if new:
            fields = zip(*((one.oid, one.version, one.to_json()) for one in new), strict=True)
            with state_errors("recording the selected tables"):
                rows(self._connection, _ADD, (pipeline, *map(list, fields)))

    def read_selected(self, pipeline: str) -> list[Relation]:
        """Return every relation that was selected from the pipeline's source, in no order."""
        with state_errors("reading the selected tables"):
            found = rows(
                self._connection,
                "SELECT relation FROM _pgrepl.selected_relations WHERE pipeline = %s",
                (pipeline,),
            )
        return [Relation.from_json(text) for (text,) in found]
