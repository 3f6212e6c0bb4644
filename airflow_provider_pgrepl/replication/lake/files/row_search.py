"""Search and reading of rows in a table's data files. A row's location is its file and its number there.

Reads only the columns that are asked for and, if only some rows are, only the row groups that have them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyroaring import BitMap64

from airflow_provider_pgrepl.errors import LakeTableError
from airflow_provider_pgrepl.replication.lake.delta.deletion_vector import read_vector
from airflow_provider_pgrepl.replication.lake.delta.live_files import LiveFile, live_files
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import is_partitioned
from airflow_provider_pgrepl.replication.lake.delta.statistics import column_places
from airflow_provider_pgrepl.replication.settings.tables import PARTITION
from airflow_provider_pgrepl.replication.storage import (
    OpenFileCache,
    is_store,
    many_at_once,
    open_parquet,
    open_storage,
    requests_at_once,
    storage_errors,
)

from .row_equality import Ints, match_rows

_FEW = 1 << 10
"""Up to this many candidates, or twice the wanted rows, all wanted columns of the candidates are read."""
_BATCH_BYTES, _BATCH_ROWS = 32 << 20, 16 << 10
"""Limits of a batch. Bytes are the encoded ones that a file states: far fewer if a long value is repeated."""
_ROWS_AT_ONCE = 256 << 10
_WITH_THREADS_BYTES = 1 << 20
"""Bytes up to which one thread reads: using more threads takes longer then, above all if cores are busy."""
_NOWHERE = np.empty(0, np.int64)


@dataclass(frozen=True)
class RowLocations:
    """Locations of rows in a table's files, ordered by file and row.

    `file`: the number of the file. `row`: the number of the row in the file, from 0, with deleted rows
    counted. `which`: the number of the wanted row that it equals.
    """

    file: Ints
    row: Ints
    which: Ints

    def __len__(self) -> int:
        return len(self.file)

    def by_file(self) -> list[tuple[int, Ints]]:
        """Return the number of each file that has any of the rows, and the rows in it."""
        files, starts = np.unique(self.file, return_index=True)
        ends = [*starts[1:].tolist(), len(self)]
        return [
            (file, self.row[start:end])
            for file, start, end in zip(files.tolist(), starts.tolist(), ends, strict=False)
        ]

    def marks(self) -> dict[int, BitMap64]:
        """Return, by number of each file that has any of the rows, a bitmap of the rows in it."""
        return {file: BitMap64(rows.tolist()) for file, rows in self.by_file()}

    def where(self, chosen: np.ndarray) -> RowLocations:
        """Return some of the locations, chosen by a mask or by numbers."""
        return RowLocations(self.file[chosen], self.row[chosen], self.which[chosen])


class Search:
    """A search for the rows that equal a row of `wanted` in its columns. The rows of `wanted` must differ."""

    def __init__(self, wanted: pa.Table) -> None:
        self.wanted = wanted

    @property
    def is_exact(self) -> bool:
        """True if `candidates` finds exactly the wanted rows: for a single column that Arrow can compare."""
        return self.wanted.num_columns == 1 and len(self._plain) == 1

    def may_be_between(self, least: Mapping[str, Any], most: Mapping[str, Any]) -> bool:
        """Return True if columns with these bounds may have one of the wanted rows.

        Bounds are as in Parquet: integers, days since 1970, or bytes of text.
        """
        for name, values in self._ordered.items():
            if name in least and name in most:
                first = bisect_left(values, least[name])
                if first == len(values) or values[first] > most[name]:
                    return False
        return len(self.wanted) > 0

    @property
    def bounded(self) -> list[str]:
        """The columns whose bounds `may_be_between` uses."""
        return list(self._ordered)

    @property
    def bounded_in_log(self) -> list[str]:
        """The columns of `bounded` whose bounds have the same form in the log of a table as in Parquet."""
        return [name for name in self._ordered if pa.types.is_integer(self.wanted.schema.field(name).type)]

    def candidates(self, count: int, read: Callable[[str], pa.ChunkedArray]) -> tuple[Ints, Ints]:
        """Return the numbers, ascending, of those of `count` rows that may be wanted.

        Also returns, for each, the number of the wanted row that it equals if `is_exact`, else -1. `read`
        returns a column by name. Columns are read only until few candidates are left.
        """
        if self.is_exact:
            found = pc.index_in(read(self._plain[0]), self._values(self._plain[0]))
            rows = np.flatnonzero(found.is_valid().to_numpy())
            return rows, found.drop_null().to_numpy().astype(np.int64)
        may_be = np.ones(count, np.bool_)
        left = count
        for name in self._plain:
            may_be &= pc.is_in(read(name), self._values(name)).to_numpy()
            left = int(may_be.sum())
            if left <= max(_FEW, 2 * len(self.wanted)):
                break
        return np.flatnonzero(may_be), np.full(left, -1, np.int64)

    def _values(self, name: str) -> pa.Array:
        return self.wanted[name].combine_chunks()

    @cached_property
    def _ordered(self) -> dict[str, Ints | list[bytes]]:
        """The values, ascending, of the columns that Parquet orders in the same way and that have no null.

        Integers are kept in an array: a merge may search for a million rows.
        """
        return {
            field.name: _ascending(self._values(field.name).cast(as_bounds))
            for field in self.wanted.schema
            if (as_bounds := _as_bounds(field.type)) and self.wanted[field.name].null_count == 0
        }

    @cached_property
    def _plain(self) -> list[str]:
        """The columns by which candidates are filtered, those with the most different values first.

        Nested and floating-point columns are left out: Arrow cannot compare them as needed.
        """
        plain = [
            field.name
            for field in self.wanted.schema
            if not pa.types.is_nested(field.type) and not pa.types.is_floating(field.type)
        ]
        return sorted(plain, key=lambda name: -len(self.wanted[name].unique()))


def _ascending(values: pa.Array) -> Ints | list[bytes]:
    if pa.types.is_integer(values.type):
        return np.sort(values.to_numpy())
    return sorted(values.to_pylist())


def _as_bounds(kind: pa.DataType) -> pa.DataType | None:
    """Return the type by which Parquet orders values of a type; None if its bounds are not used."""
    if pa.types.is_signed_integer(kind):
        return kind
    if pa.types.is_date32(kind):
        return pa.int32()
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    return pa.large_binary() if is_text else None


@dataclass(frozen=True)
class _Part:
    """Some row groups of a file. `first`: the number of the first row of each."""

    file: int
    metadata: pq.FileMetaData
    groups: list[int]
    first: list[int]

    def numbers(self) -> Ints:
        """Return the numbers of the rows in the file."""
        sizes = (self.metadata.row_group(number).num_rows for number in self.groups)
        spans = [np.arange(first, first + size) for first, size in zip(self.first, sizes, strict=True)]
        return np.concatenate(spans)


class FileRows:
    """The rows of a table at the present version of its handle, without deleted rows.

    Methods raise LakeTableError if files are missing, or are not as the log describes them;
    LakeUnavailableError.
    """

    def __init__(self, table: DeltaTable) -> None:
        self.uri = table.table_uri
        self.version = int(table.version())
        self.schema = pa.schema(table.schema().to_arrow())
        self.files: list[LiveFile] = list(live_files(table).values())
        self._is_partitioned = is_partitioned(table)
        self._filesystem, self._root = open_storage(self.uri)
        self._metadata: dict[int, pq.FileMetaData] = {}
        self._held = OpenFileCache(self._filesystem)
        self._gone: dict[int, BitMap64] = {}

    def gone(self, file: int) -> BitMap64:
        """Return the rows of a file that its deletion vector marks as deleted."""
        record = self.files[file].vector
        if record is None:
            return BitMap64()
        if file not in self._gone:
            with self._reading():
                self._gone[file] = read_vector(self._filesystem, self._root, record)
        return self._gone[file]

    def count(self, file: int) -> int:
        """Return the number of rows of a file, with deleted rows counted."""
        statistics = self.files[file].statistics.get("numRecords")
        if statistics is not None:
            return int(statistics)
        with self._reading(), self._open(file) as parquet:
            return int(parquet.metadata.num_rows)

    def find(self, wanted: pa.Table, partitions: Collection[str | None] | None = None) -> RowLocations:
        """Return the locations of the rows that equal one of `wanted` in the columns of `wanted`.

        The rows of `wanted` must differ. `partitions`: the partitions to search; None: all.
        """
        search = self._search(wanted)
        files = self._may_hold(search, partitions)
        self.fetch(files)
        with many_at_once(len(files)) as each:
            parts = [part for some in each(partial(self._parts, search), files) for part in some]
            found = list(each(partial(self._find_in, search), parts))
        sizes = [len(rows) for rows, _ in found]
        return RowLocations(
            np.repeat(np.array([part.file for part in parts], np.int64), sizes),
            np.concatenate([_NOWHERE, *(rows for rows, _ in found)]),
            np.concatenate([_NOWHERE, *(which for _, which in found)]),
        )

    def bytes_that_may_hold(self, wanted: pa.Table, partitions: Collection[str | None] | None = None) -> int:
        """Return the bytes of all files that `find` would search."""
        return sum(self.files[number].size for number in self._may_hold(self._search(wanted), partitions))

    def rows(self, places: RowLocations, names: Sequence[str]) -> pa.Table:
        """Return the columns `names` of the rows at these locations, in their order."""
        schema = pa.schema([self.schema.field(name) for name in names])
        parts = [schema.empty_table()]
        parts += [self._take(file, rows, names) for file, rows in places.by_file()]
        return pa.concat_tables(parts)

    def fetch(self, files: Collection[int]) -> None:
        """Fetch small files, and all deletion vectors, of `files` from an object store, several at a time.

        Call this before reading files one by one. Does nothing for other storage.
        """
        if is_store(self._filesystem):
            with requests_at_once(self._filesystem, len(files)) as each:
                list(each(self._fetch, files))

    def _fetch(self, file: int) -> None:
        self.gone(file)
        if self._held.has_room(self.files[file].size):
            with self._reading(), self._open(file):
                pass

    def all_of(self, file: int, without: Ints = _NOWHERE) -> Iterator[pa.Table]:
        """Yield the rows of a file in batches of some MiB, with the columns of the table's schema.

        `without`: the numbers of rows to leave out, in addition to deleted ones.
        """
        gone, first, names = np.union1d(self._gone_rows(file), without), 0, self.schema.names
        with self._reading(), self._open(file, in_batches=True) as parquet:
            groups = _groups(parquet)
            for batch in parquet.iter_batches(_batch_rows(groups), use_threads=_is_long(groups)):
                rows = self._aligned(file, pa.Table.from_batches([batch]), len(batch), names)
                marked = gone[np.searchsorted(gone, first) : np.searchsorted(gone, first + len(batch))]
                first += len(batch)
                if len(marked):
                    stays = np.ones(len(batch), np.bool_)
                    stays[marked - (first - len(batch))] = False
                    rows = rows.filter(pa.array(stays))
                yield rows

    def _search(self, wanted: pa.Table) -> Search:
        return Search(wanted.cast(pa.schema([self.schema.field(name) for name in wanted.schema.names])))

    def _may_hold(self, search: Search, partitions: Collection[str | None] | None) -> list[int]:
        """Return the files that may have one of the rows, by their partition and their bounds in the log."""
        names = search.bounded_in_log
        return [
            number
            for number, file in enumerate(self.files)
            if (partitions is None or file.partition in partitions)
            and search.may_be_between(*(_logged(file, side, names) for side in ("minValues", "maxValues")))
        ]

    def _parts(self, search: Search, file: int) -> list[_Part]:
        """Return the row groups of a file that may have one of the rows, grouped for reading."""
        with self._reading(), self._open(file) as parquet:
            metadata = parquet.metadata
        places = {name: at for name, at in column_places(metadata).items() if name in search.bounded}
        wanted_rows = max(_ROWS_AT_ONCE, 2 * len(search.wanted))
        parts: list[_Part] = []
        first, taken = 0, wanted_rows
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            if search.may_be_between(*_bounds(group, places)):
                if taken >= wanted_rows:
                    parts.append(_Part(file, metadata, [], []))
                    taken = 0
                parts[-1].groups.append(number)
                parts[-1].first.append(first)
                taken += group.num_rows
            first += group.num_rows
        return parts

    def _find_in(self, search: Search, part: _Part) -> tuple[Ints, Ints]:
        """Return the rows found in a part of a file, ascending, and the number of the wanted row of each."""
        numbers = part.numbers()
        with self._reading(), self._open(part.file) as parquet:
            read = partial(self._read, part.file, parquet, groups=part.groups)
            rows, which = search.candidates(len(numbers), lambda name: read([name])[name])
            stays = self._is_there(part.file, numbers[rows])
            rows, which = rows[stays], which[stays]
            if search.is_exact or len(rows) == 0:
                return numbers[rows], which
            values = self._read_rows(part.file, parquet, numbers[rows], search.wanted.schema.names)
        which = match_rows(values, search.wanted)
        return numbers[rows[which >= 0]], which[which >= 0]

    def _gone_rows(self, file: int) -> Ints:
        return np.asarray(self.gone(file).to_array(), np.int64)

    def _is_there(self, file: int, rows: Ints) -> np.ndarray[Any, np.dtype[np.bool_]]:
        if len(rows) == 0 or self.files[file].vector is None:
            return np.ones(len(rows), np.bool_)
        return ~np.isin(rows, self._gone_rows(file), assume_unique=True)

    def _take(self, file: int, rows: Ints, names: Sequence[str]) -> pa.Table:
        with self._reading(), self._open(file) as parquet:
            return self._read_rows(file, parquet, rows, names)

    def _read_rows(self, file: int, parquet: pq.ParquetFile, rows: Ints, names: Sequence[str]) -> pa.Table:
        """Read some rows, which are in ascending order, and only the row groups that have them."""
        sizes = [group.num_rows for group in _groups(parquet)]
        ends = np.cumsum(np.array(sizes, np.int64))
        group_of = np.searchsorted(ends, rows, side="right")
        parts = [pa.schema([self.schema.field(name) for name in names]).empty_table()]
        for group in np.unique(group_of).tolist():
            within = rows[group_of == group] - (ends[group] - sizes[group])
            parts.append(self._read(file, parquet, names, [group]).take(pa.array(within)))
        return pa.concat_tables(parts)

    def _read(
        self, file: int, parquet: pq.ParquetFile, names: Sequence[str], groups: Sequence[int]
    ) -> pa.Table:
        read = [parquet.metadata.row_group(number) for number in groups]
        count = sum(group.num_rows for group in read)
        held = [name for name in names if name in parquet.schema_arrow.names]
        rows = parquet.read_row_groups(list(groups), columns=held, use_threads=_is_long(read))
        return self._aligned(file, rows, count, names)

    def _aligned(self, file: int, rows: pa.Table, count: int, names: Sequence[str]) -> pa.Table:
        """Return rows with the columns `names` in the table's types.

        A column that was added after the file was written is null. The partition is taken from the log: files
        that other programs have written need not have it.
        """
        if self._is_partitioned and PARTITION in names:
            held = [name for name in rows.schema.names if name != PARTITION]
            partition = pa.repeat(pa.scalar(self.files[file].partition, pa.string()), count)
            rows = pa.table([*rows.select(held).columns, partition], [*held, PARTITION])
        schema = pa.schema([self.schema.field(name) for name in names])
        columns = [
            rows[field.name].cast(field.type)
            if field.name in rows.schema.names
            else pa.chunked_array([pa.nulls(count, field.type)])
            for field in schema
        ]
        return pa.table(columns, schema)

    @contextmanager
    def _open(self, file: int, *, in_batches: bool = False) -> Iterator[pq.ParquetFile]:
        known = self._metadata.get(file)
        with (
            self._source(file) as source,
            open_parquet(self._filesystem, source, known, in_batches=in_batches) as parquet,
        ):
            self._metadata[file] = parquet.metadata
            yield parquet

    def _source(self, file: int) -> AbstractContextManager[pa.NativeFile]:
        return self._held.open(f"{self._root}/{self.files[file].path}", self.files[file].size)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        failed = ""
        with storage_errors(self.uri, "read"):
            try:
                yield
            except FileNotFoundError:
                failed = "one of its files is gone"
            except pa.ArrowException as error:
                failed = f"one of its files cannot be read: {type(error).__name__}"
        if failed:
            raise LakeTableError(f"{self.uri}: {failed}")


def _groups(parquet: pq.ParquetFile) -> list[pq.RowGroupMetaData]:
    return [parquet.metadata.row_group(number) for number in range(parquet.num_row_groups)]


def _is_long(groups: Sequence[pq.RowGroupMetaData]) -> bool:
    return bool(sum(group.total_byte_size for group in groups) > _WITH_THREADS_BYTES)


def _batch_rows(groups: Sequence[pq.RowGroupMetaData]) -> int:
    size = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(size, 1)))


def _logged(file: LiveFile, side: str, names: Sequence[str]) -> dict[str, Any]:
    statistics = file.statistics.get(side, {})
    return {name: statistics[name] for name in names if name in statistics}


def _bounds(group: pq.RowGroupMetaData, places: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the least and the greatest values of columns in a row group, if its statistics have them."""
    least, most = dict[str, Any](), dict[str, Any]()
    for name, place in places.items():
        statistics = group.column(place).statistics
        if statistics is not None and statistics.has_min_max:
            least[name], most[name] = statistics.min_raw, statistics.max_raw
    return least, most
