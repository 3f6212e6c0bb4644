"""The compiled loop of `held_keys`: what each key holds after every source transaction."""

from __future__ import annotations

import numpy as np

from airflow_provider_pgrepl.replication.lake.merge.kernels import DELETE, NONE
from airflow_provider_pgrepl.replication.runtime.compiled_loops import BYTES, FLAG, INT, INTS, inner, loop


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

    `row`, `before`, `origin` as of `kernels.follow_rows`; `places`, `truncate_places`: what is told of when
    something became so; `ignoring`: TRUNCATE is passed over.

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
