"""The conversion of a chunk of messages into Arrow columns, all rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from airflow_provider_pgrepl.errors import WireError

from . import kernels

Int64s = npt.NDArray[np.int64]

HEADER = kernels.HEADER
POSTGRES_EPOCH_US = 946_684_800_000_000
"""2000-01-01, where PostgreSQL's timestamps begin, in microseconds of Unix time."""
NO_TIME = int(np.iinfo(np.int64).min)

_FAULTS = {
    kernels.TRUNCATED: "ends too early",
    kernels.UNKNOWN_KIND: "is of an unknown kind",
    kernels.OUT_OF_ORDER: "stands outside its transaction",
    kernels.BAD_TUPLE: "holds a malformed row",
    kernels.TRAILING: "is longer than its content",
}
_CONTROL_TAGS = np.frombuffer(b"RTM", np.uint8)
_LAST_ASCII = 0x7F
_ROW_TAGS = np.frombuffer(b"IUD", np.uint8)


@dataclass(frozen=True)
class ControlMessage:
    """A Relation, Truncate or Message message, unparsed, with its index in the chunk and its transaction."""

    index: int
    tag: str
    data: bytes
    commit_lsn: int
    ordinal: int
    xid: int
    commit_us: int


@dataclass(frozen=True)
class TransactionEnd:
    """The end of a transaction. A message outside transactions counts as a transaction of its own."""

    index: int
    commit_lsn: int
    end_lsn: int
    xid: int
    commit_us: int


@dataclass(frozen=True)
class TransactionBegin:
    """A transaction whose Begin message was received. It commits at `commit_lsn`."""

    commit_lsn: int
    xid: int
    commit_us: int


@dataclass(frozen=True)
class SplitChunk:
    """The rows, control messages and transaction ends of a chunk.

    `row_index` is the index of each row among the chunk's messages; with it, rows, `controls` and `ended` can
    be put in order. `rows` has the columns commit_lsn, ordinal, xid, commit_ts, relation_id, op, new, old,
    unchanged.
    """

    row_index: Int64s
    rows: pa.Table
    controls: Sequence[ControlMessage]
    ended: Sequence[TransactionEnd]


class Splitter:
    """A splitter of successive chunks. It keeps the state of a transaction that spans two chunks."""

    def __init__(self) -> None:
        self._state = np.zeros(kernels.STATE_SIZE, np.int64)

    @property
    def is_open(self) -> bool:
        """Return True if the last chunk ended inside a transaction."""
        return bool(self._state[kernels.IS_OPEN])

    @property
    def begun(self) -> TransactionBegin | None:
        """Return the transaction inside which the last chunk ended, or None."""
        if not self.is_open:
            return None
        lsn, us, xid = (int(self._state[of]) for of in (kernels.COMMIT_LSN, kernels.COMMIT_TS, kernels.XID))
        return TransactionBegin(lsn, xid, us + POSTGRES_EPOCH_US)

    def split(self, messages: Sequence[bytes | memoryview]) -> SplitChunk:
        """Split CopyData messages (`w`, header included).

        Raises WireError. After that, this object cannot be used any more.
        """
        count = len(messages)
        offsets = np.zeros(count + 1, np.int64)
        np.cumsum(np.fromiter(map(len, messages), np.int64, count), out=offsets[1:])
        # A row of hundreds of MB is alone in its chunk: do not copy it.
        data = np.frombuffer(messages[0] if count == 1 else b"".join(messages), np.uint8)
        tags = np.zeros(count, np.uint8)
        relations, lsns, ordinals, xids, times = np.zeros((5, count), np.int64)
        commits = np.zeros((count, 3), np.int64)
        new_counts, old_counts = np.zeros((2, 3), np.int64)
        fault, at, ended = kernels.scan(
            data,
            offsets,
            self._state,
            tags,
            relations,
            lsns,
            ordinals,
            xids,
            times,
            commits,
            new_counts,
            old_counts,
        )
        if fault != kernels.OK:
            raise WireError(f"a received message (number {at} of its chunk) {_FAULTS[fault]}")
        times[times != NO_TIME] += POSTGRES_EPOCH_US
        row_index = np.flatnonzero(np.isin(tags, _ROW_TAGS))
        lists = _split_rows(data, offsets[:-1][row_index] + kernels.HEADER, new_counts, old_counts)
        stamps = {"commit_lsn": lsns, "ordinal": ordinals, "xid": xids}
        rows = pa.table(
            {
                **{name: pa.array(values[row_index]) for name, values in stamps.items()},
                "commit_ts": pa.array(times[row_index]).view(pa.timestamp("us", "UTC")),
                "relation_id": pa.array(relations[row_index]),
                "op": _operations(tags[row_index]),
                **lists,
            }
        )
        controls = [
            ControlMessage(
                int(m),
                chr(tags[m]),
                data[offsets[m] + kernels.HEADER : offsets[m + 1]].tobytes(),
                *(int(stamp[m]) for stamp in (lsns, ordinals, xids, times)),
            )
            for m in np.flatnonzero(np.isin(tags, _CONTROL_TAGS))
        ]
        ends = [
            TransactionEnd(m, commit, end, int(xids[m]), int(times[m]))
            for m, commit, end in commits[:ended].tolist()
        ]
        return SplitChunk(row_index, rows, controls, ends)


def _operations(tags: npt.NDArray[np.uint8]) -> pa.Array:
    offsets = np.arange(len(tags) + 1, dtype=np.int32)
    return pa.StringArray.from_buffers(
        len(tags), pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(tags))
    )


def _split_rows(data: npt.NDArray[np.uint8], starts: Int64s, new: Int64s, old: Int64s) -> dict[str, pa.Array]:
    count = len(starts)
    new_rows, old_rows, unchanged_rows = np.zeros((3, 2, count + 1), np.int64)
    new_parts, old_parts = _buffers(new), _buffers(old)
    unchanged = np.empty(int(new[2]), np.int16)
    kernels.fill(data, starts, new_rows, new_parts, old_rows, old_parts, unchanged_rows, unchanged)
    return {
        "new": _lists(new_rows, _texts(*new_parts)),
        "old": _lists(old_rows, _texts(*old_parts)),
        "unchanged": _unchanged_lists(unchanged_rows, unchanged),
    }


def _buffers(counts: Int64s) -> tuple[Int64s, npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    columns, size = int(counts[0]), int(counts[1])
    return np.zeros(columns + 1, np.int64), np.empty(size, np.uint8), np.zeros(columns, np.uint8)


def _bitmap(flags: npt.NDArray[np.uint8] | Int64s) -> pa.Buffer | None:
    """Return Arrow's validity bitmap, or None if all flags are set."""
    return None if flags.all() else pa.py_buffer(np.packbits(flags.astype(bool), bitorder="little"))


def _texts(offsets: Int64s, values: npt.NDArray[np.uint8], valid: npt.NDArray[np.uint8]) -> pa.Array:
    texts = pa.LargeStringArray.from_buffers(
        len(valid), pa.py_buffer(offsets), pa.py_buffer(values), _bitmap(valid)
    )
    # All later code expects UTF-8; in Arrow and Delta Lake, other bytes are undefined behavior.
    if len(values) and values.max() > _LAST_ASCII:
        try:
            texts.validate(full=True)
        except pa.ArrowInvalid:
            # Suppress the cause: Arrow's message may hold values.
            raise WireError("the replication stream holds a text that is not UTF-8") from None
    return texts


def _lists(rows: Int64s, values: pa.Array) -> pa.Array:
    count = rows.shape[1] - 1
    buffers = [_bitmap(rows[1, :count]), pa.py_buffer(np.ascontiguousarray(rows[0]))]
    return pa.Array.from_buffers(pa.large_list(pa.large_string()), count, buffers, children=[values])


def _unchanged_lists(rows: Int64s, values: npt.NDArray[np.int16]) -> pa.Array:
    count = rows.shape[1] - 1
    buffers = [_bitmap(rows[1, :count]), pa.py_buffer(rows[0].astype(np.int32))]
    return pa.Array.from_buffers(pa.list_(pa.int16()), count, buffers, children=[pa.array(values)])
