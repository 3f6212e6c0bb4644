"""Changes of one table that do not fit into memory together, such as those of a very large transaction.

Decisions about them need only their outline. The rows are read from the changelog's files when they are
merged. A transaction that is too large is split into parts by the keys of its rows. Each part is a temporary
file on the local disk, which no other process can open and which is deleted when the process ends.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
from pyroaring import BitMap64

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import LakeTableError
from airflow_provider_pgrepl.replication.changelog import reader
from airflow_provider_pgrepl.replication.changelog.layout import CHANGES, ROW_SCHEMA, letters
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import LakeFiles, files_beside
from airflow_provider_pgrepl.replication.lake.files.merge_on_read import rewrite_files
from airflow_provider_pgrepl.replication.lake.files.row_search import FileRows, RowLocations
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.relation import Relation

from .changes import TEXTS, Bools, Ints, array_of, bytes_before
from .collapse import key_hashes
from .slice_commit import SliceCommit, Way, write_left, write_rows

BYTES, ROWS = "bytes", "rows"
"""Columns of an outline: the bytes of values, and the number, of the rows that its row represents."""

_PART_BYTES = 32 << 20
_BYTES_A_ROW = 64
"""Bytes of memory that following a row takes in addition to its values."""
_MOST_PARTS = 256


class KeysMoveError(Exception):
    """A change gives its row another key, so the changes cannot be split into parts by key."""


@dataclass(frozen=True)
class LargeChanges:
    """The changelog rows of a relation after the position `above` and before the position `before`, in files.

    All methods raise ChangelogFileGoneError if a file no longer exists, LakeUnavailableError.
    """

    filesystem: pafs.FileSystem
    root: str
    paths: Sequence[str]
    relation_id: int
    above: LSN
    before: LSN

    @property
    def bytes(self) -> int:
        """The bytes of uncompressed values in the files, including those of other tables."""
        return sum(map(reader.value_bytes, self.paths))

    def all(self) -> pa.Table:
        """Return all rows, ordered by (commit_lsn, ordinal)."""
        rows = reader.read_rows(self.filesystem, self.root, self.paths, self.relation_id, self.above)
        return reader.rows_before(rows, self.before)

    def outline(self) -> pa.Table:
        """Return the outline: of each run of similar rows in a file, only the first and the last row.

        Similar rows are inserts, updates and deletes of one transaction with the same version of the
        relation. The columns BYTES and ROWS count what each row represents: itself and the rows left out
        after it.
        """
        return reader.ordered(pa.concat_tables([_outlined(self._of(path).all()) for path in self.paths]))

    def read(self, first: LSN, last: LSN) -> pa.Table:
        """Return the inserts, updates, deletes and truncates committed from `first` to `last`, in order."""
        return reader.ordered(pa.concat_tables(list(self._between(first, last))))

    def parts(self, lsn: LSN, after: int, weight: int, relation: Relation) -> Iterator[pa.Table]:
        """Yield the inserts, updates and deletes of one transaction after the ordinal `after`, in parts.

        Each part has all changes of its rows, in order. The number of parts depends on `weight`, the bytes in
        memory. Raises KeysMoveError before the first part, and what `read_changes` does.
        """
        count = min(_MOST_PARTS, 1 + weight // _PART_BYTES)
        with ExitStack() as stack:
            with _spooling(relation):
                # Unbuffered, so that closing a file writes nothing after the disk was full.
                files = [stack.enter_context(tempfile.TemporaryFile(buffering=0)) for _ in range(count)]
                writers = [pa.ipc.new_stream(file, ROW_SCHEMA) for file in files]
            for rows in self._between(lsn, lsn):
                parted = _parted(rows.filter(pc.greater(rows["ordinal"], after)), relation, count)
                with _spooling(relation):
                    for number, part in parted:
                        writers[number].write_table(part)
            for file, writer in zip(files, writers, strict=True):
                with _spooling(relation):
                    writer.close()
                    file.seek(0)
                    part = pa.ipc.open_stream(file).read_all()
                yield reader.ordered(part)

    def _between(self, first: LSN, last: LSN) -> Iterator[pa.Table]:
        for path in self.paths:
            rows = self._of(path).all()
            lsns = rows["commit_lsn"]
            wanted = pc.and_(pc.greater_equal(lsns, int(first)), pc.less_equal(lsns, int(last)))
            yield rows.filter(pc.and_(wanted, pc.is_in(rows["op"], letters(CHANGES))))

    def _of(self, *paths: str) -> LargeChanges:
        return replace(self, paths=paths)


def bytes_of(rows: pa.Table) -> int:
    """Return the bytes of values of changelog rows, or of the rows that an outline represents."""
    if BYTES in rows.column_names:
        return int(pc.sum(rows[BYTES]).as_py() or 0)
    return int(rows["new"].nbytes + rows["old"].nbytes)


def weight(outline: pa.Table) -> int:
    """Return the least bytes of memory that the rows represented by an outline take."""
    return int(pc.sum(outline[BYTES]).as_py() + _BYTES_A_ROW * pc.sum(outline[ROWS]).as_py())


def _outlined(rows: pa.Table) -> pa.Table:
    keeps = _stands_out(rows)
    size = sum(np.diff(bytes_before(array_of(rows, name, TEXTS))) for name in ("new", "old"))
    kept = np.flatnonzero(keeps)
    sums = {
        BYTES: np.add.reduceat(size, kept) if len(kept) else np.empty(0, np.int64),
        ROWS: np.diff(np.append(kept, len(rows))),
    }
    outline = rows.filter(pa.array(keeps))
    for name, values in sums.items():
        outline = outline.append_column(name, pa.array(values.astype(np.int64)))
    return outline


def _stands_out(rows: pa.Table) -> Bools:
    alike = pc.is_in(rows["op"], pa.array(["I", "U", "D"])).to_numpy()
    same = alike[1:] & alike[:-1]
    for name in ("commit_lsn", "relation_version"):
        values = rows[name].to_numpy()
        same &= values[1:] == values[:-1]
    edge = np.zeros(min(1, len(rows)), np.bool_)
    stands_out: Bools = ~(np.concatenate([edge, same]) & np.concatenate([same, edge]))
    return stands_out


@contextmanager
def _spooling(relation: Relation) -> Iterator[None]:
    """Convert an OSError to a LakeTableError, which stops only this table."""
    try:
        yield
    except OSError as error:
        told = error.strerror or type(error).__name__
        raise LakeTableError(
            f"{relation.table}: the parts of a transaction that is too large for memory cannot be kept on the"
            f" local disk: {told}",
            f"free space in {tempfile.gettempdir()}, or name another folder in TMPDIR; then"
            f" {errors.retry(relation.table)}",
        ) from None


def _parted(rows: pa.Table, relation: Relation, count: int) -> list[tuple[int, pa.Table]]:
    """Split rows into `count` parts, and return the number and the rows of each part that is not empty."""
    part = _part_of(rows, relation, count)
    rows = rows.take(pa.array(np.argsort(part, kind="stable")))
    ends = np.cumsum(np.bincount(part, minlength=count)).tolist()
    starts = [0, *ends[:-1]]
    return [
        (n, rows.slice(start, end - start))
        for n, (start, end) in enumerate(zip(starts, ends, strict=True))
        if end > start
    ]


def _part_of(rows: pa.Table, relation: Relation, count: int) -> Ints:
    if not relation.key_columns:
        return np.arange(len(rows), dtype=np.int64) % count
    key, before = key_hashes(rows, relation)
    if bool((key != before).any()):
        raise KeysMoveError
    part: Ints = (key % np.uint64(count)).astype(np.int64)
    return part


@dataclass(frozen=True)
class MultiPartCommit(SliceCommit):
    """A commit of several parts: each part writes its rows to files, and `make_of` commits all of them."""

    _files: list[LakeFiles] = field(default_factory=list)
    _gone: dict[int, BitMap64] = field(default_factory=dict)

    def make_of(self, parts: Iterable[pa.Table], take: Callable[[pa.Table], None], *, empties: bool) -> None:
        """Call `take` for each part, and then commit all rows that it deleted and added through this object.

        `empties`: the commit also deletes all rows that the table had before. Raises VersionTakenError if
        another process has committed in between, and what `take` does.
        """
        found = FileRows(self.table)
        with files_beside(found.uri, found.schema) as files:
            self._files[:] = [files]
            self._gone.clear()
            for part in parts:
                take(part)
            if empties:
                at = self.table, self.app, self.position, found, range(len(found.files))
                rewrite_files(*at, files.finish(), self._properties)
            else:
                way: Way = "rewrite" if self.strategy == "rewrite" else "mark"
                if way == "rewrite":
                    write_left(files, found, self._gone)
                self._replace(found, self._gone, files, way)

    def whole(self) -> SliceCommit:
        """Return the same commit for changes that are all in memory."""
        return SliceCommit(*(getattr(self, each.name) for each in fields(SliceCommit)))

    def nothing(self) -> None:
        """Do nothing: this part changes nothing, and `make_of` commits."""

    def write(self, rows: pa.Table, mode: Literal["append", "overwrite"]) -> None:  # noqa: ARG002 - `make_of` gets it
        """Write rows to the files of the commit. `mode` is ignored: `make_of` gets it as `empties`."""
        schema = pa.schema(self.table.schema().to_arrow())
        write_rows(self._files[0], rows.select(schema.names).cast(schema))

    def way(self, bytes_to_rewrite: int, bytes_of_change: int) -> Way:  # noqa: ARG002 - of each part
        """Return "mark": a part only looks up the rows to delete, and `make_of` decides the way."""
        return "mark"

    def replace(self, found: FileRows, gone: RowLocations, rows: pa.Table, way: Way) -> None:  # noqa: ARG002
        """Note the rows to delete for `make_of`, and write the rows to add."""
        for number, marks in gone.marks().items():
            self._gone[number] = self._gone.get(number, BitMap64()) | marks
        self.write(rows, "append")
