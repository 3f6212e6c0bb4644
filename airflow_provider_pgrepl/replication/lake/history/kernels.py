"""The compiled function behind a table's history: it finds the versions of rows that transactions ended."""

from __future__ import annotations

import numpy as np

from airflow_provider_pgrepl.replication.lake.merge.kernels import DELETE, INSERT, NONE
from airflow_provider_pgrepl.replication.runtime.compiled_loops import BYTES, FLAG, INT, INTS, inner, loop

_UNDECIDED = 0
_GONE, _CHANGED, _TRUNCATED = ord("D"), ord("U"), ord("T")
_BEFORE_ALL = -2


@inner
def _end(entry, row, now, how, origin, held, version, ended):  # type: ignore[no-untyped-def]
    """Record a row's current version as ended, in `entry`. Return the number of the next entry."""
    rows, origins, codes, versions, by, hows, _ = ended
    rows[entry], origins[entry], codes[entry], versions[entry] = row, origin[row], held[row], version[row]
    by[entry], hows[entry] = now, how
    return entry + 1


@inner
def _end_leftover(entry, code, now, ended):  # type: ignore[no-untyped-def]
    """Record that the lake's row with a key has ended, if the lake has one. Return the number of the next
    entry."""
    rows, origins, codes, versions, by, hows, maybe = ended
    rows[entry], origins[entry], codes[entry], versions[entry] = NONE, code, code, NONE
    by[entry], hows[entry], maybe[entry] = now, _TRUNCATED, True
    return entry + 1


@inner
def _settle(begin, entry, ended, present, deleted):  # type: ignore[no-untyped-def]
    """Finish a transaction: a row that it touched was changed if it still exists, and deleted if not."""
    rows, _, codes, _, _, hows, _ = ended
    for at in range(begin, entry):
        deleted[codes[at]] = NONE
        if hows[at] == _UNDECIDED:
            hows[at] = _CHANGED if present[rows[at]] else _GONE


@inner
def _displace(  # type: ignore[no-untyped-def]
    entry, row, now, born, touched, entry_of, origin, held, version, leftover, settled, ended
):
    """End the versions that ignored TRUNCATEs left under the key that a row has at the end of the
    transaction."""
    code = held[row]
    left = leftover[code]
    if left != NONE:
        leftover[code] = NONE
        if touched[left] == now:
            ended[5][entry_of[left]] = _TRUNCATED
        elif born[left] < now:
            entry = _end(entry, left, now, _TRUNCATED, origin, held, version, ended)
    if not settled[code]:
        settled[code] = True
        entry = _end_leftover(entry, code, now, ended)
    return entry


@inner
def _displace_all(  # type: ignore[no-untyped-def]
    entry, first, i, now, row_of, alive, born, touched, entry_of, origin, held, version, leftover, settled,
    ended,
):  # fmt: skip
    """Call `_displace` for each row that the changes from `first` to before `i` inserted or updated, and that
    still exists."""
    for at in range(first, i):
        row = row_of[at]
        if row != NONE and alive[row]:
            entry = _displace(
                entry, row, now, born, touched, entry_of, origin, held, version, leftover, settled, ended
            )
    return entry


@loop(
    BYTES, INTS, INT, INTS, INTS, INTS,
    INTS, INTS, FLAG,
)  # fmt: skip
def end_versions(  # type: ignore[no-untyped-def] # noqa: C901 - one loop, kept in one piece for speed
    op, new_code, codes, transaction, followed, origin,
    truncate_at, truncate_by, ignoring,
):  # fmt: skip
    """Return every version that one of these transactions ended, in the order in which they ended.

    `followed`: the row of each change, `origin`: for each row the code of its key in the lake, both as in
    `lake.merge.kernels.follow_rows`. `transaction`: the number of each change's transaction. TRUNCATE number
    k came before the change `truncate_at[k]`, in transaction `truncate_by[k]`. `ignoring`: TRUNCATE leaves
    the rows in the lake until another row has their key. A row that a transaction deletes and inserts again
    under its key is the same row.

    Returns, for each version: the code of the key under which the lake has it or its predecessor (-1: it was
    inserted), the code of its key, the change that made it (-1: the lake has it), the transaction that ended
    it, how (U D T), and True if only the lake shows whether it existed. Then the transaction that first
    emptied the table (-1: none).
    """
    changes, rows = op.shape[0], origin.shape[0]
    deleted = np.full(codes, NONE, np.int64)
    leftover = np.full(codes if ignoring else 0, NONE, np.int64)
    settled = np.zeros(codes if ignoring else 0, np.bool_)
    row_of = np.full(changes if ignoring else 0, NONE, np.int64)
    same_as = np.arange(rows)
    held = origin.copy()
    version = np.full(rows, NONE, np.int64)
    born = np.full(rows, _BEFORE_ALL, np.int64)
    touched = np.full(rows, _BEFORE_ALL, np.int64)
    entry_of = np.empty(rows, np.int64)
    alive = np.zeros(rows, np.bool_)
    present = np.zeros(rows, np.bool_)
    # For each change up to 3 versions end: the previous one, the one that it makes if TRUNCATE ends it, and
    # one that an ignored TRUNCATE left under its key.
    room = 3 * changes
    ended = (
        np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64),
        np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.uint8),
        np.zeros(room, np.bool_),
    )  # fmt: skip
    met = entries = begin = first = truncates = alive_from = 0
    now = emptied_by = NONE
    for i in range(changes + 1):
        while True:
            truncating = truncates < truncate_at.shape[0] and truncate_at[truncates] <= i
            if not truncating and i == changes:
                break
            by = truncate_by[truncates] if truncating else transaction[i]
            if by != now:
                if ignoring:
                    entries = _displace_all(
                        entries, first, i, now, row_of, alive, born, touched, entry_of, origin, held, version,
                        leftover, settled, ended,
                    )  # fmt: skip
                _settle(begin, entries, ended, present, deleted)
                begin, first, now = entries, i, by
            if not truncating:
                break
            truncates += 1
            if emptied_by == NONE and not ignoring:
                emptied_by = now
            for at in range(begin, entries):
                deleted[ended[2][at]] = NONE
                if not ignoring:
                    ended[5][at] = _TRUNCATED
            for row in range(alive_from, met):
                if not alive[row]:
                    continue
                alive[row], present[row] = False, ignoring
                if ignoring:
                    # The row stays until the end of the transaction or longer, so end what earlier TRUNCATEs
                    # left under its key.
                    entries = _displace(
                        entries, row, now, born, touched, entry_of, origin, held, version, leftover,
                        settled, ended,
                    )  # fmt: skip
                    leftover[held[row]] = row
                elif born[row] < now and touched[row] != now:
                    entries = _end(entries, row, now, _TRUNCATED, origin, held, version, ended)
            alive_from = met
        if i == changes:
            break
        if followed[i] == met:
            met += 1
            code = new_code[i] if op[i] == INSERT else origin[followed[i]]
            if op[i] != INSERT and ignoring:
                settled[code] = True
            if op[i] == INSERT and deleted[code] != NONE:
                same_as[followed[i]] = deleted[code]
                deleted[code] = NONE
            elif op[i] == INSERT:
                born[followed[i]] = now
        row = same_as[followed[i]]
        if born[row] < now and touched[row] != now:
            touched[row], entry_of[row] = now, entries
            entries = _end(entries, row, now, _UNDECIDED, origin, held, version, ended)
        version[row] = i
        alive[row] = present[row] = op[i] != DELETE
        if op[i] == DELETE:
            if born[row] < now:
                deleted[ended[2][entry_of[row]]] = row
            continue
        held[row] = new_code[i]
        if ignoring:
            row_of[i] = row
    if ignoring:
        entries = _displace_all(
            entries, first, changes, now, row_of, alive, born, touched, entry_of, origin, held, version,
            leftover, settled, ended,
        )  # fmt: skip
    _settle(begin, entries, ended, present, deleted)
    return (
        ended[1][:entries], ended[2][:entries], ended[3][:entries], ended[4][:entries], ended[5][:entries],
        ended[6][:entries], emptied_by,
    )  # fmt: skip
