"""What a Spark task does: bring one lake table forward from changelog files. No Spark in here."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
from deltalake import DeltaTable

from airflow_provider_pgrepl.errors import DriftError, PgReplError, Scope
from airflow_provider_pgrepl.replication.changelog import reader
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lake.history.apply import apply_with_history
from airflow_provider_pgrepl.replication.lake.history.place import history_uri
from airflow_provider_pgrepl.replication.lake.merging.merge import Applied, apply_changes, refused_truncate
from airflow_provider_pgrepl.replication.lake.relations_in_force import find_first_drift
from airflow_provider_pgrepl.replication.lake.table import (
    RESNAPSHOT_HINT,
    compact_small_files,
    open_table,
    read_position,
)
from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.relation import Relation

_handles: dict[str, tuple[DeltaTable, tuple[int | None, int | None]]] = {}
"""Open tables of this worker process, and what tells them apart from later ones in their place.

Opening one anew reads its whole log.
"""

_records: dict[tuple[str, int, int], RelationRecord] = {}
"""Relation versions by changelog, relation and version: what one says never changes."""


@dataclass(frozen=True)
class TableWork:
    """All a task needs to know of a table: where it lies, whose it is, what it was built for."""

    relation: Relation
    pipeline: Pipeline
    app: str
    changelog: str

    @property
    def uri(self) -> str:
        return f"{self.pipeline.lake_root}/{self.relation.table.path}"

    @property
    def history_uri(self) -> str | None:
        """Where the past versions of its rows are kept; None when they are not."""
        if not self.pipeline.policy(self.relation.table).history:
            return None
        return history_uri(self.pipeline.lake_root, self.relation.table)

    def close(self) -> None:
        """Forget the open tables: after an error they may not stand where the next work expects them."""
        for uri in (self.uri, self.history_uri):
            if uri is not None:
                _handles.pop(uri, None)


@dataclass(frozen=True)
class TableResult:
    """How a table's work ended: `version` is the lake table's own, `error` None when all went well.

    `history_version` is that of its history, None when it keeps none.
    """

    relation_id: int
    position: int = 0
    version: int = 0
    changes: int = 0
    error: str | None = None
    hint: str = ""
    error_kind: str = ""
    stops_pipeline: bool = False
    error_lsn: int = 0
    history_version: int | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TableResult:
        return cls(**json.loads(text))


def bring_forward(work: TableWork, paths: Iterable[str], upto_lsn: LSN) -> TableResult:
    """Apply what the files hold of the table below `upto_lsn`; errors come back as part of the result."""
    relation_id = work.relation.oid
    try:
        return _apply(work, list(paths), upto_lsn)
    except PgReplError as error:
        work.close()
        return TableResult(
            relation_id,
            error=error.message,
            hint=error.hint,
            error_kind=error.__class__.__name__,
            stops_pipeline=error.scope is Scope.PIPELINE,
        )
    except OSError as error:
        work.close()
        text = f"the lake cannot be read or written: {error.strerror or error.__class__.__name__}"
        return TableResult(relation_id, error=text, error_kind="LakeUnavailableError", stops_pipeline=True)
    except Exception as error:
        # Its text may hold values of rows, so only its kind is told.
        work.close()
        return TableResult(relation_id, error=f"unexpected {error.__class__.__name__}", hint=RESNAPSHOT_HINT)


def _apply(work: TableWork, paths: list[str], upto_lsn: LSN) -> TableResult:
    table = _open(work.uri)
    position = read_position(table, work.app)
    if position is None:
        raise DriftError(f"{work.relation.table}: its lake table was not made in this epoch", RESNAPSHOT_HINT)
    filesystem, root = pafs.FileSystem.from_uri(work.changelog)
    rows = reader.read_rows(filesystem, root, paths, work.relation.oid, position)
    rows = rows.filter(pc.less(rows["commit_lsn"], upto_lsn))
    stop = _find_first_stop(work, rows)
    if stop:
        rows = rows.filter(pc.less(rows["commit_lsn"], stop[0]))
    changes = rows.filter(pc.is_in(rows["op"], pa.array(["I", "U", "D", "T"])))
    history = _open(work.history_uri) if work.history_uri else None
    version, applied = table.version(), 0
    if changes.num_rows:
        done = _apply_changes(work, table, history, changes)
        position, version, applied = done.position, done.version, done.changes
        if compact_small_files(table, work.app):
            version = table.version()
    result = TableResult(
        work.relation.oid,
        position,
        version,
        applied,
        history_version=None if history is None else history.version(),
    )
    if stop is None:
        return result
    lsn, error = stop
    return TableResult(
        **{
            **asdict(result),
            "error": error.message,
            "hint": error.hint,
            "error_kind": type(error).__name__,
            "error_lsn": lsn,
        }
    )


def _apply_changes(
    work: TableWork, table: DeltaTable, history: DeltaTable | None, changes: pa.Table
) -> Applied:
    if history is None:
        return apply_changes(table, changes, work.relation, work.pipeline, work.app)
    done = apply_with_history(table, history, changes, work.relation, work.pipeline, work.app)
    compact_small_files(history, work.app)
    return done


def _open(uri: str) -> DeltaTable:
    """The table's newest version. One that was moved away, and made again, is not taken for the same."""
    beginning = _beginning(uri)
    table, began = _handles.get(uri, (None, None))
    if table is None or began != beginning:
        table = open_table(uri)
        _handles[uri] = table, beginning
    else:
        table.update_incremental()
    return table


def _beginning(uri: str) -> tuple[int | None, int | None]:
    """When the table's first commit was written, and its size; Nones once upkeep has taken it away."""
    filesystem, root = pafs.FileSystem.from_uri(uri)
    first = filesystem.get_file_info(f"{root}/_delta_log/{0:020}.json")
    return first.mtime_ns, first.size


def _find_first_stop(work: TableWork, rows: pa.Table) -> tuple[int, PgReplError] | None:
    """The commit LSN from which on nothing may be applied to the table, and why."""
    truncate = refused_truncate(rows, work.relation, work.pipeline)
    _remember_announced(work, rows)
    drift = find_first_drift(work.relation, rows, partial(_find_record, work))
    if drift is None or (truncate is not None and truncate[0] < drift[0]):
        return truncate
    hint = f"snapshot the table anew: run the snapshot app with --tables '{work.relation.table}'"
    return drift[0], DriftError(drift[1], hint)


def _find_record(work: TableWork, version: int) -> RelationRecord | None:
    """Looked up once a worker: after a TRUNCATE or VACUUM FULL every batch has a version of its own."""
    key = (work.changelog, work.relation.oid, version)
    if key not in _records:
        index = RelationIndex(relations_uri(work.pipeline.lake_root))
        found = index.find(*key[1:]) or reader.find_relation_record(*key)
        if found is None:
            return None
        _records[key] = found
    return _records[key]


def _remember_announced(work: TableWork, rows: pa.Table) -> None:
    """Relations that came with these very rows need no looking up."""
    for new in rows.filter(pc.equal(rows["op"], "R"))["new"].to_pylist():
        record = RelationRecord.from_json(new[0])
        _records[work.changelog, work.relation.oid, record.version] = record
