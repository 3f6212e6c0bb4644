"""The compiled functions of `columns`: `scan` checks a chunk of messages, `fill` copies its tuples.

`scan` checks the bounds of every read.
"""

from __future__ import annotations

import numpy as np

from airflow_provider_pgrepl.replication.runtime.compiled_loops import (
    BYTES,
    BYTES_OUT,
    INTS,
    INTS_OUT,
    PAIRS_OUT,
    SHORTS_OUT,
    inner,
    loop,
)

HEADER = 25
"""The bytes in a CopyData `w` message before the pgoutput message: `w`, start LSN, end LSN, send time."""

OK, TRUNCATED, UNKNOWN_KIND, OUT_OF_ORDER, BAD_TUPLE, TRAILING = range(6)
MOST_COLUMNS = 0x7FFF
"""The largest column count: the index of an unchanged column is an int16. PostgreSQL's limit is 1,600."""
ROW_INSERT, ROW_UPDATE, ROW_DELETE = ord("I"), ord("U"), ord("D")
IS_OPEN, COMMIT_LSN, COMMIT_TS, XID, ORDINAL, STATE_SIZE = range(6)

_LISTS_OUT = f"Tuple(({INTS_OUT}, {BYTES_OUT}, {BYTES_OUT}))"


@inner
def _u16(data, at):  # type: ignore[no-untyped-def]
    return (np.int64(data[at]) << 8) | np.int64(data[at + 1])


@inner
def _u32(data, at):  # type: ignore[no-untyped-def]
    return (_u16(data, at) << 16) | _u16(data, at + 2)


@inner
def _i64(data, at):  # type: ignore[no-untyped-def]
    return (_u32(data, at) << 32) | _u32(data, at + 4)


@inner
def _count_tuple(data, at, end, counts):  # type: ignore[no-untyped-def]
    """Add a tuple's columns, bytes and unchanged columns to counts[0:3]. Return its end; -1 if malformed."""
    if at + 2 > end:
        return -1
    columns = _u16(data, at)
    if columns > MOST_COLUMNS:
        return -1
    at += 2
    for _ in range(columns):
        if at >= end:
            return -1
        kind = data[at]
        at += 1
        if kind == 116:  # t
            if at + 4 > end:
                return -1
            size = _u32(data, at)
            at += 4
            if size > end - at:
                return -1
            at += size
            counts[1] += size
        elif kind == 117:  # u
            counts[2] += 1
        elif kind != 110:  # n
            return -1
    counts[0] += columns
    return at


@inner
def _count_row(data, at, end, new_counts, old_counts):  # type: ignore[no-untyped-def]
    """Check one row message and add its tuples to the counts. Return OK or a fault."""
    kind = data[at]
    at += 5
    if at >= end:
        return TRUNCATED
    if kind != ROW_INSERT and (data[at] == 75 or data[at] == 79):  # K, O
        at = _count_tuple(data, at + 1, end, old_counts)
        if at < 0 or old_counts[2] > 0:
            return BAD_TUPLE
    elif kind == ROW_DELETE:
        return BAD_TUPLE
    if kind != ROW_DELETE:
        if at >= end or data[at] != 78:  # N
            return BAD_TUPLE
        # An Insert may lack values, too: it can be an UPDATE that moved the row into a row filter.
        at = _count_tuple(data, at + 1, end, new_counts)
        if at < 0:
            return BAD_TUPLE
    return OK if at == end else TRAILING


@loop(BYTES, INTS, INTS_OUT, BYTES_OUT, *[INTS_OUT] * 5, PAIRS_OUT, INTS_OUT, INTS_OUT)
def scan(data, offsets, state, tags, relations, lsns, ordinals, xids, times, commits, new_counts, old_counts):  # type: ignore[no-untyped-def]
    """Check all messages of a chunk, stamp each with its transaction, and count columns and bytes.

    Returns (fault, message index, number of commits). `state` carries an open transaction from chunk to
    chunk. `commits` receives (message index, commit LSN, end LSN) of each transaction that ends.
    """
    ended = 0
    for m in range(len(offsets) - 1):
        at = offsets[m] + HEADER
        end = offsets[m + 1]
        if at >= end or data[offsets[m]] != 119:  # w
            return TRUNCATED, m, ended
        tag = data[at]
        tags[m] = tag
        relations[m] = 0
        if tag == ROW_INSERT or tag == ROW_UPDATE or tag == ROW_DELETE:
            if state[IS_OPEN] == 0:
                return OUT_OF_ORDER, m, ended
            if at + 5 > end:
                return TRUNCATED, m, ended
            relations[m] = _u32(data, at + 1)
            old_counts[2] = 0
            fault = _count_row(data, at, end, new_counts, old_counts)
            if fault != OK:
                return fault, m, ended
        elif tag == 66:  # B
            if at + 21 != end:
                return TRUNCATED, m, ended
            if state[IS_OPEN] != 0:
                return OUT_OF_ORDER, m, ended
            state[IS_OPEN] = 1
            state[COMMIT_LSN] = _i64(data, at + 1)
            state[COMMIT_TS] = _i64(data, at + 9)
            state[XID] = _u32(data, at + 17)
            state[ORDINAL] = 0
        elif tag == 67:  # C
            if at + 26 != end:
                return TRUNCATED, m, ended
            if state[IS_OPEN] == 0 or _i64(data, at + 2) != state[COMMIT_LSN]:
                return OUT_OF_ORDER, m, ended
            state[IS_OPEN] = 0
            commits[ended, 0] = m
            commits[ended, 1] = state[COMMIT_LSN]
            commits[ended, 2] = _i64(data, at + 10)
            ended += 1
        elif tag == 77:  # M
            if at + 10 > end:
                return TRUNCATED, m, ended
            if data[at + 1] & 1:
                if state[IS_OPEN] == 0:
                    return OUT_OF_ORDER, m, ended
            else:
                if state[IS_OPEN] != 0:
                    return OUT_OF_ORDER, m, ended
                # Its LSN is the end of its record and may equal the next transaction's commit LSN.
                message_lsn = _i64(data, at + 2)
                state[COMMIT_LSN] = message_lsn - 1
                state[COMMIT_TS] = np.iinfo(np.int64).min
                state[XID] = 0
                state[ORDINAL] = 0
                commits[ended, 0] = m
                commits[ended, 1] = message_lsn - 1
                commits[ended, 2] = message_lsn
                ended += 1
        elif tag == 82 or tag == 84:  # R, T
            if state[IS_OPEN] == 0:
                return OUT_OF_ORDER, m, ended
            if at + 5 > end:
                return TRUNCATED, m, ended
        elif tag != 89 and tag != 79 and tag != 65:  # Y, O, A
            # Servers of version 18 up to 18.4 send Stream Abort, with which there is nothing to do, also to
            # clients that receive no transactions in progress (PostgreSQL's bug #19616).
            return UNKNOWN_KIND, m, ended
        lsns[m] = state[COMMIT_LSN]
        times[m] = state[COMMIT_TS]
        xids[m] = state[XID]
        ordinals[m] = state[ORDINAL]
        if tag == 84:
            state[ORDINAL] += _u32(data, at + 1)
        elif tag != 66 and tag != 67 and tag != 89 and tag != 79 and tag != 65:
            state[ORDINAL] += 1
    return OK, -1, ended


@inner
def _fill_tuple(data, at, cursor, offsets, values, valid, unchanged):  # type: ignore[no-untyped-def]
    """Copy one checked tuple and return its end. `cursor`: columns, bytes and unchanged columns so far."""
    columns = _u16(data, at)
    at += 2
    for i in range(columns):
        kind = data[at]
        at += 1
        column = cursor[0]
        offsets[column] = cursor[1]
        valid[column] = kind == 116
        if kind == 116:
            size = _u32(data, at)
            at += 4
            start = cursor[1]
            for k in range(size):
                values[start + k] = data[at + k]
            cursor[1] = start + size
            at += size
        elif kind == 117:
            unchanged[cursor[2]] = i
            cursor[2] += 1
        cursor[0] = column + 1
    return at


@loop(BYTES, INTS, PAIRS_OUT, _LISTS_OUT, PAIRS_OUT, _LISTS_OUT, PAIRS_OUT, SHORTS_OUT)
def fill(data, starts, new_rows, new, old_rows, old, unchanged_rows, unchanged):  # type: ignore[no-untyped-def]
    """Copy the tuples of all row messages. `starts`: the offsets of these messages in `data`.

    `new` and `old` are (column offsets, values, valid). `*_rows[0]` receives list offsets (one more than
    there are rows), `*_rows[1]` a 1 where the row has such a list.
    """
    new_cursor = np.zeros(3, np.int64)
    old_cursor = np.zeros(3, np.int64)
    none = np.zeros(1, np.int16)
    count = len(starts)
    for row in range(count):
        at = starts[row]
        kind = data[at]
        at += 5
        new_rows[0, row] = new_cursor[0]
        old_rows[0, row] = old_cursor[0]
        unchanged_rows[0, row] = new_cursor[2]
        before = new_cursor[2]
        if data[at] != 78:
            old_rows[1, row] = 1
            at = _fill_tuple(data, at + 1, old_cursor, old[0], old[1], old[2], none)
        if kind != ROW_DELETE:
            new_rows[1, row] = 1
            _fill_tuple(data, at + 1, new_cursor, new[0], new[1], new[2], unchanged)
        unchanged_rows[1, row] = new_cursor[2] > before
    new_rows[0, count] = new_cursor[0]
    old_rows[0, count] = old_cursor[0]
    unchanged_rows[0, count] = new_cursor[2]
    new[0][new_cursor[0]] = new_cursor[1]
    old[0][old_cursor[0]] = old_cursor[1]
