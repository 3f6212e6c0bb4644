"""The check of table definitions in the changelog, in place of the applier where there are no lake tables.

Like the applier, it determines from these definitions whether the changelog has all changes of a table.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from airflow_provider_pgrepl.errors import ChangelogError, ChangelogFileGoneError, FencedError, PgReplError
from airflow_provider_pgrepl.replication.changelog.gaps import first_gap
from airflow_provider_pgrepl.replication.changelog.layout import (
    STATUS_ORDINAL,
    EpochRecord,
    changelog_uri,
    letters,
)
from airflow_provider_pgrepl.replication.changelog.reader import (
    ChangelogFile,
    missing_file,
    read_durable_lsn,
    read_epoch_number,
    read_floor_lsn,
    value_bytes,
)
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.drift.bound_rules import BoundRules
from airflow_provider_pgrepl.replication.events.changelog_rows import FollowedChangelog
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.lake.apply.work_item import ApplierProgress
from airflow_provider_pgrepl.replication.lake.schema_evolution.timeline import (
    RelationCache,
    relation_timeline,
)
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.source.server import known_source, read_server
from airflow_provider_pgrepl.replication.state.database import PipelineRecord, StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableRecord, TableState
from airflow_provider_pgrepl.replication.storage import open_file, open_parquet, open_storage

from .tables import Records

COLUMNS = ("relation_id", "op", "commit_lsn", "ordinal", "relation_version", "xid")
_SAYING = "RT"
_ORDER = [("relation_id", "ascending"), ("commit_lsn", "ascending"), ("ordinal", "ascending")]
log = logging.getLogger(__name__)
_RECORDS_S, _SAVE_S = 2.0, 60.0
_AT_ONCE_BYTES = 256 << 20
"""Bytes of values in the files that are checked at once. The values themselves are not read."""
_GONE_HINT = "take it again: pgrepl snapshot FILE.json --tables NAME; consumers need a snapshot of it"


def definition_rows(uri: str, files: Iterable[ChangelogFile]) -> pa.Table:
    """Return the rows of changelog files that a check needs, ordered by relation, commit LSN and ordinal.

    They are all definitions and TRUNCATEs, and from a table's other changes the first one of each
    transaction, of each relation version, and after each definition or TRUNCATE. Raises
    ChangelogFileGoneError.
    """
    filesystem, root = open_storage(uri)
    pieces = [piece for file in files for piece in _read(filesystem, f"{root}/{file.path}")]
    if not pieces:
        return pa.table({name: [] for name in COLUMNS})
    return pa.concat_tables(pieces).sort_by(_ORDER)


def _read(filesystem: pafs.FileSystem, path: str) -> Iterable[pa.Table]:
    try:
        source = open_file(filesystem, path, value_bytes(path))
    except FileNotFoundError:
        raise missing_file(path) from None
    with source, open_parquet(filesystem, source) as file:
        return [_reduced(group) for group in _groups(file)]


def _groups(file: pq.ParquetFile) -> Iterable[pa.Table]:
    for group in range(file.metadata.num_row_groups):
        yield file.read_row_group(group, columns=list(COLUMNS), use_threads=False)


def _reduced(rows: pa.Table) -> pa.Table:
    rows = rows.sort_by(_ORDER)
    said = pc.is_in(rows["op"], value_set=letters(_SAYING)).to_numpy()
    first = np.zeros(rows.num_rows, dtype=bool)
    for name in ("relation_id", "commit_lsn", "relation_version"):
        values = rows[name].to_numpy()
        first[1:] |= values[1:] != values[:-1]
    first[:1] = True
    first[1:] |= said[:-1]
    return rows.filter(pa.array(first | said))


@dataclass
class _Watched:
    """A table, its definition after `through`, and `saved`, the position that the state records."""

    table: TableName
    relation: Relation
    through: LSN
    saved: LSN


class TableWatch:
    """The check of a pipeline's tables. Called by one thread. `progress` shows how far it has checked."""

    def __init__(
        self, pipeline: Pipeline, state_db: StateDatabase, record: EpochRecord, progress: ApplierProgress
    ) -> None:
        self._pipeline, self._state_db, self._record, self._progress = pipeline, state_db, record, progress
        self._uri = changelog_uri(pipeline.lake_root)
        self._followed = FollowedChangelog(self._uri)
        self._tables: dict[int, _Watched] = {}
        self._records: dict[int, TableRecord] = {}
        self._read_at = self._saved_at = float("-inf")

    def look(self, version: int) -> None:
        """Check the new changes if the changelog is at another version, or if tables may have changed.

        Raises FencedError if a later epoch than this one has begun, ChangelogError, LakeUnavailableError, and
        what the state raises.
        """
        is_due = time.monotonic() - self._read_at >= _RECORDS_S
        if is_due:
            self._read_records()
        if is_due or version != self._progress.version:
            try:
                self._look()
            except ChangelogFileGoneError:
                self._followed.forget()
        if time.monotonic() - self._saved_at >= _SAVE_S:
            self.save()

    def save(self) -> None:
        """Record how far the changes were checked, so that a restart continues there."""
        self._saved_at = time.monotonic()
        for saved in {one.saved for one in self._tables.values()}:
            alike = [one for one in self._tables.values() if one.saved == saved]
            through = min(one.through for one in alike)
            if saved < through:
                # Name the tables: other tables at this position may have become active since, and are not
                # checked yet.
                names = [one.table for one in alike]
                self._state_db.record_watched(self._pipeline.name, names, saved, through)
                for one in alike:
                    one.saved = through

    def needed_above(self) -> LSN:
        """Return the LSN above which changes must be checked, also after a restart. For any thread."""
        return min((one.saved for one in list(self._tables.values())), default=self._progress.applied_lsn)

    # --- tables ---

    def _read_records(self) -> None:
        self._read_at = time.monotonic()
        idle_at = self._state_db.now()
        found = self._state_db.read_tables(self._pipeline.name).values()
        self._records = {
            one.relation.oid: one
            for one in found
            if one.state.is_followed and one.relation is not None and one.position_lsn is not None
        }
        for oid in self._tables.keys() - self._records.keys():
            del self._tables[oid]
        for oid, record in self._records.items():
            known = self._tables.get(oid)
            # If the position differs from the saved one, the table was snapshotted again.
            if known is None or known.saved != record.position_lsn:
                self._begin(oid, record)
        self._progress.idle_at = idle_at

    def _begin(self, oid: int, record: TableRecord) -> None:
        assert record.relation is not None
        assert record.position_lsn is not None
        position = record.position_lsn
        self._tables[oid] = _Watched(record.table, record.relation, position, position)
        if position < self._progress.applied_lsn:
            # Files before the known end of the changelog are needed again.
            self._followed.forget()
        # Check the changelog again, whatever its version is.
        self._progress.version = -1

    # --- the changelog ---

    def _look(self) -> None:
        begin = min((one.through for one in self._tables.values()), default=self._progress.applied_lsn)
        tail, _ = self._followed.look(EventPosition.after_transaction(self._record.epoch, begin))
        if read_epoch_number(tail) > self._record.epoch:
            raise FencedError(f"epoch {read_epoch_number(tail)} of the changelog has begun")
        self._check_kept(read_floor_lsn(tail, self._record.epoch))
        for files in _portions(tail.files_above(begin)):
            self._take(definition_rows(self._uri, files))
        # The durable LSN is exclusive: a transaction that commits at it is not in the changelog.
        through = LSN(max(0, read_durable_lsn(tail) - 1))
        for one in self._tables.values():
            one.through = max(one.through, through)
        for oid, record in self._records.items():
            if record.state is TableState.CATCHING_UP and self._state_db.move(
                self._pipeline.name, record, TableState.STREAMING, reached=self._tables[oid].through
            ):
                self._read_at = float("-inf")
        progress = self._progress
        progress.applied_lsn = max(progress.applied_lsn, through)
        progress.version, progress.caught_up = tail.version, True

    def _check_kept(self, floor: LSN) -> None:
        """Stop tables whose definitions the changelog dropped before they were checked: they may have
        changed."""
        for oid, one in list(self._tables.items()):
            if one.through < floor:
                self._stop(
                    oid, ChangelogError(f"changes after {one.through} are no longer kept", _GONE_HINT), floor
                )

    def _take(self, rows: pa.Table) -> None:
        present = set(pc.unique(rows["relation_id"]).to_pylist())
        for oid in sorted(present & self._tables.keys()):
            one = self._tables[oid]
            new = rows.filter(
                pc.and_(pc.equal(rows["relation_id"], oid), pc.greater(rows["commit_lsn"], int(one.through)))
            )
            if new.num_rows:
                self._judge(oid, one, new)

    def _judge(self, oid: int, one: _Watched, rows: pa.Table) -> None:
        find = RelationCache(self._pipeline.lake_root, self._uri, oid).find
        timeline = relation_timeline(one.relation, rows, find, self._pipeline.options(one.table))
        stops = [stop for stop in (timeline.stop, first_gap(rows, one.table)) if stop is not None]
        if stops:
            lsn, error = min(stops, key=lambda stop: stop[0])
            self._stop(oid, error, lsn)
            return
        # Rows that precede a transaction are no evidence of the transaction itself, which may come later.
        sent = rows.filter(pc.greater(rows["ordinal"], STATUS_ORDINAL))
        if sent.num_rows:
            one.through = LSN(sent["commit_lsn"][-1].as_py())
        if timeline.relation.version != one.relation.version:
            one.relation = timeline.relation
            # Recorded in one statement, so that changes before the position are never compared with a later
            # definition.
            self._state_db.record_watched_relation(
                self._pipeline.name, one.table, one.saved, one.through, one.relation
            )
            one.saved = one.through

    def _stop(self, oid: int, error: PgReplError, lsn: LSN) -> None:
        one, record = self._tables.pop(oid), self._records.pop(oid)
        now = self._state_db.read_tables(self._pipeline.name).get(record.table)
        if now is None or not now.state.is_followed or now.position_lsn != one.saved:
            return
        log.error("table %s stops: %s\n  hint: %s", record.table, error.message, error.hint)
        self._state_db.mark_errored(self._pipeline.name, now, error, lsn)


def _portions(files: Iterable[ChangelogFile]) -> Iterator[list[ChangelogFile]]:
    """Group files, ordered by their first commits, so that no transaction is in two groups.

    A group has at least `_AT_ONCE_BYTES` bytes of values, except for the last one.
    """
    portion: list[ChangelogFile] = []
    size, last = 0, -1
    for file in files:
        if portion and file.min_lsn > last and size >= _AT_ONCE_BYTES:
            yield portion
            portion, size = [], 0
        portion.append(file)
        size, last = size + file.value_bytes, max(last, int(file.max_lsn))
    if portion:
        yield portion


def recorded_names(
    source: Connection,
    pipeline: Pipeline,
    epoch: EpochRecord | None,
    records: Records,
    recorded: PipelineRecord | None,
    selected: Iterable[Relation] = (),
) -> BoundRules | None:
    """Return what is known of tables by their OIDs; None if nothing is known of this database.

    The OIDs of another database are those of other tables. The rules read the index of relations again with
    each call, because the receiver adds to it. Raises LakeUnavailableError, SourceConnectionError.

    :param selected: relations that the pipeline selected from the recorded source. Lake and records are those
        of the epoch's source, which a new epoch may replace.
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
        # Skip removed tables: the state may describe a table of another server. The index knows each entry's
        # source.
        if record.relation is not None and record.membership != "removed":
            of_state[record.relation.oid].append(RelationRecord.of_catalog(record.relation))
    return BoundRules(
        pipeline,
        lambda oid: [*index.records(oid), *of_state.get(oid, ())],
        lambda: {*index.relation_ids(), *of_state},
    )
