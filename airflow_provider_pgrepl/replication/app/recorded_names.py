"""The names that a pipeline's tables and columns had, as its lake and its state recorded them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from airflow_provider_pgrepl.replication.app.tables import Records
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.drift.bound_rules import BoundRules
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.source.known_source import known_source
from airflow_provider_pgrepl.replication.source.server import read_server
from airflow_provider_pgrepl.replication.state.pipelines import PipelineRecord


def recorded_names(
    source: Connection,
    pipeline: Pipeline,
    epoch: EpochRecord | None,
    records: Records,
    recorded: PipelineRecord | None,
    selected: Iterable[Relation] = (),
) -> BoundRules | None:
    """Return what is known of tables by their oids; None if nothing is of this database, since the oids of
    another one are those of other tables.

    `selected`: relations that the pipeline selected from the source that is recorded. Lake and other records
    are those of the epoch's source, which a new epoch may replace.
    Raises LakeUnavailableError, SourceConnectionError.

    The index of relations is read again with each call: the receiver adds to it.
    """
    server = read_server(source)
    of_state: dict[int, list[RelationRecord]] = defaultdict(list)
    if recorded is not None and not known_source(recorded, server).differs(server):
        for relation in selected:
            of_state[relation.oid].append(RelationRecord.of_catalog(relation))
    known = epoch or recorded
    if known is None or known_source(known, server).differs(server):
        if not of_state:
            return None
        return BoundRules(pipeline, lambda oid: of_state.get(oid, []), lambda: set(of_state))
    index = RelationIndex(relations_uri(pipeline.lake_root))
    for record in records.values():
        # Of a removed table the state may describe another server's; the index says of which each entry is.
        if record.relation is not None and record.membership != "removed":
            of_state[record.relation.oid].append(RelationRecord.of_catalog(record.relation))
    return BoundRules(
        pipeline,
        lambda oid: [*index.records(oid), *of_state.get(oid, ())],
        lambda: {*index.relation_ids(), *of_state},
    )
