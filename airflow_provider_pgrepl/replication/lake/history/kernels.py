"""The compiled loop behind a table's history: every row followed from transaction to transaction.

Unlike `kernels.replay`, which wants only what is left at the end, this notes each version that a transaction
ended: one that was there before it and that it changed, whatever else it did to the row.
"""

from __future__ import annotations

import numpy as np

from airflow_provider_pgrepl.replication.compiled import BYTES, FLAG, HASHES, INT, INTS, inner, loop
from airflow_provider_pgrepl.replication.lake.merging.kernels import (
    DELETE,
    INSERT,
    KEY_HELD_TWICE,
    NONE,
    OK,
    ROW_MISSING,
    arrive,
    holder,
    leave,
)

_UNDECIDED = 0
_GONE, _CHANGED, _TRUNCATED = ord("D"), ord("U"), ord("T")
_BEFORE_ALL = -2


@inner
def _end(entry, row, now, how, origin, held, last, source, ended):  # type: ignore[no-untyped-def]
    """Note a row's version, as it is, as ended; the number of versions noted."""
    rows, origins, codes, lasts, by, hows, sources, _ = ended
    rows[entry], origins[entry], codes[entry], lasts[entry] = row, origin[row], held[row], last[row]
    by[entry], hows[entry] = now, how
    for j in range(source.shape[1]):
        sources[entry, j] = source[row, j]
    return entry + 1


@inner
def _end_leftover(entry, code, now, ended):  # type: ignore[no-untyped-def]
    """Note that the lake's row under a key is over, if there is one."""
    rows, origins, codes, lasts, by, hows, sources, maybe = ended
    rows[entry], origins[entry], codes[entry], lasts[entry] = NONE, code, code, NONE
    by[entry], hows[entry], maybe[entry] = now, _TRUNCATED, True
    for j in range(sources.shape[1]):
        sources[entry, j] = NONE
    return entry + 1


@inner
def _settle(begin, entry, ended, present, deleted):  # type: ignore[no-untyped-def]
    """A transaction is over: what it touched was changed if the row is still there, and deleted if not."""
    rows, _, codes, _, _, hows, _, _ = ended
    for at in range(begin, entry):
        deleted[codes[at]] = NONE
        if hows[at] == _UNDECIDED:
            hows[at] = _CHANGED if present[rows[at]] else _GONE


@inner
def _displace(  # type: ignore[no-untyped-def]
    entry, first, i, now, row_of, alive, born, touched, entry_of, origin, held, last, source, leftover,
    settled, ended,
):  # fmt: skip
    """End what ignored TRUNCATEs left under the keys that rows of the transaction now have."""
    for at in range(first, i):
        row = row_of[at]
        if row == NONE or not alive[row]:
            continue
        code = held[row]
        left = leftover[code]
        if left != NONE:
            leftover[code] = NONE
            if touched[left] == now:
                ended[5][entry_of[left]] = _TRUNCATED
            elif born[left] < now:
                entry = _end(entry, left, now, _TRUNCATED, origin, held, last, source, ended)
        if not settled[code]:
            settled[code] = True
            entry = _end_leftover(entry, code, now, ended)
    return entry


@loop(
    BYTES, INTS, INTS, INT, INTS, INTS, INTS, FLAG,
    INTS, INTS, INT, HASHES, HASHES,
)  # fmt: skip
def follow_versions(  # type: ignore[no-untyped-def] # noqa: C901 - one loop, kept in one piece for speed
    op, old_code, new_code, codes, transaction, truncate_at, truncate_by, ignoring,
    unsent_row, unsent_column, unsent_width, old_image, new_image,
):  # fmt: skip
    """Every version that one of these transactions ended, in the order in which they did.

    `op` I, U, D with codes of the key before and after and the number of their transaction; TRUNCATE number k
    came before the change `truncate_at[k]` and belongs to transaction `truncate_by[k]`. `ignoring`: TRUNCATE
    leaves the rows in the lake, where they are until another one has their key. The rest is as for
    `kernels.replay`.

    Returns status and the change at fault; then, per version: code of the key under which the lake has it or
    what it came from (-1: the batch inserted it), code of its key, the change that made it (-1: it is the
    lake's), the transaction that ended it, how (U D T), per unsent column the change that sent it last (-1:
    the lake has it), and whether only the lake knows if it was there; then the codes of all keys under which
    the lake had what the batch touched, and the transaction that first emptied the table (-1: none).
    """
    changes = op.shape[0]
    with_images = new_image.shape[0] > 0
    head = np.full(codes, NONE, np.int64)
    deleted = np.full(codes, NONE, np.int64)
    left_lake = np.zeros(codes, np.bool_)
    leftover = np.full(codes if ignoring else 0, NONE, np.int64)
    settled = np.zeros(codes if ignoring else 0, np.bool_)
    row_of = np.full(changes if ignoring else 0, NONE, np.int64)
    origin = np.empty(changes, np.int64)
    held = np.empty(changes, np.int64)
    last = np.empty(changes, np.int64)
    born = np.empty(changes, np.int64)
    touched = np.full(changes, _BEFORE_ALL, np.int64)
    entry_of = np.empty(changes, np.int64)
    alive = np.zeros(changes, np.bool_)
    present = np.zeros(changes, np.bool_)
    following = np.empty(changes, np.int64)
    images = np.empty(changes if with_images else 0, np.uint64)
    source = np.empty((changes, unsent_width), np.int64)
    # A change may end one version, TRUNCATE the one that it began, and what that left is another.
    room = 3 * changes
    ended = (
        np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64),
        np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.uint8),
        np.empty((room, unsent_width), np.int64), np.zeros(room, np.bool_),
    )  # fmt: skip
    status, fault = OK, -1
    rows = entries = begin = first = unsent_at = truncates = alive_from = 0
    now = emptied_by = NONE
    for i in range(changes + 1):
        while True:
            truncating = truncates < truncate_at.shape[0] and truncate_at[truncates] <= i
            if not truncating and i == changes:
                break
            by = truncate_by[truncates] if truncating else transaction[i]
            if by != now:
                if ignoring:
                    entries = _displace(
                        entries, first, i, now, row_of, alive, born, touched, entry_of, origin, held, last,
                        source, leftover, settled, ended,
                    )  # fmt: skip
                _settle(begin, entries, ended, present, deleted)
                begin, first, now = entries, i, by
            if not truncating:
                break
            truncates += 1
            left_lake[:] = True
            if emptied_by == NONE and not ignoring:
                emptied_by = now
            for at in range(begin, entries):
                deleted[ended[2][at]] = NONE
                if not ignoring:
                    ended[5][at] = _TRUNCATED
            for row in range(alive_from, rows):
                if not alive[row]:
                    continue
                alive[row], present[row] = False, ignoring
                head[held[row]] = NONE
                if ignoring:
                    leftover[held[row]] = row
                elif born[row] < now and touched[row] != now:
                    entries = _end(entries, row, now, _TRUNCATED, origin, held, last, source, ended)
            alive_from = rows
        if i == changes:
            break
        code = new_code[i] if op[i] == INSERT else old_code[i]
        if op[i] == INSERT and deleted[code] != NONE:
            row = deleted[code]
            deleted[code] = NONE
        elif op[i] == INSERT:
            row = rows
            rows += 1
            origin[row], born[row] = NONE, now
        else:
            image = old_image[i] if with_images else np.uint64(0)
            row = holder(code, image, head, following, images, left_lake)
            if row != NONE:
                leave(code, row, head, following)
            elif left_lake[code]:
                status, fault = ROW_MISSING, i
                break
            else:
                left_lake[code] = True
                if ignoring:
                    settled[code] = True
                row = rows
                rows += 1
                origin[row], held[row], last[row], born[row] = code, code, NONE, _BEFORE_ALL
                for j in range(unsent_width):
                    source[row, j] = NONE
        if born[row] < now and touched[row] != now:
            touched[row], entry_of[row] = now, entries
            entries = _end(entries, row, now, _UNDECIDED, origin, held, last, source, ended)
        last[row] = i
        alive[row] = present[row] = op[i] != DELETE
        if op[i] == DELETE:
            if born[row] < now:
                deleted[ended[2][entry_of[row]]] = row
            continue
        code = new_code[i]
        if with_images:
            images[row] = new_image[i]
        elif head[code] != NONE:
            status, fault = KEY_HELD_TWICE, i
            break
        else:
            left_lake[code] = True
        arrive(code, row, head, following)
        held[row] = code
        if ignoring:
            row_of[i] = row
        while unsent_at < unsent_row.shape[0] and unsent_row[unsent_at] < i:
            unsent_at += 1
        for j in range(unsent_width):
            sent = True
            at = unsent_at
            while at < unsent_row.shape[0] and unsent_row[at] == i:
                if unsent_column[at] == j:
                    sent = False
                at += 1
            if sent:
                source[row, j] = i
    if ignoring:
        entries = _displace(
            entries, first, changes, now, row_of, alive, born, touched, entry_of, origin, held, last, source,
            leftover, settled, ended,
        )  # fmt: skip
    _settle(begin, entries, ended, present, deleted)
    left = origin[:rows]
    return (
        status, fault, ended[1][:entries], ended[2][:entries], ended[3][:entries], ended[4][:entries],
        ended[5][:entries], ended[6][:entries], ended[7][:entries], left[left != NONE], emptied_by,
    )  # fmt: skip
