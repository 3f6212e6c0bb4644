"""Compiled functions of merging: they find the row that each change changes, and the rows' final states."""

from __future__ import annotations

import numpy as np

from airflow_provider_pgrepl.replication.runtime.compiled_loops import (
    BYTES,
    FLAG,
    FLAGS,
    HASHES,
    INT,
    INTS,
    inner,
    loop,
)

OK, KEY_HELD_TWICE, ROW_MISSING = range(3)

INSERT, DELETE = ord("I"), ord("D")
NONE = -1


@inner
def _holder(code, image, head, following, images, left_lake):  # type: ignore[no-untyped-def]
    """Return the row that a change of the key `code` changes; NONE for the lake's row with that key.

    Several rows can have the same deferrable key within a transaction. They are distinguished by the whole
    old row; of equal rows, any can be taken. Without images, only one row at a time has a key.
    """
    first = head[code]
    if first == NONE or images.shape[0] == 0:
        return first
    row = first
    while row != NONE:
        if images[row] == image:
            return row
        row = following[row]
    return first if left_lake else NONE


@inner
def _leave(code, row, head, following):  # type: ignore[no-untyped-def]
    if head[code] == row:
        head[code] = following[row]
        return
    before = head[code]
    while following[before] != row:
        before = following[before]
    following[before] = following[row]


@inner
def _arrive(code, row, head, following):  # type: ignore[no-untyped-def]
    following[row] = NONE
    if head[code] == NONE:
        head[code] = row
        return
    last = head[code]
    while following[last] != NONE:
        last = following[last]
    following[last] = row


@inner
def _shares_key(begun, end, op, new_code, head, following):  # type: ignore[no-untyped-def]
    """Return True if two rows have a key that one of the changes from `begun` to before `end` gave."""
    for i in range(begun, end):
        if op[i] != DELETE:
            first = head[new_code[i]]
            if first != NONE and following[first] != NONE:
                return True
    return False


@loop(BYTES, INTS, INTS, INT, INTS, INTS, HASHES, HASHES)
def follow_rows(op, old_code, new_code, codes, commit, truncates, old_image, new_image):  # type: ignore[no-untyped-def] # noqa: C901 - one loop, kept in one piece for speed
    """Find the row that each change changes, starting from the key that the row has in the lake.

    `op`: I, U or D. `old_code`, `new_code`: codes of the key before and after the change; `codes`: their
    number. `commit`: commit LSN of the change. `truncates`: the changes before which a TRUNCATE comes.
    `old_image`, `new_image`: hashes of the whole rows; empty unless the replica identity is FULL.

    Returns a status and, if it is not OK, the change that caused it. Returns, for each change, its row and
    the row's previous change (-1: none), and, for each row in order of appearance, the code of its key in the
    lake (-1: it was inserted).
    """
    changes = op.shape[0]
    with_images = new_image.shape[0] > 0
    head = np.full(codes, NONE, np.int64)
    left_lake = np.zeros(codes, np.bool_)
    row = np.empty(changes, np.int64)
    before = np.empty(changes, np.int64)
    origin = np.empty(changes, np.int64)
    latest = np.empty(changes, np.int64)
    following = np.empty(changes, np.int64)
    images = np.empty(changes if with_images else 0, np.uint64)
    rows = truncate = emptied_at = begun = 0
    emptied = False
    for i in range(changes):
        while truncate < truncates.shape[0] and truncates[truncate] <= i:
            for at in range(emptied_at, i):
                if op[at] != DELETE:
                    head[new_code[at]] = NONE
            emptied_at, emptied = i, True
            truncate += 1
        # At the end of a transaction a deferred key must be unique again.
        if with_images and commit[i] != commit[begun]:
            if _shares_key(begun, i, op, new_code, head, following):
                return KEY_HELD_TWICE, i - 1, row, before, origin
            begun = i
        this = NONE
        if op[i] != INSERT:
            code = old_code[i]
            image = old_image[i] if with_images else np.uint64(0)
            has_left = emptied or left_lake[code]
            this = _holder(code, image, head, following, images, has_left)
            if this != NONE:
                _leave(code, this, head, following)
            elif has_left:
                return ROW_MISSING, i, row, before, origin
            else:
                left_lake[code] = True
        if this == NONE:
            this = rows
            rows += 1
            origin[this] = NONE if op[i] == INSERT else old_code[i]
            latest[this] = NONE
        row[i], before[i] = this, latest[this]
        latest[this] = i
        if op[i] == DELETE:
            continue
        code = new_code[i]
        if with_images:
            images[this] = new_image[i]
        elif head[code] != NONE:
            return KEY_HELD_TWICE, i, row, before, origin
        else:
            # A row can get this key only if the lake's row with it has left it, or does not exist.
            left_lake[code] = True
        _arrive(code, this, head, following)
    if (
        with_images
        and truncate == truncates.shape[0]
        and _shares_key(begun, changes, op, new_code, head, following)
    ):
        return KEY_HELD_TWICE, changes - 1, row, before, origin
    return OK, -1, row, before, origin[:rows]


@loop(INTS, INTS)
def carry(before, unchanged):  # type: ignore[no-untyped-def]
    """Return, for each change, the change of its row that last sent a column; -1 if only the lake has it.

    `before`: for each change, the previous change of its row. `unchanged`: the changes, ascending, that did
    not send the column.
    """
    sent_by = np.arange(before.shape[0])
    for i in unchanged:
        sent_by[i] = sent_by[before[i]] if before[i] != NONE else NONE
    return sent_by


@loop(BYTES, INTS, INT, INTS, INTS)
def last_changes(op, new_code, codes, row, origin):  # type: ignore[no-untyped-def]
    """Return the last change of each row.

    A row that is inserted with the key that a deleted row has in the lake counts as that row, which the lake
    then updates in place. The inserted row itself gets -1.
    """
    same_as = np.arange(origin.shape[0])
    deleted = np.full(codes, NONE, np.int64)
    last = np.full(origin.shape[0], NONE, np.int64)
    for i in range(row.shape[0]):
        if op[i] == INSERT and deleted[new_code[i]] != NONE:
            same_as[row[i]] = deleted[new_code[i]]
            deleted[new_code[i]] = NONE
        this = same_as[row[i]]
        last[this] = i
        if op[i] == DELETE and origin[this] != NONE:
            deleted[origin[this]] = this
    return last


@loop(INTS, BYTES, FLAGS)
def hash_texts(offsets, data, valid):  # type: ignore[no-untyped-def]
    """Return a 64-bit hash of each text value. Null has a hash of its own."""
    hashes = np.empty(offsets.shape[0] - 1, np.uint64)
    for i in range(hashes.shape[0]):
        if not valid[i]:
            hashes[i] = np.uint64(0x9E3779B97F4A7C15)
            continue
        value = np.uint64(0xCBF29CE484222325)
        for at in range(offsets[i], offsets[i + 1]):
            value = (value ^ np.uint64(data[at])) * np.uint64(0x100000001B3)
            value ^= value >> np.uint64(29)
        hashes[i] = value
    return hashes


@loop(BYTES, INTS, INTS, INT, FLAG)
def follow_copies(op, old_code, new_code, codes, emptied):  # type: ignore[no-untyped-def]
    """Follow the copies of each different row of a table without a key. A delete removes the newest copy.

    Returns a status and, if it is not OK, the change that caused it; the number of copies that the lake
    loses, for each code; and, for each change, True if the row that it made still exists at the end.
    """
    changes = op.shape[0]
    newest = np.full(codes, NONE, np.int64)
    older = np.full(changes, NONE, np.int64)
    stays = np.zeros(changes, np.bool_)
    lost = np.zeros(codes, np.int64)
    for i in range(changes):
        if op[i] != INSERT:
            code = old_code[i]
            copy = newest[code]
            if copy != NONE:
                newest[code] = older[copy]
                stays[copy] = False
            elif emptied:
                return ROW_MISSING, i, lost, stays
            else:
                lost[code] += 1
        if op[i] != DELETE:
            code = new_code[i]
            older[i] = newest[code]
            newest[code] = i
            stays[i] = True
    return OK, -1, lost, stays
