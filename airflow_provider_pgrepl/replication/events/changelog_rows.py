"""The changelog's rows in commit order, read one file at a time.

The receiver sorts each file by relation. It writes a large transaction ahead, in files of its own. The rest
of that transaction goes into one file with other transactions, some of them earlier ones. Files therefore
overlap: their rows are ordered in pieces, each of them the rows of one file from one commit to another.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from airflow_provider_pgrepl.errors import ChangelogError
from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA, EpochRecord
from airflow_provider_pgrepl.replication.changelog.reader import (
    ChangelogFile,
    ChangelogTail,
    missing_file,
    open_changelog,
)
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.storage import (
    open_storage,
    read_commit,
    read_commit_actions,
    read_parquet,
)

from .position import EventPosition

_PIECE_ROWS, _PIECE_BYTES = 10_000, 16 << 20
"""The approximate limits of a batch: a reader creates an object for each row."""

_ORDER = [("commit_lsn", "ascending"), ("ordinal", "ascending")]
_SURE_S = 60.0
"""After this many seconds without a commit, the log is listed for its newest version: log files may be
deleted."""


class RowBatch(NamedTuple):
    """Some rows, in order. `ends_transaction`: True if the last row ends its transaction."""

    rows: pa.Table
    ends_transaction: bool


@dataclass(frozen=True)
class _Piece:
    """The rows of a file from one commit to another.

    `first` and `last`: the (commit LSN, ordinal) of its end rows.
    """

    path: str
    first: tuple[int, int]
    last: tuple[int, int]


def ordered_rows(
    uri: str, files: list[ChangelogFile], after: EventPosition, most: int = _PIECE_ROWS
) -> Iterator[RowBatch]:
    """Yield the changelog rows after a position, in ROW_SCHEMA and in commit order, at most `most` at a time.

    `files`: files of the position's epoch, at least all that may hold rows at or above its LSN.

    Raises ChangelogError if a file is gone, or if the order of overlapping files cannot be determined. In the
    latter case no row of these files is yielded.
    """
    filesystem, root = open_storage(uri)
    for overlapping in _overlapping(files):
        pieces = _in_order(filesystem, root, overlapping)
        for piece, following in pairwise([*pieces, None]):
            assert piece is not None
            if piece.last <= (after.commit_lsn, after.ordinal):
                continue
            rows = _between(_read(filesystem, root, piece.path), piece)
            ends_transaction = following is None or following.first[0] != piece.last[0]
            yield from _stretches(_after(rows.sort_by(_ORDER), after), most, ends_transaction)


def _stretches(rows: pa.Table, most: int, ends_transaction: bool) -> Iterator[RowBatch]:
    """Yield the rows in batches. `ends_transaction`: applies to the last row."""
    step = min(most, 1 + rows.num_rows * _PIECE_BYTES // max(1, rows.nbytes))
    lsns = rows["commit_lsn"]
    for start in range(0, rows.num_rows, step):
        end = start + step
        ends = ends_transaction if end >= rows.num_rows else lsns[end - 1] != lsns[end]
        yield RowBatch(rows.slice(start, step), ends)


def _overlapping(files: list[ChangelogFile]) -> Iterator[list[ChangelogFile]]:
    """Yield groups of files whose LSN ranges overlap."""
    group: list[ChangelogFile] = []
    for file in sorted(files, key=lambda file: (file.min_lsn, file.max_lsn)):
        if group and file.min_lsn > max(one.max_lsn for one in group):
            yield group
            group = []
        group.append(file)
    if group:
        yield group


def _in_order(filesystem: pafs.FileSystem, root: str, files: list[ChangelogFile]) -> list[_Piece]:
    if len(files) == 1:
        (file,) = files
        return [_Piece(file.path, (file.min_lsn, -(1 << 62)), (file.max_lsn, 1 << 62))]
    commits = sorted(
        (piece for file in files for piece in _commits(filesystem, root, file.path)),
        key=lambda piece: piece.first,
    )
    pieces: list[_Piece] = []
    for commit in commits:
        # Rows that do not come from a transaction have an ordinal below 0, which several files may share.
        if pieces and commit.first <= pieces[-1].last and commit.first[1] >= 0:
            raise ChangelogError(
                f"the changelog's files hold changes of the transaction at {LSN(commit.first[0])} in"
                " an order that cannot be determined",
                "nothing of the transaction was published; please report this with the output of"
                " `pgrepl status`",
            )
        if pieces and pieces[-1].path == commit.path:
            pieces[-1] = replace(pieces[-1], last=commit.last)
        else:
            pieces.append(commit)
    return pieces


def _commits(filesystem: pafs.FileSystem, root: str, path: str) -> Iterator[_Piece]:
    """Yield a piece for each transaction in a file, with the transaction's first and last row there."""
    rows = _read(filesystem, root, path, ["commit_lsn", "ordinal"]).sort_by(_ORDER)
    lsns, ordinals = rows["commit_lsn"].to_numpy(), rows["ordinal"].to_numpy()
    starts = np.flatnonzero(np.diff(lsns, prepend=-1))
    ends = np.append(starts[1:], len(lsns)) - 1
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        lsn = int(lsns[start])
        yield _Piece(path, (lsn, int(ordinals[start])), (lsn, int(ordinals[end])))


def _read(filesystem: pafs.FileSystem, root: str, path: str, columns: list[str] | None = None) -> pa.Table:
    try:
        return read_parquet(filesystem, f"{root}/{path}", columns or ROW_SCHEMA.names)
    except FileNotFoundError:
        raise missing_file(f"{root}/{path}") from None


def _between(rows: pa.Table, piece: _Piece) -> pa.Table:
    """Return the rows of a piece.

    A file holds one part of a transaction, so a commit within the piece's range is wholly in the piece.
    """
    low = pc.greater_equal(rows["commit_lsn"], piece.first[0])
    return rows.filter(pc.and_(low, pc.less_equal(rows["commit_lsn"], piece.last[0])))


def _after(rows: pa.Table, position: EventPosition) -> pa.Table:
    lsn, ordinal = int(position.commit_lsn), position.ordinal
    later = pc.greater(rows["commit_lsn"], lsn)
    rest = pc.and_(pc.equal(rows["commit_lsn"], lsn), pc.greater(rows["ordinal"], ordinal))
    return rows.filter(pc.or_(later, rest))


class FollowedChangelog:
    """A changelog that is read incrementally: only new commits, as long as its log is the known one.

    The last known commit is compared with the log each time. If it is missing or differs, the whole log is
    read again.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._tail: ChangelogTail | None = None
        self._known = b""
        self._record: EpochRecord | None = None
        self._moved_at = 0.0

    def look(self, after: EventPosition) -> tuple[ChangelogTail, bool]:
        """Return the changelog as it is now, and True if it may have new commits since the last call.

        `after`: the position from which the caller reads; it must not decrease between calls.

        Raises NoChangelogError, LakeUnavailableError, and ChangelogError if another changelog has replaced
        this one.
        """
        tail = self._tail
        if tail is None or tail.epoch != after.epoch or not self._is_known(tail):
            return self._open(after), True
        before, described = tail.version, tail.description
        try:
            self._take_new(tail)
            if tail.description != described:
                self._check_same(tail)
        except (OSError, ValueError, KeyError, TypeError):
            # An incomplete commit, or one that another program wrote: read the whole log.
            return self._open(after), True
        if tail.version > before:
            self._note(tail)
            return tail, True
        if time.monotonic() - self._moved_at > _SURE_S:
            tail = self._open(after)
        return tail, tail.version > before

    def forget(self) -> None:
        """Read the whole log at the next call."""
        self._tail = None

    def _open(self, after: EventPosition) -> ChangelogTail:
        above = LSN(max(0, after.commit_lsn - 1))
        tail = ChangelogTail.of(open_changelog(self.uri), after.epoch, above)
        self._check_same(tail)
        self._tail = tail
        self._note(tail)
        return tail

    def _take_new(self, tail: ChangelogTail) -> None:
        filesystem, root = open_storage(self.uri)
        while True:
            try:
                actions = read_commit_actions(filesystem, root, tail.version + 1)
            except FileNotFoundError:
                return
            tail.take(actions)

    def _note(self, tail: ChangelogTail) -> None:
        self._known, self._moved_at = self._digest(tail), time.monotonic()

    def _is_known(self, tail: ChangelogTail) -> bool:
        return bool(self._known) and self._digest(tail) == self._known

    def _digest(self, tail: ChangelogTail) -> bytes:
        """Return a digest of the last known commit, or empty bytes if its log file is gone."""
        commit = read_commit(self.uri, tail.version)
        return b"" if commit is None else hashlib.blake2b(commit).digest()

    def _check_same(self, tail: ChangelogTail) -> None:
        found = tail.record
        known, self._record = self._record or found, found
        if found.epoch == known.epoch and found != known:
            raise ChangelogError(
                f"the changelog under {self.uri} is another one than before: its epoch {found.epoch} began"
                f" at {found.consistent_point}, not at {known.consistent_point}",
                "read the tables from the lake at a consistent point, then go on with after= that point",
            )
