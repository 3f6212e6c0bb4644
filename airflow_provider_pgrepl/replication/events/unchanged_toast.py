"""UnchangedValues: large values that updates left alone, as changes before them had them."""

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
from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA, STANDING_ORDINAL, letters
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.events.changelog_rows import Stretch
from airflow_provider_pgrepl.replication.events.formats.json_text import TEXT
from airflow_provider_pgrepl.replication.events.relations import KnownRelations
from airflow_provider_pgrepl.replication.lake.consistent_points import Points
from airflow_provider_pgrepl.replication.lake.files.row_equality import match_rows
from airflow_provider_pgrepl.replication.lake.merge.changes import (
    TEXTS,
    Bools,
    Ints,
    Tuples,
    array_of,
    bytes_before,
    replaced,
)
from airflow_provider_pgrepl.replication.lake.time_travel.moment import find_moment
from airflow_provider_pgrepl.replication.lake.time_travel.plan import Planner
from airflow_provider_pgrepl.replication.lake.time_travel.rows_by_key import RowsByKey
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.tables import TableChoices
from airflow_provider_pgrepl.replication.values import typed_column
from airflow_provider_pgrepl.replication.values.text_output import texts_of
from airflow_provider_pgrepl.trace import trace_of

_PIECE_BYTES = 16 << 20

Key = tuple[str | None, ...]
"""Texts of a row's replica identity."""
Values = dict[int, str]
"""Texts by place in the stream."""
_MOST = 1_000_000
"""Rows that are known to have changed."""
_REMEMBERED_BYTES = 64 << 20
_WIDE_BYTES, _LONG = 512, 8
"""A row with less text, or such a text, is hardly kept out of line: PostgreSQL does that with rows of more
than 2 kB and values of more than 24 bytes ("TOAST"), which may have fewer characters than bytes."""
_ENTRY_BYTES = 300
_LOOKED_UP = 1_000
"""Rows at a time: each may get large values."""
_WITH_VALUES, _OF_A_ROW = pa.array(["I", "U"]), pa.array(["I", "U", "D"])
_OF_A_TABLE = "IUDTR"
LookUp = Callable[[RelationRecord, Epoch, LSN, Mapping[Key, Collection[int]]], Mapping[Key, Values]]
"""Given a relation, a moment, and by keys places in the stream: what rows under these keys had there."""
Earlier = Callable[[pa.Table, int], Iterator[pa.Table]]
"""Given rows and a number of bytes: the changelog's rows right before those, about so many, in order."""
log = logging.getLogger(__name__)


def bytes_of(values: Values) -> int:
    """How many they are at most."""
    return sum(len(text) if text.isascii() else 4 * len(text) for text in values.values())


def with_values(
    rows: pa.Table, found: Mapping[int, Values], piece_bytes: int = _PIECE_BYTES
) -> Iterator[pa.Table]:
    """Rows of ROW_SCHEMA with values by row, which `unchanged` names there and no more here; together all
    rows, and in no piece much more of these values than `piece_bytes`."""
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
    """`key` and `old`: of the row after and before, as far as they were sent. `unsent`: places of values that
    an update left alone. Also a TRUNCATE, or a definition, of the table."""

    op: str
    key: Key | None
    old: Key | None
    unsent: Sequence[int]

    @property
    def before(self) -> Key | None:
        """The key of the row that it changes."""
        return self.old or self.key


class UntouchedRows:
    """`since`: the epoch and LSN of the moment; None: there is none of which enough is known. Where a
    transaction is given in parts, it is before all of them."""

    def __init__(self) -> None:
        self.since: tuple[Epoch, LSN] | None = None
        self._last: tuple[int, int] | None = None
        self._rows: set[int] = set()
        self._tables: set[int] = set()

    def forget(self) -> None:
        """What comes next need not come right after what came."""
        self.since = self._last = None

    def begin(self, rows: pa.Table) -> bool:
        """With these rows, in order; whether they begin with another transaction than those before ended
        with."""
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
        """By the keys of rows that no change before has concerned, which values their first one left out."""
        found: dict[Key, Sequence[int]] = {}
        for change in changes:
            if change.op in "TR":
                self._tables.add(oid)
            elif (before := change.before) is not None:
                # Who shares a hash with another row is taken for touched.
                row = hash((oid, before))
                if change.unsent and row not in self._rows and oid not in self._tables:
                    found[before] = change.unsent
                self._rows |= {row, hash((oid, change.key))}
        if len(self._rows) > _MOST:
            self.since = None
            self._rows.clear()
        return found if self.since is not None else {}


class UnchangedValues:
    """Fills what an update did not send, where the last change of its row is remembered.

    `earlier`: read once a value is missing for the first time; before that nothing is remembered, and nothing
    is paid. `look_up`: asked for what is not remembered. `is_wanted`: of which tables. It remembers rows by
    replica identity, whose values PostgreSQL has in one row alone at any time: a deferrable key is none
    ("Logical Replication", "Publication"). With REPLICA IDENTITY FULL the old row has every value.
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
        """What is given next does not come right after what was given."""
        self._is_following = False
        self._rows: OrderedDict[tuple[int, int, Key], Values] = OrderedDict()
        self._bytes = 0
        self._versions: dict[int, int] = {}
        self._lives: dict[int, int] = {}
        """By table, how often all of its rows were forgotten."""
        self._untouched.forget()

    def filled(self, stretches: Iterator[Stretch]) -> Iterator[Stretch]:
        """The same, where nothing lies between them, with values that `unchanged` named; more of them where
        that makes them large."""
        for rows, ends_transaction in stretches:
            lsns, end = rows["commit_lsn"], 0
            for some in self.fill(rows):
                end += some.num_rows
                ends = ends_transaction if end == rows.num_rows else lsns[end - 1] != lsns[end]
                yield Stretch(some, ends)

    def fill(self, rows: pa.Table) -> Iterator[pa.Table]:
        """Rows of ROW_SCHEMA that come right after those before; again as they are but for the values, in
        pieces that are not too large. All are taken before more is given."""
        step = rows.num_rows if self._look_up is None else _LOOKED_UP
        for start in range(0, rows.num_rows, step):
            yield from self._fill(rows.slice(start, step))

    def _fill(self, rows: pa.Table) -> Iterator[pa.Table]:
        is_new = self._untouched.begin(rows)
        if not self._is_following and _is_unsent(rows).any():
            self._begin(rows)
            if not is_new:
                # What was changed by the transaction's earlier part is not known.
                self._untouched.since = None
        yield from with_values(rows, self._follow(rows)) if self._is_following else (rows,)

    def _begin(self, rows: pa.Table) -> None:
        self._is_following = True
        looks_up, self._look_up = self._look_up, None
        try:
            for before in self._earlier(rows, self._budget):
                self._follow(before)
        except ChangelogError:
            # Old hours were dropped meanwhile.
            self._rows.clear()
            self._bytes = 0
        finally:
            self._look_up = looks_up

    # --- what is remembered ---

    def _follow(self, rows: pa.Table) -> dict[int, Values]:
        """What is found, by row."""
        found: dict[int, Values] = {}
        start = 0
        for gap in [*np.flatnonzero(pc.equal(rows["op"], GAP).to_numpy()).tolist(), rows.num_rows]:
            some = self._follow_some(rows.slice(start, gap - start))
            found |= {start + number: values for number, values in some.items()}
            start = gap + 1
            if gap < rows.num_rows:
                # Whatever a skipped transaction did to whichever row.
                self.forget()
                self._is_following = True
        return found

    def _follow_some(self, rows: pa.Table) -> dict[int, Values]:
        ops = rows["op"]
        oids = rows["relation_id"].to_numpy()
        sizes = np.diff(bytes_before(array_of(rows, "new", TEXTS)))
        is_large = pc.is_in(ops, value_set=_WITH_VALUES).to_numpy() & (sizes >= _WIDE_BYTES)
        is_concerned = is_large | _is_unsent(rows) | (self._look_up is not None)
        concerned = {*np.unique(oids[is_concerned]).tolist(), *self._versions}
        # After a change of the publication the server says each table's definition again; a standing tells
        # nothing more.
        is_said = pc.not_equal(rows["ordinal"], STANDING_ORDINAL)
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
            # Another definition may have rewritten every value.
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
                # The same definition is said again when the values, too, may be others: it was altered and
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
        """What the lake has of values that are not remembered."""
        if self._look_up is None:
            return {}
        wanted: dict[Key, list[int]] = {}
        # What is remembered now may have to go before its turn comes.
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
        """Without keys where the table is not followed. Raises DriftError."""
        new: list[Key | None] = [None] * rows.num_rows
        old = new
        if pc.any(pc.is_in(rows["op"], value_set=_OF_A_ROW)).as_py():
            record = self._relations.find(version)
            identity = [index for index, column in enumerate(record.message.columns) if column.is_identity]
            has_key = record.message.replica_identity in ("d", "i") and identity
            if has_key and self._is_wanted(record):
                new, old = (_keys(rows, side, identity, record) for side in ("new", "old"))
        columns = zip(rows["op"].to_pylist(), new, old, rows["unchanged"].to_pylist(), strict=True)
        return [RowChange(op, _whole(key, one), one, unsent or ()) for op, key, one, unsent in columns]

    def _take(self, oid: int, key: Key | None) -> Values | None:
        """What a row had; it is not remembered any more."""
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
        """Its rows go when there is no room for them."""
        self._lives[oid] = self._lives.get(oid, 0) + 1


def _whole(key: Key | None, old: Key | None) -> Key | None:
    """A key with the parts that an update left alone, which are large and in the old one."""
    if key is None or old is None:
        return key
    return tuple(before if one is None else one for one, before in zip(key, old, strict=True))


def _size(values: Values) -> int:
    return _ENTRY_BYTES + bytes_of(values)


def _is_unsent(rows: pa.Table) -> Bools:
    """Which updates left values out."""
    found: Bools = pc.fill_null(pc.list_value_length(rows["unchanged"]), 0).to_numpy() > 0
    return found


def _keys(rows: pa.Table, side: str, identity: Sequence[int], record: RelationRecord) -> list[Key | None]:
    """Of each row its key on one side, None where it has none. Raises DriftError."""
    found: list[Key | None] = [None] * rows.num_rows
    # What a TRUNCATE, or a relation, says is no row.
    is_row = pc.is_in(rows["op"], value_set=_OF_A_ROW)
    some, numbers = rows.filter(is_row), np.flatnonzero(is_row.to_numpy())
    if some.num_rows:
        tuples = Tuples(array_of(some, side, TEXTS), len(record.message.columns), record.name)
        columns = (tuples.column(index).to_pylist() for index in identity)
        for number, key in zip(numbers[tuples.present].tolist(), zip(*columns, strict=True), strict=True):
            found[number] = key
    return found


class LakeValues:
    """Looks values up in a pipeline's lake, as of a moment. What the lake cannot tell as it was sent, it does
    not tell at all."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._known: tuple[object, _Table | None] = (None, None)

    def find(
        self, record: RelationRecord, epoch: Epoch, lsn: LSN, wanted: Mapping[Key, Collection[int]]
    ) -> dict[Key, Values]:
        """Of the rows under some keys of the replica identity, as of an LSN, the values at places in the
        stream. Raises LakeUnavailableError."""
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
        points = Points(self._pipeline.lake_root)
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
            if place not in record.hidden and place in columns and self._is_exact(columns[place], relation)
        }
        names = [one.name for one in keys.values()], [one.name for one in values.values()]
        rows = RowsByKey(plan, *names)
        if not values or not rows.can_be_read:
            return None
        return _Table(rows, self._pipeline.choices(relation.table), relation, keys, values)

    def _is_exact(self, column: Column, relation: Relation) -> bool:
        """Whether the lake's value can be written as the server did (see texts_of)."""
        choices = self._pipeline.choices(relation.table)
        choice = choices.column(column.name)
        if choice.excluded or column.attnum in relation.ignored:
            return False
        kind = typed_column(column, relation.table, choices).lake_type
        is_plain = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind)
        return is_plain or (choice.infinity == "error" and "decimal" not in str(kind))


@dataclass(frozen=True)
class _Table:
    """`keys` and `values`: columns by place in the stream."""

    rows: RowsByKey
    choices: TableChoices
    relation: Relation
    keys: Mapping[int, Column]
    values: Mapping[int, Column]

    def find(self, wanted: Mapping[Key, Collection[int]]) -> dict[Key, Values]:
        names, texts = [one.name for one in self.keys.values()], zip(*wanted, strict=True)
        parsers = (typed_column(one, self.relation.table, self.choices) for one in self.keys.values())
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
    """The relation's columns by place in the stream, as far as both are the same."""
    known = {(one.name, one.type_oid, one.typmod): one for one in relation.columns}
    sent = enumerate(record.message.columns)
    found = ((place, known.get((one.name, one.type_oid, one.typmod))) for place, one in sent)
    return {place: column for place, column in found if column is not None}
