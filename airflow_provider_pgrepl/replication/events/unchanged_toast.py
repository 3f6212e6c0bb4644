"""Values of unchanged TOAST columns that updates did not send, from earlier changes or from the lake."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.errors import ChangelogError, DriftError, LakeUnavailableError, PgReplError
from airflow_provider_pgrepl.replication.changelog.gaps import GAP
from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA, STATUS_ORDINAL, letters
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.events.formats.json_text import TEXT
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
from airflow_provider_pgrepl.replication.lake.files.row_equality import match_rows
from airflow_provider_pgrepl.replication.lake.merge.changes import (
    TEXTS,
    Bools,
    Ints,
    RowImages,
    array_of,
    bytes_before,
    replaced,
)
from airflow_provider_pgrepl.replication.lake.time_travel.moment import find_moment
from airflow_provider_pgrepl.replication.lake.time_travel.overlay import RowsByKey
from airflow_provider_pgrepl.replication.lake.time_travel.plan import Planner, TablePlan
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.values import typed_column
from airflow_provider_pgrepl.replication.values.text_output import texts_of
from airflow_provider_pgrepl.trace import trace_of

from .changelog_rows import RowBatch
from .relations import KnownRelations

_PIECE_BYTES = 16 << 20

Key = tuple[str | None, ...]
"""The text values of a row's replica identity."""
Values = dict[int, str]
"""Text values by position in the stream."""
_MOST = 1_000_000
"""The highest number of changed rows that UntouchedRows tracks."""
_REMEMBERED_BYTES = 64 << 20
_WIDE_BYTES, _LONG = 512, 8
"""The minimum size of a row in bytes, and of a value in characters, to be remembered.

PostgreSQL stores values out of line only in rows of more than 2 kB ("TOAST"). A value of that size may have
fewer characters than bytes, so these limits are lower.
"""
_ENTRY_BYTES = 300
_LOOKED_UP = 1_000
"""The number of rows per lookup in the lake: each of them may get large values."""
_WITH_VALUES, _OF_A_ROW = pa.array(["I", "U"]), pa.array(["I", "U", "D"])
_OF_A_TABLE = "IUDTR"
LookUp = Callable[[RelationRecord, Epoch, LSN, Mapping[Key, Collection[int]]], Mapping[Key, Values]]
"""Returns the values that rows had in the lake, given a relation, an epoch, an LSN, and positions by key."""
Earlier = Callable[[pa.Table, int], Iterator[pa.Table]]
"""Returns the changelog rows right before some rows, in order, with about the given bytes of values."""
log = logging.getLogger(__name__)


def bytes_of(values: Values) -> int:
    """Return an upper bound of the size of the values in bytes."""
    return sum(len(text) if text.isascii() else 4 * len(text) for text in values.values())


def with_values(
    rows: pa.Table, found: Mapping[int, Values], piece_bytes: int = _PIECE_BYTES
) -> Iterator[pa.Table]:
    """Yield `rows` of ROW_SCHEMA in pieces, with the found values filled in.

    `found`: the values by row number; their positions are removed from `unchanged`. A piece has little more
    than `piece_bytes` bytes of these values.
    """
    sizes = np.zeros(rows.num_rows, np.int64)
    for number, values in found.items():
        sizes[number] = bytes_of(values)
    ends = np.flatnonzero(np.diff(np.cumsum(sizes) // piece_bytes)) + 1
    start = 0
    for end in [*ends.tolist(), rows.num_rows]:
        some = {number - start: found[number] for number in found if start <= number < end}
        yield _filled(rows.slice(start, end - start), some)
        start = end


def _filled(rows: pa.Table, found: Mapping[int, Values]) -> pa.Table:
    if not found:
        return rows
    numbers = sorted(found)
    where: Bools = np.zeros(rows.num_rows, np.bool_)
    where[numbers] = True
    new: list[list[str | None]] = []
    unchanged: list[list[int] | None] = []
    for row in rows.select(["new", "unchanged"]).filter(pa.array(where)).to_pylist():
        values = found[numbers[len(new)]]
        new.append([values.get(place, text) for place, text in enumerate(row["new"])])
        unchanged.append([place for place in row["unchanged"] if place not in values] or None)
    for name, texts in (("new", new), ("unchanged", unchanged)):
        kind = ROW_SCHEMA.field(name).type
        column = replaced(array_of(rows, name, kind), where, pa.array(texts, kind))
        rows = rows.set_column(rows.column_names.index(name), name, column)
    return rows


class RowChange(NamedTuple):
    """A change of a row, or a TRUNCATE or relation message of its table.

    `key` and `old`: the keys of the rows after and before, as far as they were sent. `unsent`: the positions
    of values that an update did not send.
    """

    op: str
    key: Key | None
    old: Key | None
    unsent: Sequence[int]

    @property
    def before(self) -> Key | None:
        """Return the key of the row that the change modifies."""
        return self.old or self.key


class UntouchedRows:
    """Tracks which rows were not changed since a point in time.

    `since`: the epoch and LSN of this point, which is before the transaction that a batch of rows begins
    with. None if not all changes since then are known. All batches of one transaction share it.
    """

    def __init__(self) -> None:
        self.since: tuple[Epoch, LSN] | None = None
        self._last: tuple[int, int] | None = None
        self._rows: set[int] = set()
        self._tables: set[int] = set()

    def forget(self) -> None:
        """Prepare for rows that do not directly follow the previous ones."""
        self.since = self._last = None

    def begin(self, rows: pa.Table) -> bool:
        """Register rows, in order, before their changes are passed to `first_changes`.

        Returns True if they start another transaction than the previous rows ended with, and start it from
        its beginning.
        """
        places = rows.select(["epoch", "commit_lsn", "ordinal"])
        (epoch, lsn, ordinal), (_, last, _) = (
            place.values() for n in (0, rows.num_rows - 1) for place in places.slice(n, 1).to_pylist()
        )
        before, self._last = self._last, (epoch, last)
        if before == (epoch, lsn):
            return False
        self._rows.clear()
        self._tables.clear()
        is_whole = before is not None or ordinal <= 0
        self.since = (Epoch(epoch), LSN(max(0, lsn - 1))) if is_whole else None
        return is_whole

    def first_changes(self, oid: int, changes: Iterable[RowChange]) -> dict[Key, Sequence[int]]:
        """Return the positions of missing values, by the keys of rows that were not changed since the
        point."""
        found: dict[Key, Sequence[int]] = {}
        for change in changes:
            if change.op in "TR":
                self._tables.add(oid)
            elif (before := change.before) is not None:
                # A row that shares its hash with a changed row counts as changed.
                row = hash((oid, before))
                if change.unsent and row not in self._rows and oid not in self._tables:
                    found[before] = change.unsent
                self._rows |= {row, hash((oid, change.key))}
        if len(self._rows) > _MOST:
            self.since = None
            self._rows.clear()
        return found if self.since is not None else {}


class UnchangedValues:
    """Fills in values that an update did not send, if the last change of the row is remembered.

    `earlier`: returns the rows before the first update that lacks a value. Nothing is remembered before that
    update, at no cost. `look_up`: finds values that are not remembered. `is_wanted`: selects the relations.

    Rows are identified by their replica identity. PostgreSQL guarantees at all times that only one row has
    its values: a deferrable key cannot be a replica identity ("Logical Replication", "Publication"). With
    REPLICA IDENTITY FULL the old row has every value.
    """

    def __init__(
        self,
        relations: KnownRelations,
        is_wanted: Callable[[RelationRecord], bool],
        earlier: Earlier,
        look_up: LookUp | None = None,
        budget: int = _REMEMBERED_BYTES,
    ) -> None:
        self._relations, self._is_wanted, self._earlier = relations, is_wanted, earlier
        self._look_up, self._budget = look_up, budget
        self._untouched = UntouchedRows()
        self.forget()

    def forget(self) -> None:
        """Forget all values, because the next rows do not directly follow the previous ones."""
        self._is_following = False
        self._rows: OrderedDict[tuple[int, int, Key], Values] = OrderedDict()
        self._bytes = 0
        self._versions: dict[int, int] = {}
        self._lives: dict[int, int] = {}
        """The number of times that all rows of a table were forgotten, by its oid."""
        self._untouched.forget()

    def filled(self, stretches: Iterator[RowBatch]) -> Iterator[RowBatch]:
        """Yield the same rows, which must be contiguous, with values filled in.

        A batch that the values make large is split.
        """
        for rows, ends_transaction in stretches:
            lsns, end = rows["commit_lsn"], 0
            for some in self.fill(rows):
                end += some.num_rows
                ends = ends_transaction if end == rows.num_rows else lsns[end - 1] != lsns[end]
                yield RowBatch(some, ends)

    def fill(self, rows: pa.Table) -> Iterator[pa.Table]:
        """Yield `rows` of ROW_SCHEMA, which directly follow the previous ones, with values filled in.

        They are yielded in pieces of limited size. Exhaust the iterator before the next call.
        """
        step = rows.num_rows if self._look_up is None else _LOOKED_UP
        for start in range(0, rows.num_rows, step):
            yield from self._fill(rows.slice(start, step))

    def _fill(self, rows: pa.Table) -> Iterator[pa.Table]:
        is_new = self._untouched.begin(rows)
        if not self._is_following and _lacks_values(rows).any():
            self._begin(rows)
            if not is_new:
                # The rows that the earlier part of the transaction changed are unknown.
                self._untouched.since = None
        yield from with_values(rows, self._follow(rows)) if self._is_following else (rows,)

    def _begin(self, rows: pa.Table) -> None:
        self._is_following = True
        looks_up, self._look_up = self._look_up, None
        try:
            for before in self._earlier(rows, self._budget):
                self._follow(before)
        except ChangelogError:
            # Old hours of the changelog were dropped while they were read.
            self._rows.clear()
            self._bytes = 0
        finally:
            self._look_up = looks_up

    # --- what is remembered ---

    def _follow(self, rows: pa.Table) -> dict[int, Values]:
        """Remember the values of the rows. Return the values found for updates, by row number."""
        found: dict[int, Values] = {}
        start = 0
        for gap in [*np.flatnonzero(pc.equal(rows["op"], GAP).to_numpy()).tolist(), rows.num_rows]:
            some = self._follow_some(rows.slice(start, gap - start))
            found |= {start + number: values for number, values in some.items()}
            start = gap + 1
            if gap < rows.num_rows:
                # A skipped transaction may have changed any row.
                self.forget()
                self._is_following = True
        return found

    def _follow_some(self, rows: pa.Table) -> dict[int, Values]:
        ops = rows["op"]
        oids = rows["relation_id"].to_numpy()
        sizes = np.diff(bytes_before(array_of(rows, "new", TEXTS)))
        is_large = pc.is_in(ops, value_set=_WITH_VALUES).to_numpy() & (sizes >= _WIDE_BYTES)
        is_concerned = is_large | _lacks_values(rows) | (self._look_up is not None)
        concerned = {*np.unique(oids[is_concerned]).tolist(), *self._versions}
        # After a change of the publication the server sends each table's definition again. A publication
        # status adds nothing to it.
        is_said = pc.not_equal(rows["ordinal"], STATUS_ORDINAL)
        is_of_table = pc.and_(pc.is_in(ops, value_set=letters(_OF_A_TABLE)), is_said).to_numpy()
        versions = rows["relation_version"].to_numpy()
        found: dict[int, Values] = {}
        for oid in concerned:
            of_it = np.flatnonzero(is_of_table & (oids == oid))
            for places in np.split(of_it, np.flatnonzero(np.diff(versions[of_it])) + 1):
                if len(places):
                    version = int(versions[places[0]])
                    some = self._follow_table(oid, version, rows.take(pa.array(places)), sizes[places])
                    found |= {int(places[number]): values for number, values in some.items()}
        return found

    def _follow_table(self, oid: int, version: int, rows: pa.Table, sizes: Ints) -> dict[int, Values]:
        if self._versions.get(oid) != version:
            # A new definition may have rewritten every value.
            self._forget_table(oid)
            self._versions[oid] = version
        try:
            changes = self._changes(version, rows)
        except DriftError:
            self._forget_table(oid)
            return {}
        looked_up = self._looked_up(oid, version, changes)
        found: dict[int, Values] = {}
        for number, change in enumerate(changes):
            if change.op in "TR":
                # An equal definition is received again even if the values changed: the table was altered and
                # altered back, or the receiver did not see it for a while.
                self._forget_table(oid)
                continue
            before = self._take(oid, change.before) or {}
            before |= looked_up.pop(change.before, {})
            if (key := change.key) is None:
                continue
            self._take(oid, key)
            kept = {place: before[place] for place in change.unsent if place in before}
            if kept:
                found[number] = kept
            if kept or sizes[number] >= _WIDE_BYTES:
                texts: Sequence[str | None] = rows["new"][number].as_py()
                sent = {place: text for place, text in enumerate(texts) if text and len(text) > _LONG}
                self._keep(oid, key, sent | kept)
        return found

    def _looked_up(self, oid: int, version: int, changes: Sequence[RowChange]) -> dict[Key | None, Values]:
        """Return the values that are remembered, or found in the lake, for rows not changed before."""
        if self._look_up is None:
            return {}
        wanted: dict[Key, list[int]] = {}
        # Keep the remembered values: they may be evicted before the loop reaches their row.
        known: dict[Key | None, Values] = {}
        for key, places in self._untouched.first_changes(oid, changes).items():
            known[key] = self._rows.get((oid, self._lives.get(oid, 0), key), {})
            if lacking := [place for place in places if place not in known[key]]:
                wanted[key] = lacking
        if wanted and self._untouched.since is not None:
            found = self._look_up(self._relations.find(version), *self._untouched.since, wanted)
            known |= {key: known[key] | values for key, values in found.items()}
        return known

    def _changes(self, version: int, rows: pa.Table) -> list[RowChange]:
        """Return the changes, without keys if the table is not tracked. Raises DriftError."""
        new: list[Key | None] = [None] * rows.num_rows
        old = new
        if pc.any(pc.is_in(rows["op"], value_set=_OF_A_ROW)).as_py():
            record = self._relations.find(version)
            identity = [index for index, column in enumerate(record.message.columns) if column.is_identity]
            has_key = record.message.replica_identity in ("d", "i") and identity
            if has_key and self._is_wanted(record):
                new, old = (_keys(rows, side, identity, record) for side in ("new", "old"))
        columns = zip(rows["op"].to_pylist(), new, old, rows["unchanged"].to_pylist(), strict=True)
        # An insert that lacks values moved a row into a row filter. Nothing that is known of its key is of
        # this row.
        return [
            RowChange(op, _whole(key, one), one, (unsent if op == "U" else None) or ())
            for op, key, one, unsent in columns
        ]

    def _take(self, oid: int, key: Key | None) -> Values | None:
        """Remove and return the remembered values of a row."""
        values = None if key is None else self._rows.pop((oid, self._lives.get(oid, 0), key), None)
        if values is not None:
            self._bytes -= _size(values)
        return values

    def _keep(self, oid: int, key: Key, values: Values) -> None:
        self._rows[oid, self._lives.get(oid, 0), key] = values
        self._bytes += _size(values)
        while self._bytes > self._budget:
            _, oldest = self._rows.popitem(last=False)
            self._bytes -= _size(oldest)

    def _forget_table(self, oid: int) -> None:
        """Forget all rows of a table. They stay in memory until the budget evicts them."""
        self._lives[oid] = self._lives.get(oid, 0) + 1


def _whole(key: Key | None, old: Key | None) -> Key | None:
    """Return the key with the large values that an update did not send copied from the old key."""
    if key is None or old is None:
        return key
    return tuple(before if one is None else one for one, before in zip(key, old, strict=True))


def _size(values: Values) -> int:
    return _ENTRY_BYTES + bytes_of(values)


def _lacks_values(rows: pa.Table) -> Bools:
    """Return a mask of the rows that lack values."""
    found: Bools = pc.fill_null(pc.list_value_length(rows["unchanged"]), 0).to_numpy() > 0
    return found


def _keys(rows: pa.Table, side: str, identity: Sequence[int], record: RelationRecord) -> list[Key | None]:
    """Return the key of each row on one side, None if there is none. Raises DriftError."""
    found: list[Key | None] = [None] * rows.num_rows
    # A TRUNCATE or relation message contains no row.
    is_row = pc.is_in(rows["op"], value_set=_OF_A_ROW)
    some, numbers = rows.filter(is_row), np.flatnonzero(is_row.to_numpy())
    if some.num_rows:
        tuples = RowImages(array_of(some, side, TEXTS), len(record.message.columns), record.name)
        columns = (tuples.column(index).to_pylist() for index in identity)
        for number, key in zip(numbers[tuples.present].tolist(), zip(*columns, strict=True), strict=True):
            found[number] = key
    return found


class LakeValues:
    """Looks up values in a pipeline's lake, as of an LSN.

    Omits values whose text may differ from the one that the server sends.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._known: tuple[object, _Table | None] = (None, None)

    def find(
        self, record: RelationRecord, epoch: Epoch, lsn: LSN, wanted: Mapping[Key, Collection[int]]
    ) -> dict[Key, Values]:
        """Return the values at some positions in the stream, by the rows' keys, as of an LSN.

        Returns an empty dictionary, and logs a warning, if the lookup fails. Raises LakeUnavailableError.
        """
        places = sorted(set().union(*wanted.values()))
        moment = record.version, epoch, lsn, tuple(places)
        failed = ""
        try:
            if self._known[0] != moment:
                self._known = moment, self._table(record, epoch, lsn, places)
            table = self._known[1]
            return {} if table is None else table.find(wanted)
        except LakeUnavailableError:
            raise
        except PgReplError as error:
            failed = error.message
        except Exception as error:  # noqa: BLE001 - DataFusion raises plain ones, which may hold values
            failed = trace_of(error)
        log.warning("values of %s as of %s cannot be looked up: %s", record.name, lsn, failed)
        return {}

    def _table(
        self, record: RelationRecord, epoch: Epoch, lsn: LSN, places: Collection[int]
    ) -> _Table | None:
        points = ConsistentPoints(self._pipeline.lake_root)
        moment = find_moment(self._pipeline.lake_root, points, lsn, epoch=epoch)
        plan = Planner(self._pipeline, moment, points).plan(record.name)
        relation = plan.relation
        if relation is None or relation.oid != record.message.oid or plan.unverified is not None:
            return None
        columns = _columns(record, relation)
        identity = [place for place, one in enumerate(record.message.columns) if one.is_identity]
        keys = {place: columns[place] for place in identity if place in columns}
        if [one.name for one in keys.values()] != [one.name for one in relation.key_columns] or not keys:
            return None
        values = {
            place: columns[place]
            for place in places
            if place not in record.hidden and place in columns and self._is_exact(columns[place], plan)
        }
        names = [one.name for one in keys.values()], [one.name for one in values.values()]
        rows = RowsByKey(plan, *names)
        if not values or not rows.can_be_read:
            return None
        return _Table(rows, self._pipeline.options(relation.table), relation, keys, values)

    def _is_exact(self, column: Column, plan: TablePlan) -> bool:
        """Return True if the lake's value converts to the text that the server sends (see texts_of)."""
        assert plan.relation is not None
        choice, held = self._pipeline.options(plan.table).column(column.name), plan.schema
        if choice.excluded or column.attnum in plan.relation.ignored or column.name not in held.names:
            return False
        # The type of the version, which may have been copied with other settings.
        kind = held.field(column.name).type
        is_plain = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind)
        return is_plain or (choice.infinity == "error" and "decimal" not in str(kind))


@dataclass(frozen=True)
class _Table:
    """A lake table that is looked up. `keys` and `values`: its columns by position in the stream."""

    rows: RowsByKey
    options: TableOptions
    relation: Relation
    keys: Mapping[int, Column]
    values: Mapping[int, Column]

    def find(self, wanted: Mapping[Key, Collection[int]]) -> dict[Key, Values]:
        names, texts = [one.name for one in self.keys.values()], zip(*wanted, strict=True)
        parsers = (typed_column(one, self.relation.table, self.options) for one in self.keys.values())
        typed = [parser.parse(pa.array(some, TEXT)) for parser, some in zip(parsers, texts, strict=True)]
        keys = pa.table(typed, names=names)
        rows = self.rows.find(keys)
        found: dict[Key, Values] = {}
        columns = {
            place: texts_of(rows[column.name].combine_chunks(), column.pg_type).to_pylist()
            for place, column in self.values.items()
        }
        of = list(wanted)
        for row, number in enumerate(match_rows(rows, keys).tolist()):
            values = {place: texts[row] for place, texts in columns.items()}
            key = of[number]
            found[key] = {
                place: text for place, text in values.items() if place in wanted[key] and text is not None
            }
        return found


def _columns(record: RelationRecord, relation: Relation) -> dict[int, Column]:
    """Return the relation's columns that equal those of the stream, by position in the stream."""
    known = {(one.name, one.type_oid, one.typmod): one for one in relation.columns}
    sent = enumerate(record.message.columns)
    found = ((place, known.get((one.name, one.type_oid, one.typmod))) for place, one in sent)
    return {place: column for place, column in found if column is not None}
