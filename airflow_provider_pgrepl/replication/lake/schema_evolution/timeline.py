"""Which relation holds for which changes of a table: the changelog's rows as spans, in order.

Call `relation_timeline(relation, rows, find_record, choices)`, where `relation` is the one that holds before
the rows: of a lake table, the second of what `read_relations` says. It gives spans: rows, and the
relation in whose layout they are. The lake table is for the first span's relation when the timeline begins
(or, where the two that `read_relations` says differ, for that with which a later one `begins`); before
another span goes in, it must be evolved (`evolution.evolved`) from the relation of the one before.
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
from airflow_provider_pgrepl.replication.drift.judge import judge
from airflow_provider_pgrepl.replication.drift.kind import Kind
from airflow_provider_pgrepl.replication.lake.delta.live_files import app_version
from airflow_provider_pgrepl.replication.lake.delta.table import BEFORE_APP, RELATION_APP
from airflow_provider_pgrepl.replication.lake.schema_evolution.translation import is_same_layout, translated
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.tables import TableChoices
from airflow_provider_pgrepl.replication.values import history_problems, lake_schema

FindRecord = Callable[[int], RelationRecord | None]
"""Gives the relation of a relation version."""

_OBEYING = ["I", "U", "D", "R"]
_WRITING = ["I", "U"]
_TRUNCATED_AND_FILLED = (
    "one transaction truncated the table and wrote rows to it: whether it truncated a partition by itself"
    " after that cannot be told"
)
_TRUNCATE = 0
"""Stands among relation versions, of which none is 0."""
_records: dict[tuple[str, int, int], RelationRecord] = {}
"""By changelog, relation and version."""


@dataclass(frozen=True)
class RelationSpan:
    """Rows in the layout of one relation; whole transactions.

    `begins`: the relation with which the span began; `relation`: that with which it ends, which differs in
    nothing that the lake table, or the reading of changes, could tell. The `relation_version` of each row is
    that of the effective relation after its transaction, as a commit says it under RELATION_APP.
    `before`: the relation in which the span's first transaction begins in the changelog, when that is
    another one than `begins`.
    """

    begins: Relation
    relation: Relation
    rows: pa.Table
    before: Relation | None = None


@dataclass(frozen=True)
class RelationTimeline:
    """`stop`: the commit LSN from which on nothing may be applied, and why. `derived`: effective relations
    that no stream has sent in this form, which the relation index must know before a commit names them.
    """

    spans: tuple[RelationSpan, ...]
    stop: tuple[LSN, DriftError] | None = None
    derived: tuple[Relation, ...] = ()

    @property
    def relation(self) -> Relation:
        """The relation in force at the end."""
        return self.spans[-1].relation


def read_relations(table: DeltaTable) -> tuple[int, int] | None:
    """The versions of the relation for which the lake table is built, and of that in which the changes above
    its position begin; None for a table that says neither.

    They differ while a table has evolved for a transaction that is not in it yet.
    """
    built = app_version(table, RELATION_APP)
    if built is None:
        return None
    before = app_version(table, BEFORE_APP)
    return built, built if before is None else before


def relation_timeline(
    relation: Relation, rows: pa.Table, find_record: FindRecord, choices: TableChoices
) -> RelationTimeline:
    """Judge each relation that rows bring or obey, in order.

    `rows` are changelog rows of the relation, op R among them, by (commit_lsn, ordinal), of whole
    transactions. A relation that changed in the middle of a transaction holds from that transaction's
    beginning: its earlier rows are translated. Without the columns new, old and unchanged nothing is.
    At an unsafe change the timeline ends: the spans hold the transactions before. Raises ChangelogError for
    a version that is lost.
    """
    return _TimelineBuilder(rows, choices, relation).build(find_record)


@dataclass
class _Step:
    """The relation from a row on, to which the lake table must be brought before that row."""

    start: int
    begins: Relation
    relation: Relation
    before: Relation | None = None


@dataclass
class _TimelineBuilder:
    rows: pa.Table
    choices: TableChoices
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
                # What the same transaction has changed before is not to be followed either.
                self.steps = [step for step in self.steps if step.start < end or step is self.steps[0]]
                break
        return RelationTimeline(tuple(self._spans(end)), stop, tuple(self.derived))

    def _received(self) -> Iterator[tuple[int, int]]:
        """Where the version of rows differs from that of the row before, and that version."""
        obeying = pc.is_in(self.rows["op"], pa.array(_OBEYING)).to_numpy()
        places = np.flatnonzero(obeying)
        versions = self.rows["relation_version"].to_numpy()[places]
        first = np.append(True, versions[1:] != versions[:-1])[: len(versions)]
        return zip(places[first].tolist(), versions[first].tolist(), strict=True)

    def _truncates(self) -> list[int]:
        """Where a table of which files are watched was truncated as a whole: it has others since.

        A partitioned one that had none may have got some."""
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
        """Whether the transaction wrote rows after it had truncated the table for the last time."""
        end = int(np.searchsorted(self.lsns, self.lsns[at], side="right"))
        ops = self.rows["op"].slice(at + 1, end - at - 1)
        return not _any_of(ops, ["T"]) and _any_of(ops, _WRITING)

    def _xid(self, at: int) -> int:
        return self.rows["xid"][at].as_py() or 0

    def _truncated_by(self, record: RelationRecord) -> int:
        """The TRUNCATE that made the files of a catalog, which may have been read later than received."""
        held = self.steps[-1].relation.truncated_by
        files = {xmin for _, xmin in record.catalog.files.values()} if record.catalog else set()
        return next((xid for at in self.truncates if (xid := self._xid(at)) in files), held)

    def _transaction_start(self, at: int) -> int:
        return int(np.searchsorted(self.lsns, self.lsns[at]))

    def _follow(self, at: int, version: int, find_record: FindRecord) -> DriftError | None:
        """Take the relation that was received at a row as the effective one; the error if that cannot be."""
        step = self.steps[-1]
        hint = errors.resnapshot(step.relation.table)
        record = find_record(version)
        if record is None:
            return DriftError("its definition is no longer in the changelog", hint)
        recorded = replace(step.relation, truncated_by=self._truncated_by(record))
        verdict = judge(recorded, record, self.choices)
        if verdict.kind is Kind.UNSAFE or verdict.relation is None:
            return DriftError(verdict.reason, verdict.hint or hint, verdict.remedy or Remedy.RESNAPSHOT)
        problem = _problem(verdict.relation, self.choices)
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
        return is_same_layout(before, after) and lake_schema(before, self.choices) == lake_schema(
            after, self.choices
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
        """DDL may come after the last change of a transaction, of which a commit says how it ends."""
        places = np.array([place for place, _ in self.stamps])
        versions = np.array([held.version for _, held in self.stamps], np.int64)
        ends = np.searchsorted(self.lsns, self.lsns, side="right") - 1
        index = np.searchsorted(places, ends, side="right") - 1
        column = self.rows.schema.get_field_index("relation_version")
        return self.rows.set_column(column, "relation_version", pa.array(versions[index]))


def _any_of(ops: pa.ChunkedArray, wanted: list[str]) -> bool:
    return bool(pc.any(pc.is_in(ops, pa.array(wanted))).as_py())


def _problem(relation: Relation, choices: TableChoices) -> tuple[str, str] | None:
    """What keeps a lake table from having the columns of a relation, and what to do."""
    try:
        lake_schema(relation, choices)
    except PgReplError as error:
        return error.message, error.hint
    problems = history_problems(relation) if choices.policy.history else iter(())
    return next(((problem, "") for problem in problems), None)


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
