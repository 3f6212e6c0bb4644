"""The relation index held against the recorded tables: its folder may have been put back, or lost."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state.tables import TableRecord

log = logging.getLogger(__name__)


def recall_relations(pipeline: Pipeline, epoch: EpochRecord, records: Iterable[TableRecord]) -> None:
    """Have all recorded tables in the index before anything is received: the receiver looks how those are
    published that are in it, and of any other a change that nobody sent would go unseen.

    Raises LakeError, LakeUnavailableError.
    """
    index = RelationIndex(relations_uri(pipeline.lake_root))
    known = set(index.relation_ids())
    for record in records:
        if record.relation is not None and record.relation.oid not in known:
            log.warning(
                "table %s is not in the index of relations: was its folder, _pgrepl/relations, put back or"
                " deleted? What is recorded of the table is put there again",
                record.table,
            )
            index.add(epoch.epoch, RelationRecord.of_catalog(record.relation))
