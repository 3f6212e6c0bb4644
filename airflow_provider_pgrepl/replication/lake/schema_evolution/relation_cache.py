"""Relation versions that a worker process has met: what one says never changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.changelog import reader
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.postgres.lsn import Epoch
from airflow_provider_pgrepl.replication.postgres.relation import Relation

_records: dict[tuple[str, int, int], RelationRecord] = {}
"""By changelog, relation and version."""


@dataclass(frozen=True)
class RelationCache:
    """The relation versions of one table."""

    lake_root: str
    changelog: str
    relation_id: int

    def find(self, version: int) -> RelationRecord | None:
        """Looked up once a worker: after a TRUNCATE or VACUUM FULL every batch has a version of its own.

        None when it was never received, nor made by an evolution. Raises ChangelogError,
        LakeUnavailableError.
        """
        key = (self.changelog, self.relation_id, version)
        if key not in _records:
            index = RelationIndex(relations_uri(self.lake_root))
            found = index.find(*key[1:]) or reader.find_relation_record(*key)
            if found is None:
                return None
            _records[key] = found
        return _records[key]

    def remember(self, rows: pa.Table) -> None:
        """Relations that came with these very rows need no looking up."""
        for new in rows.filter(pc.equal(rows["op"], "R"))["new"].to_pylist():
            self._keep(RelationRecord.from_json(new[0]))

    def add(self, relations: Iterable[Relation], epoch: Epoch) -> None:
        """Have relations that no stream sent in this form in the index, before a commit names them."""
        missing = [relation for relation in relations if self._key(relation.version) not in _records]
        index = RelationIndex(relations_uri(self.lake_root)) if missing else None
        for relation in missing:
            assert index is not None
            record = RelationRecord.of_catalog(relation)
            index.add(epoch, record)
            self._keep(record)

    def _key(self, version: int) -> tuple[str, int, int]:
        return self.changelog, self.relation_id, version

    def _keep(self, record: RelationRecord) -> None:
        _records[self._key(record.version)] = record
