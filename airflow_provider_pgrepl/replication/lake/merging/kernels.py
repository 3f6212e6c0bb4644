"""The compiled loops of merging: which row each change changes, and what follows from that."""

from __future__ import annotations

import numpy as np

from airflow_provider_pgrepl.replication.compiled import BYTES, FLAG, FLAGS, HASHES, INT, INTS, inner, loop

OK, KEY_HELD_TWICE, ROW_MISSING = range(3)

INSERT, DELETE = ord("I"), ord("D")
NONE = -1


@inner
def _holder(code, image, head, following, images, left_lake):  # type: ignore[no-untyped-def]
    """The row that a change of key `code` means; NONE: the lake's row of that key.

    A deferrable key may be held by several rows for a moment; then the whole old row tells them apart,
    and of equal ones any will do. Without images a key has one holder at any moment.
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
    """Whether a key that these changes gave is held by two rows."""
    for i in range(begun, end):
        if op[i] != DELETE:
            first = head[new_code[i]]
            if first != NONE and following[first] != NONE:
                return True
    return False


@loop(BYTES, INTS, INTS, INT, INTS, INTS, HASHES, HASHES)
def follow_rows(op, old_code, new_code, codes, commit, truncates, old_image, new_image):  # type: ignore[no-untyped-def] # noqa: C901 - one loop, kept in one piece for speed
    """Say of each change which row it changes, from the key on that the row has in the lake.

    `op` I, U, D; codes of the key before and after, and their number; `commit`: of the change's transaction;
    `truncates`: the changes before which a TRUNCATE stands; images: hashes of the whole rows, empty unless
    the replica identity is FULL.

    Returns status and the change at fault; by change its row and the row's change before it (-1: none); by
    row, numbered as they come, the code of its key in the lake (-1: it was inserted).
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
            # Somebody else could take this key only because the lake's row had left it, or never was.
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
def carry(before, unsent):  # type: ignore[no-untyped-def]
    """By change, the change of its row that last sent a column which the changes `unsent` (ascending) did not
    send; -1: the lake has it."""
    sent_by = np.arange(before.shape[0])
    for i in unsent:
        sent_by[i] = sent_by[before[i]] if before[i] != NONE else NONE
    return sent_by


@loop(BYTES, INTS, INT, INTS, INTS)
def last_changes(op, new_code, codes, row, origin):  # type: ignore[no-untyped-def]
    """By row its last change. One that is inserted under the key that a deleted row has in the lake is that
    row, which the lake then updates in place; itself it has none (-1)."""
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


@inner
def _settle(  # type: ignore[no-untyped-def]
    touched, alive, stale, at_code, seen_at, shadow, left_at, latest, version, of_row, gone, since, places
):
    """What a transaction did to keys becomes visible: first what left them, then who holds them now."""
    for n in range(touched.shape[0]):
        row = touched[n]
        code = seen_at[row]
        if code != NONE and (not alive[row] or at_code[row] != code):
            version[code], of_row[code], gone[code], since[code] = shadow[row], row, True, left_at[row]
    # A row that an ignored TRUNCATE left gives way to one that came after it.
    for passed_over in (True, False):
        for n in range(touched.shape[0]):
            row = touched[n]
            if alive[row] and stale[row] == passed_over:
                code = at_code[row]
                version[code], of_row[code], gone[code], since[code] = (
                    latest[row],
                    row,
                    False,
                    places[latest[row]],
                )
                seen_at[row] = code
    for n in range(touched.shape[0]):
        if not alive[touched[n]]:
            seen_at[touched[n]] = NONE


@loop(
    BYTES, INTS, INT, INTS, INTS, INTS, INTS,
    INTS, INTS, INTS, INTS, FLAG,
)  # fmt: skip
def hold_keys(  # type: ignore[no-untyped-def] # noqa: C901 - one loop, kept in one piece for speed
    op, new_code, codes, commit, row, before, origin,
    places, truncates, truncate_commits, truncate_places, ignoring,
):  # fmt: skip
    """Say what each key holds after the last transaction, of what was ever visible after one.

    `row`, `before`, `origin` as of `follow_rows`; `places`, `truncate_places`: what is told of when something
    became so; `ignoring`: TRUNCATE is passed over.

    Returns by code: the row that the key holds (-1: as in the lake), the change that made it what it is (-1:
    it is the lake's), whether it has left the key, and the place of the change or TRUNCATE that made it so.
    """
    rows = origin.shape[0]
    of_row = np.full(codes, NONE, np.int64)
    version = np.full(codes, NONE, np.int64)
    gone = np.zeros(codes, np.bool_)
    since = np.full(codes, NONE, np.int64)
    alive = np.zeros(rows, np.bool_)
    stale = np.zeros(rows, np.bool_)
    at_code = origin.copy()
    seen_at = origin.copy()
    latest = np.full(rows, NONE, np.int64)
    shadow = np.full(rows, NONE, np.int64)
    left_at = np.full(rows, NONE, np.int64)
    in_commit = np.full(rows, NONE, np.int64)
    touched = np.empty(rows, np.int64)
    touches = truncate = met = truncated = 0
    now = np.int64(-1)
    for i in range(op.shape[0] + 1):
        while True:
            truncating = truncate < truncates.shape[0] and truncates[truncate] <= i
            if not truncating and i == op.shape[0]:
                break
            by = truncate_commits[truncate] if truncating else commit[i]
            if by != now:
                _settle(
                    touched[:touches], alive, stale, at_code, seen_at, shadow, left_at, latest, version,
                    of_row, gone, since, places,
                )  # fmt: skip
                touches, now = 0, by
            if not truncating:
                break
            for this in range(truncated, met):
                if not alive[this]:
                    continue
                if in_commit[this] != now:
                    in_commit[this] = now
                    touched[touches] = this
                    touches += 1
                if ignoring:
                    stale[this] = True
                    continue
                alive[this] = False
                if seen_at[this] == at_code[this]:
                    shadow[this], left_at[this] = latest[this], truncate_places[truncate]
            truncated = met
            truncate += 1
        if i == op.shape[0]:
            break
        this = row[i]
        met = max(met, this + 1)
        if in_commit[this] != now:
            in_commit[this] = now
            touched[touches] = this
            touches += 1
        # Under the key that it leaves stays what it was there.
        if (
            seen_at[this] != NONE
            and at_code[this] == seen_at[this]
            and (op[i] == DELETE or new_code[i] != at_code[this])
        ):
            shadow[this], left_at[this] = before[i], places[i]
        alive[this] = op[i] != DELETE
        if alive[this]:
            at_code[this], latest[this] = new_code[i], i
    _settle(
        touched[:touches], alive, stale, at_code, seen_at, shadow, left_at, latest, version,
        of_row, gone, since, places,
    )  # fmt: skip
    return of_row, version, gone, since


@loop(INTS, BYTES, FLAGS)
def hash_texts(offsets, data, valid):  # type: ignore[no-untyped-def]
    """A 64-bit hash of each text; null has one of its own."""
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
    """Follow the copies of each different row of a table without key; what goes is the newest copy.

    Returns status, the change at fault, how many copies the lake loses per code, and for each change whether
    the row that it made is still there at the end.
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
