"""From a split chunk to changelog rows: relation versions, and rows for Relations, Truncates and Messages."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl.errors import WireError
from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.lsn import Epoch
from airflow_provider_pgrepl.replication.wire import messages
from airflow_provider_pgrepl.replication.wire.columns import NO_TIME, Control, Int64s, Split

LookUp = Callable[[messages.RelationMessage], RelationRecord]


class Stamper:
    """Turns splits into ROW_SCHEMA tables in stream order; remembers the version of each relation."""

    def __init__(self, epoch: Epoch, look_up: LookUp) -> None:
        self._epoch = epoch
        self._look_up = look_up
        self._versions: dict[int, int] = {}

    def stamp(self, split: Split) -> pa.Table:
        """Rows of the chunk by (commit_lsn, ordinal). Raises WireError for a row of an unknown relation."""
        changes = self._changes_of_version(split)
        versions = self._stamp_versions(split, changes)
        rows = split.rows.append_column("epoch", pa.array(np.full(len(versions), self._epoch)))
        rows = rows.append_column("relation_version", pa.array(versions)).select(ROW_SCHEMA.names)
        controls = [row for control in split.controls for row in self._control_rows(control, changes)]
        self._versions.update({record.message.oid: record.version for record in changes.values()})
        if not controls:
            return rows
        table = pa.concat_tables([rows, pa.Table.from_pylist(controls, schema=ROW_SCHEMA)])
        return table.sort_by([("commit_lsn", "ascending"), ("ordinal", "ascending")])

    def _changes_of_version(self, split: Split) -> dict[int, RelationRecord]:
        """The chunk's Relation messages by message index, looked up in the catalog."""
        return {
            control.index: self._look_up(messages.parse_relation(control.data))
            for control in split.controls
            if control.tag == "R"
        }

    def _stamp_versions(self, split: Split, changes: dict[int, RelationRecord]) -> Int64s:
        """Each row's relation version: the one announced last before it."""
        ids = split.rows["relation_id"].to_numpy()
        versions = np.zeros(len(ids), np.int64)
        for relation_id in np.unique(ids).tolist():
            mine = ids == relation_id
            version = self._versions.get(relation_id)
            if version is not None:
                versions[mine] = version
            for index, record in changes.items():
                if record.message.oid == relation_id:
                    versions[mine & (split.row_index > index)] = record.version
        if len(versions) and not versions.all():
            raise WireError("the stream sent a row before its relation")
        return versions

    def _version_at(self, relation_id: int, index: int, changes: dict[int, RelationRecord]) -> int:
        """A relation's version at a message of the chunk; 0 when it was never announced."""
        version = self._versions.get(relation_id, 0)
        for place, record in changes.items():
            if place < index and record.message.oid == relation_id:
                version = record.version
        return version

    def _control_rows(self, control: Control, changes: dict[int, RelationRecord]) -> list[dict[str, object]]:
        if control.tag == "R":
            record = changes[control.index]
            return [self._row(control, "R", record.message.oid, record.version, [record.to_json()])]
        if control.tag == "T":
            truncate = messages.parse_truncate(control.data)
            option = {(1, 1): "cascade restart identity", (1, 0): "cascade", (0, 1): "restart identity"}
            text = option.get((truncate.cascade, truncate.restart_identity), "")
            return [
                self._row(control, "T", oid, self._version_at(oid, control.index, changes), [text], offset)
                for offset, oid in enumerate(truncate.oids)
            ]
        message = messages.parse_message(control.data)
        return [self._row(control, "M", 0, 0, [message.prefix, "\\x" + message.content.hex()])]

    def _row(
        self, control: Control, op: str, relation_id: int, version: int, new: list[str], offset: int = 0
    ) -> dict[str, object]:
        outside = control.commit_us == NO_TIME
        return {
            "epoch": self._epoch,
            "commit_lsn": control.commit_lsn,
            "ordinal": control.ordinal + offset,
            "xid": None if outside else control.xid,
            "commit_ts": None if outside else control.commit_us,
            "relation_id": relation_id,
            "relation_version": version,
            "op": op,
            "new": new,
        }
