"""The relation in force for each change of a table: a timeline of spans of changelog rows, in order.

Call `relation_timeline(relation, rows, find_record, choices)`, where `relation` is in force before the rows.
For a lake table, it is the second relation that `read_relations` returns. Each span has rows, and the
relation in whose layout they are.

When the timeline begins, the lake table is built for the first span's relation. If the two relations that
`read_relations` returns differ, it is built for the one with which a later span `begins`. Before the rows of
each further span are applied, the lake table must evolve from the relation of the previous span
(`evolution.Evolution`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import DriftError, PgReplError, Remedy
from airflow_provider_pgrepl.replication.changelog import reader
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.drift import DriftKind
from airflow_provider_pgrepl.replication.drift.judge import judge
from airflow_provider_pgrepl.replication.lake.delta.live_files import app_version
from airflow_provider_pgrepl.replication.lake.delta.table import BEFORE_APP, RELATION_APP
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.values import history_problems, lake_schema

from .translation import is_same_layout, translated

FindRecord = Callable[[int], RelationRecord | None]
"""Returns the relation with a relation version, or None."""

_OBEYING = ["I", "U", "D", "R"]
_WRITING = ["I", "U"]
_TRUNCATED_AND_FILLED = (
    "one transaction truncated the table and wrote rows to it: it cannot be determined whether it"
    " also truncated one partition after that"
)
_TRUNCATE = 0
"""Marks a TRUNCATE among relation versions, none of which is 0."""
_records: dict[tuple[str, int, int], RelationRecord] = {}
"""Records by changelog, relation and version."""


@dataclass(frozen=True)
class RelationSpan:
    """Changelog rows of whole transactions, in the layout of one relation.

    `begins`: the relation in force at the start of the span. `relation`: the one in force at its end; the
    lake table and the layout of changes are the same for both. `before`: the relation in which the span's
    first transaction begins in the changelog, if it is not `begins`.

    The `relation_version` of each row is that of the effective relation after its transaction, which a commit
    records under RELATION_APP.
    """

    begins: Relation
    relation: Relation
    rows: pa.Table
    before: Relation | None = None


@dataclass(frozen=True)
class RelationTimeline:
    """The spans of a table's changelog rows.

    `stop`: the commit LSN from which on no change may be applied, and the error. `derived`: effective
    relations that no stream has sent in this form. They must be in the relation index before a commit names
    them.
    """

    spans: tuple[RelationSpan, ...]
    stop: tuple[LSN, DriftError] | None = None
    derived: tuple[Relation, ...] = ()

    @property
    def relation(self) -> Relation:
        """The relation in force at the end."""
        return self.spans[-1].relation


def read_relations(table: DeltaTable) -> tuple[int, int] | None:
    """Return the versions of two relations: the table's, and that of the first changes after its position.

    The first is the relation for which the lake table is built. The two differ while a table has evolved for
    a transaction that is not in it yet. Returns None for a table that does not record the first.
    """
    built = app_version(table, RELATION_APP)
    if built is None:
        return None
    before = app_version(table, BEFORE_APP)
    return built, built if before is None else before


def relation_timeline(
    relation: Relation, rows: pa.Table, find_record: FindRecord, options: TableOptions
) -> RelationTimeline:
    """Return the timeline of changelog rows, with a check of each relation in them for unsafe changes.

    `rows`: changelog rows of the table in whole transactions, including op R, ordered by (commit_lsn,
    ordinal). A relation that changes in the middle of a transaction is in force from the start of that
    transaction: its earlier rows are translated, unless `rows` lacks the columns new, old and unchanged.

    At an unsafe change, or at a relation version that `find_record` does not find, the timeline ends: the
    spans have the transactions before it. Raises what `find_record` does.
    """
    return _TimelineBuilder(rows, options, relation).build(find_record)


@dataclass
class _Step:
    """The relation from the row `start` on, to which the lake table must evolve before that row."""

    start: int
    begins: Relation
    relation: Relation
    before: Relation | None = None


@dataclass
class _TimelineBuilder:
    rows: pa.Table
    options: TableOptions
    first: Relation
    stamps: list[tuple[int, Relation]] = field(default_factory=list)
    derived: list[Relation] = field(default_factory=list)

    def build(self, find_record: FindRecord) -> RelationTimeline:
        self.lsns = self.rows["commit_lsn"].to_numpy()
        self.truncates = self._truncates()
        self.steps = [_Step(0, self.first, self.first)]
        self.stamps.append((0, self.first))
        end, stop = len(self.rows), None
        truncates = ((at, _TRUNCATE) for at in self.truncates)
        for at, version in sorted([*self._received(), *truncates]):
            if version == _TRUNCATE:
                error = self._note_truncate(at)
            elif version == self.steps[-1].relation.version:
                continue
            else:
                error = self._follow(at, version, find_record)
            if error is not None:
                end = self._transaction_start(at)
                stop = LSN(self.lsns[at]), error
                # Drop the earlier changes of relation in the same transaction, too.
                self.steps = [step for step in self.steps if step.start < end or step is self.steps[0]]
                break
        return RelationTimeline(tuple(self._spans(end)), stop, tuple(self.derived))

    def _received(self) -> Iterator[tuple[int, int]]:
        """Yield the index and the version of each row whose relation version differs from the row before."""
        obeying = pc.is_in(self.rows["op"], pa.array(_OBEYING)).to_numpy()
        places = np.flatnonzero(obeying)
        versions = self.rows["relation_version"].to_numpy()[places]
        first = np.append(True, versions[1:] != versions[:-1])[: len(versions)]
        return zip(places[first].tolist(), versions[first].tolist(), strict=True)

    def _truncates(self) -> list[int]:
        """Return the indexes of the TRUNCATEs of a table whose files are watched: each gives it new files.

        This includes a partitioned table without files, as it may have got partitions since.
        """
        if self.first.relkind != "p" and not self.first.files:
            return []
        places: list[int] = np.flatnonzero(pc.equal(self.rows["op"], "T").to_numpy()).tolist()
        return places

    def _note_truncate(self, at: int) -> DriftError | None:
        step = self.steps[-1]
        if step.relation.relkind == "p" and self._is_filled_after(at):
            return DriftError(_TRUNCATED_AND_FILLED, errors.resnapshot(step.relation.table))
        step.relation = replace(step.relation, truncated_by=self._xid(at))
        self.stamps.append((at, step.relation))
        self.derived.append(step.relation)
        return None

    def _is_filled_after(self, at: int) -> bool:
        """Return True if the TRUNCATE is the last of its transaction, and rows were written after it."""
        end = int(np.searchsorted(self.lsns, self.lsns[at], side="right"))
        ops = self.rows["op"].slice(at + 1, end - at - 1)
        return not _any_of(ops, ["T"]) and _any_of(ops, _WRITING)

    def _xid(self, at: int) -> int:
        return self.rows["xid"][at].as_py() or 0

    def _truncated_by(self, record: RelationRecord) -> int:
        """Return the xid of the TRUNCATE that created the files in the record's catalog.

        The catalog may have been read later than the relation was received. If no TRUNCATE here matches,
        returns that of the relation in force.
        """
        held = self.steps[-1].relation.truncated_by
        files = {xmin for _, xmin in record.catalog.files.values()} if record.catalog else set()
        return next((xid for at in self.truncates if (xid := self._xid(at)) in files), held)

    def _transaction_start(self, at: int) -> int:
        return int(np.searchsorted(self.lsns, self.lsns[at]))

    def _follow(self, at: int, version: int, find_record: FindRecord) -> DriftError | None:
        """Make the relation received at a row the effective one. Return the error if that is not safe."""
        step = self.steps[-1]
        hint = errors.resnapshot(step.relation.table)
        record = find_record(version)
        if record is None:
            return DriftError("its definition is no longer in the changelog", hint)
        recorded = replace(step.relation, truncated_by=self._truncated_by(record))
        verdict = judge(recorded, record, self.options)
        if verdict.kind is DriftKind.UNSAFE or verdict.relation is None:
            return DriftError(verdict.reason, verdict.hint or hint, verdict.remedy or Remedy.RESNAPSHOT)
        problem = _problem(verdict.relation, self.options)
        if problem is not None:
            return DriftError(f"{verdict.reason}: {problem[0]}", problem[1] or hint)
        if verdict.relation.version == step.relation.version:
            return None
        if verdict.relation.version != record.version:
            self.derived.append(verdict.relation)
        self.stamps.append((at, verdict.relation))
        if self._is_same_table(step.relation, verdict.relation):
            step.relation = verdict.relation
            return None
        begin = self._transaction_start(at)
        self._translate(begin, at, step.relation, verdict.relation)
        before = self._effective_before(begin) if self._obeys_any(begin, at) else None
        self.steps.append(_Step(begin, verdict.relation, verdict.relation, before))
        return None

    def _effective_before(self, at: int) -> Relation:
        return next((held for place, held in reversed(self.stamps) if place < at), self.first)

    def _obeys_any(self, start: int, end: int) -> bool:
        return _any_of(self.rows["op"].slice(start, end - start), _OBEYING)

    def _is_same_table(self, before: Relation, after: Relation) -> bool:
        return is_same_layout(before, after) and lake_schema(before, self.options) == lake_schema(
            after, self.options
        )

    def _translate(self, begin: int, at: int, before: Relation, after: Relation) -> None:
        if begin == at or "new" not in self.rows.column_names:
            return
        self.rows = pa.concat_tables(
            [
                self.rows.slice(0, begin),
                translated(self.rows.slice(begin, at - begin), before, after),
                self.rows.slice(at),
            ]
        )

    def _spans(self, end: int) -> Iterator[RelationSpan]:
        rows = self._stamped()
        ends = [*(step.start for step in self.steps[1:]), end]
        for step, until in zip(self.steps, ends, strict=True):
            yield RelationSpan(
                step.begins, step.relation, rows.slice(step.start, until - step.start), step.before
            )

    def _stamped(self) -> pa.Table:
        """Return the rows, each with the version of the effective relation after its transaction.

        DDL can follow the last change of a transaction, and a commit records the relation at its end.
        """
        places = np.array([place for place, _ in self.stamps])
        versions = np.array([held.version for _, held in self.stamps], np.int64)
        ends = np.searchsorted(self.lsns, self.lsns, side="right") - 1
        index = np.searchsorted(places, ends, side="right") - 1
        column = self.rows.schema.get_field_index("relation_version")
        return self.rows.set_column(column, "relation_version", pa.array(versions[index]))


def _any_of(ops: pa.ChunkedArray, wanted: list[str]) -> bool:
    return bool(pc.any(pc.is_in(ops, pa.array(wanted))).as_py())


def _problem(relation: Relation, options: TableOptions) -> tuple[str, str] | None:
    """Return why a lake table cannot have the columns of a relation, and a hint; None if it can."""
    try:
        lake_schema(relation, options)
    except PgReplError as error:
        return error.message, error.hint
    problems = history_problems(relation) if options.policy.history else iter(())
    return next(((problem, "") for problem in problems), None)


@dataclass(frozen=True)
class RelationCache:
    """The relation versions of one table, cached in this process."""

    lake_root: str
    changelog: str
    relation_id: int

    def find(self, version: int) -> RelationRecord | None:
        """Return the record of a relation version, or None if it was neither received nor derived.

        Each version is looked up once in a process: after a TRUNCATE or VACUUM FULL, every batch has a
        version of its own. Raises ChangelogError, LakeUnavailableError.
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
        """Cache the relations in the op R rows, so that they need no lookup."""
        for new in rows.filter(pc.equal(rows["op"], "R"))["new"].to_pylist():
            self._keep(RelationRecord.from_json(new[0]))

    def add(self, relations: Iterable[Relation], epoch: Epoch) -> None:
        """Add derived relations to the relation index, before a commit names them."""
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
