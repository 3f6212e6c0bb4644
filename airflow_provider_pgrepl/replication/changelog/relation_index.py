"""The relation index: every relation version that was received (op `R`) or used for a snapshot.

The index keeps a version after its changelog hour was deleted. An entry that no change refers to is harmless.

The entry of a snapshot has a number and no commit LSN. The last of them says under which name the pipeline
has the table, which may have another one at the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from airflow_provider_pgrepl.replication.delta.table import append_delta, open_delta, query_delta
from airflow_provider_pgrepl.replication.postgres.lsn import Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.storage import (
    delta_errors,
    has_commit,
    storage_error,
    storage_errors,
)

from . import own_tables
from .layout import RELATIONS, own_table_uri
from .relations import RelationRecord

SCHEMA = pa.schema(
    [
        ("epoch", pa.int64()),
        ("relation_id", pa.int64()),
        ("relation_version", pa.int64()),
        ("record", pa.string()),
        ("commit_lsn", pa.int64()),
        ("trigger", pa.string()),
        ("number", pa.int64()),
    ]
)

_ANY_RELATION = 0
"""The relation ID of an entry that invalidates the earlier entries of all relations."""
_OTHER_SOURCE = "another source"
"""The text of an entry for all relations that marks the OIDs of earlier epochs as another database's."""


@dataclass(frozen=True)
class EffectiveFrom:
    """The commit LSN from which a relation is effective, and the event trigger that would report its change.

    Only relations received while an event trigger was active have one.
    """

    commit_lsn: int
    trigger: str


@dataclass(frozen=True)
class _EffectiveVersion:
    """A relation version, where it takes effect, and the number of its entry, which orders equal LSNs."""

    since: EffectiveFrom
    number: int
    version: int

    @property
    def order(self) -> tuple[int, int]:
        return self.since.commit_lsn, self.number


@dataclass
class _Entries:
    """The entries of the index as of a version of its table, -1 before the first."""

    version: int = -1
    texts: dict[tuple[int, int], str] = field(default_factory=dict)
    epochs: dict[tuple[int, int], int] = field(default_factory=dict)
    effective: dict[tuple[int, int], list[_EffectiveVersion]] = field(default_factory=dict)
    named: dict[tuple[int, int], int] = field(default_factory=dict)
    first_epoch: int = 0
    last_epoch: int = 0
    _names: dict[int, TableName] | None = None

    def remember(self, row: dict[str, Any]) -> None:
        relation_id, version = row["relation_id"], row["relation_version"]
        self.last_epoch = max(self.last_epoch, row["epoch"])
        if relation_id != _ANY_RELATION:
            known = (relation_id, version)
            self.texts[known] = row["record"]
            self.epochs[known] = max(row["epoch"], self.epochs.get(known, 0))
        if row["record"] == _OTHER_SOURCE:
            self.first_epoch = max(self.first_epoch, row["epoch"])
        if row.get("commit_lsn") is not None:
            since = EffectiveFrom(row["commit_lsn"], row["trigger"])
            effective = _EffectiveVersion(since, row["number"], version)
            self.effective.setdefault((row["epoch"], relation_id), []).append(effective)
        elif row.get("number") is not None:
            known = (relation_id, version)
            self.named[known] = max(row["number"], self.named.get(known, 0))
        self._names = None

    def is_of_this_server(self, known: tuple[int, int]) -> bool:
        return self.epochs[known] >= self.first_epoch

    def names(self) -> Mapping[int, TableName]:
        """Return the name in the pipeline of each copied table of this server that has the name itself: of
        two tables that were copied under one name, the last one."""
        if self._names is None:
            self._names = self._find_names()
        return self._names

    def _find_names(self) -> dict[int, TableName]:
        names, oids = dict[int, TableName](), dict[TableName, int]()
        for known in sorted(filter(self.is_of_this_server, self.named), key=self.named.__getitem__):
            name = RelationRecord.from_json(self.texts[known]).name
            names[known[0]], oids[name] = name, known[0]
        return {oid: name for oid, name in names.items() if oids[name] == oid}


def relations_uri(lake_root: str) -> str:
    """Return the URI of the Delta table of all relation versions."""
    return own_table_uri(lake_root, RELATIONS)


class RelationIndex:
    """A cached view of the relation index, which has an entry for each change of a table's columns or key."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._known: _Entries | None = None

    def add(self, epoch: Epoch, record: RelationRecord, since: EffectiveFrom | None = None) -> None:
        """Add a relation version, before the changelog refers to it, unless the index has it.

        With `since`, also adds an entry if another version is in effect there. Raises LakeError,
        LakeUnavailableError.
        """
        relation_id, version = record.message.oid, record.version
        if since is None:
            is_there = (relation_id, version) in self._entries().texts
        else:
            last = self._last_known(epoch, relation_id, since.commit_lsn)
            is_there = last is not None and (last.version, last.since.trigger) == (version, since.trigger)
        if not is_there:
            self._append(epoch, relation_id, version, record.to_json(), since)

    def add_selected(self, epoch: Epoch, relations: Iterable[Relation]) -> None:
        """Add relations in one commit, before the source publishes them.

        From then on the pipeline has the tables under these names. A relation is not added again if the index
        has its names and attnums, and its name is the last one. Raises LakeUnavailableError, and LakeError if
        the lake cannot be created there.
        """
        self.catch_up()
        names = self.pipeline_names()
        new = []
        for relation in relations:
            if not self._has_names(relation) or names.get(relation.oid) != relation.table:
                new.append(RelationRecord.of_catalog(relation))
                names = {oid: name for oid, name in names.items() if name != relation.table}
                names[relation.oid] = relation.table
        if not new:
            return
        number = 1 + max(self._entries().named.values(), default=0)
        with delta_errors("the relation index cannot be written"), storage_errors(self._uri):
            self._append_all(
                [
                    (epoch, one.message.oid, one.version, one.to_json(), None, None, place)
                    for place, one in enumerate(new, number)
                ]
            )

    def pipeline_names(self) -> Mapping[int, TableName]:
        """Return the names in the pipeline of the tables that were copied, by OID, without entries that other
        processes have added since the last `catch_up`.

        Of two tables that were copied under one name, only the last one is included. Snapshots of earlier
        versions of this package recorded no such names. Raises LakeUnavailableError.
        """
        return self._entries().names()

    def _has_names(self, relation: Relation) -> bool:
        catalogs = (record.catalog for record in self._records(relation.oid))
        return any(catalog is not None and catalog.names == relation.names for catalog in catalogs)

    def forget(self, epoch: Epoch, commit_lsn: int) -> None:
        """Invalidate all relations from a commit LSN on, until they are added again.

        Raises LakeUnavailableError.
        """
        self._append(epoch, _ANY_RELATION, 0, "", EffectiveFrom(commit_lsn, ""))

    def begin_source(self, epoch: Epoch) -> None:
        """Record that the source is another database from this epoch on. Raises LakeUnavailableError."""
        self._append(epoch, _ANY_RELATION, 0, _OTHER_SOURCE, None)

    def effective(
        self, epoch: Epoch, relation_id: int, before_lsn: int
    ) -> tuple[RelationRecord, EffectiveFrom] | None:
        """Return the relation in effect before the transaction at a commit LSN, or None if it is unknown."""
        if not self._entries().effective.get((epoch, relation_id)):
            self.catch_up()  # the snapshot app may have added it
        last = self._last_known(epoch, relation_id, before_lsn - 1)
        if last is None:
            return None
        record = self.find(relation_id, last.version)
        return None if record is None else (record, last.since)

    def is_forgotten(self, epoch: Epoch, relation_id: int, before_lsn: int) -> bool:
        """Return True if `forget` has invalidated the relation before the transaction at a commit LSN.

        Also returns True after a `forget` if the relation was never known.
        """
        end = self._last_effective(epoch, _ANY_RELATION, before_lsn - 1)
        return end is not None and self._last_known(epoch, relation_id, before_lsn - 1) is None

    def _last_known(self, epoch: Epoch, relation_id: int, upto_lsn: int) -> _EffectiveVersion | None:
        last = self._last_effective(epoch, relation_id, upto_lsn)
        end = self._last_effective(epoch, _ANY_RELATION, upto_lsn)
        return None if last is None or (end is not None and end.order > last.order) else last

    def _last_effective(self, epoch: Epoch, relation_id: int, upto_lsn: int) -> _EffectiveVersion | None:
        versions = self._entries().effective.get((epoch, relation_id), [])
        before = (entry for entry in versions if entry.since.commit_lsn <= upto_lsn)
        return max(before, key=lambda entry: entry.order, default=None)

    def _append(
        self, epoch: Epoch, relation_id: int, version: int, text: str, since: EffectiveFrom | None
    ) -> None:
        number = 1 + sum(map(len, self._entries().effective.values()))
        columns = (None, None, None) if since is None else (since.commit_lsn, since.trigger, number)
        try:
            self._append_all([(epoch, relation_id, version, text, *columns)])
        except (DeltaError, OSError) as error:
            raise storage_error("the relation index cannot be written", error) from error

    def _append_all(self, entries: list[tuple[Any, ...]]) -> None:
        known = self._entries()
        found = [dict(zip(SCHEMA.names, entry, strict=True)) for entry in entries]
        table = self._open()
        before = table.version() if table else None
        # An index of an earlier version of this package lacks the columns commit_lsn, trigger and number.
        append_delta(self._uri, pa.Table.from_pylist(found, SCHEMA), table)
        for entry in found:
            known.remember(entry)
        if table and before == known.version and table.version() == before + 1:
            known.version += 1  # no other process has added an entry

    def _open(self) -> DeltaTable | None:
        """Open the index, or return None before its first entry.

        Raises LakeError if the changelog records an index that is missing: appending would create a new one.
        """
        try:
            return open_delta(self._uri)
        except TableNotFoundError:
            own_tables.check(self._uri.rsplit("/", 2)[0], names=(RELATIONS,))
            return None

    def relation_ids(self) -> list[int]:
        """Return the sorted OIDs of all relations of this server that were received or copied.

        Includes those that other processes have added: tables are copied while changes are received. Raises
        LakeUnavailableError.
        """
        self.catch_up()
        entries = self._entries()
        return sorted({known[0] for known in entries.texts if entries.is_of_this_server(known)})

    def catch_up(self) -> None:
        """Read the entries of other processes, such as the snapshot app. Raises LakeUnavailableError."""
        if self._has_grown():
            self._reload()

    def _has_grown(self) -> bool:
        known = self._known or _Entries()
        try:
            return has_commit(self._uri, known.version + 1)
        except OSError as error:
            raise storage_error("the relation index cannot be read", error) from error

    def records(self, relation_id: int) -> list[RelationRecord]:
        """Return all recorded versions of a relation of this server, in no order.

        Reads new entries of other processes if there is none. Raises LakeUnavailableError.
        """
        found = list(self._records(relation_id))
        if not found and self._has_grown():
            self._reload()  # the snapshot app may have added it
            found = list(self._records(relation_id))
        return found

    def names(self, relation_id: int) -> set[TableName]:
        """Return every name that a relation of this server had."""
        return set[TableName]().union(*(record.names for record in self._records(relation_id)))

    def _records(self, relation_id: int) -> Iterator[RelationRecord]:
        entries = self._entries()
        texts = (
            text
            for known, text in entries.texts.items()
            if known[0] == relation_id and entries.is_of_this_server(known)
        )
        return map(RelationRecord.from_json, texts)

    def last_epoch(self) -> int:
        """Return the highest epoch of an entry, 0 without entries. Raises LakeUnavailableError."""
        return self._entries().last_epoch

    def find(self, relation_id: int, version: int) -> RelationRecord | None:
        """Return the relation with an OID and a version, or None."""
        text = self._entries().texts.get((relation_id, version))
        return None if text is None else RelationRecord.from_json(text)

    def find_version(self, version: int) -> RelationRecord | None:
        """Return the relation with a version and any OID; None if it was never received or copied."""
        texts = (text for (_, known), text in self._entries().texts.items() if known == version)
        return next(map(RelationRecord.from_json, texts), None)

    def by_version(self) -> dict[int, RelationRecord]:
        """Return every relation by its recorded version, to which the changelog's rows refer.

        A version is the hash of the record when it was received.
        """
        return {
            version: RelationRecord.from_json(text)
            for (_, version), text in self._entries().texts.items()
            if text
        }

    def all(self) -> list[RelationRecord]:
        """Return every relation version of every epoch, in no order."""
        return [RelationRecord.from_json(text) for text in self._entries().texts.values()]

    def _reload(self) -> None:
        """Read the index again. Cached entries are kept even if the folder has disappeared."""
        known = self._known or _Entries()
        kept = replace(
            known, texts=dict(known.texts), epochs=dict(known.epochs), named=dict(known.named), effective={}
        )
        self._known = self._read(kept)

    def _entries(self) -> _Entries:
        # Set it after everything was read: an error, or another thread, must not leave or find it empty.
        if self._known is None:
            self._known = self._read(_Entries())
        return self._known

    def _read(self, entries: _Entries) -> _Entries:
        """Read the newest version of the table into these entries, and return them."""
        try:
            table = open_delta(self._uri)
        except TableNotFoundError:
            return replace(entries, version=-1)
        except (DeltaError, OSError) as error:
            raise own_tables.unreadable(self._uri, RELATIONS, error) from None
        entries.version = int(table.version())
        for row in query_delta(table, "select * from it").to_pylist():
            entries.remember(row)
        return entries
