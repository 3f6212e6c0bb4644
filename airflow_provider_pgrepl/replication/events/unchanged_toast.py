"""UnchangedValues: large values that updates left alone, as changes before them had them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.errors import ChangelogError, DriftError
from airflow_provider_pgrepl.replication.changelog.gaps import GAP
from airflow_provider_pgrepl.replication.changelog.layout import STANDING_ORDINAL, letters
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.events.changelog_rows import Stretch
from airflow_provider_pgrepl.replication.events.filled_rows import Key, Values, bytes_of, with_values
from airflow_provider_pgrepl.replication.events.relations import KnownRelations
from airflow_provider_pgrepl.replication.events.untouched_rows import RowChange, UntouchedRows
from airflow_provider_pgrepl.replication.lake.merge.changes import TEXTS, array_of
from airflow_provider_pgrepl.replication.lake.merge.tuples import Bools, Ints, Tuples, bytes_before
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch

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
