"""The compiled loop of `held_keys`: which row each key holds after every source transaction."""

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


@inner
def _settle(touched, alive, stale, at_code, seen_at, shadow, left_at, made_at, row, gone, since):  # type: ignore[no-untyped-def]
    """What a transaction did to keys becomes visible: first what left them, then who holds them now."""
    for n in range(touched.shape[0]):
        entity = touched[n]
        code = seen_at[entity]
        if code != NONE and (not alive[entity] or at_code[entity] != code):
            row[code], gone[code], since[code] = shadow[entity], True, left_at[entity]
    # A row that an ignored TRUNCATE left gives way to one that came after it.
    for passed_over in (True, False):
        for n in range(touched.shape[0]):
            entity = touched[n]
            if alive[entity] and stale[entity] == passed_over:
                code = at_code[entity]
                row[code], gone[code], since[code] = entity, False, made_at[entity]
                seen_at[entity] = code
    for n in range(touched.shape[0]):
        if not alive[touched[n]]:
            seen_at[touched[n]] = NONE


@loop(
    BYTES, INTS, INTS, INT, INTS, INTS, INTS, INTS, INTS, FLAG,
    INTS, INTS, INT, HASHES, HASHES,
)  # fmt: skip
def replay_keys(  # type: ignore[no-untyped-def] # noqa: C901 - one loop, kept in one piece for speed
    op, old_code, new_code, codes, commit, places, truncates, truncate_commits, truncate_places, ignoring,
    unsent_row, unsent_column, unsent_width, old_image, new_image,
):  # fmt: skip
    """Follow the rows from transaction to transaction (`commit`: its LSN), and what each key holds.

    Arguments as of `kernels.replay`; `truncates`: the changes before which a TRUNCATE stands, `ignoring`:
    it is passed over. Returns status, the change at fault, and by code: the record of the row that the key
    holds (-1: as in the lake), whether that row has gone, the place of the change that made it so; whether
    the lake must hold a live row under the code; then by record: its origin code, the change that sent it
    last (-1: none), and per unsent column the change that sent that (-1: keep the origin's).
    """
    changes = op.shape[0]
    with_images = new_image.shape[0] > 0
    head = np.full(codes, NONE, np.int64)
    left_lake = np.full(codes, False, np.bool_)
    in_lake = np.full(codes, False, np.bool_)
    row = np.full(codes, NONE, np.int64)
    gone = np.full(codes, False, np.bool_)
    since = np.full(codes, NONE, np.int64)
    size = 2 * changes
    origin = np.full(size, NONE, np.int64)
    last = np.full(size, NONE, np.int64)
    source = np.full((size, unsent_width), NONE, np.int64)
    following = np.full(size, NONE, np.int64)
    images = np.zeros(size if with_images else 0, np.uint64)
    alive = np.full(size, False, np.bool_)
    stale = np.full(size, False, np.bool_)
    at_code = np.full(size, NONE, np.int64)
    seen_at = np.full(size, NONE, np.int64)
    shadow = np.full(size, NONE, np.int64)
    left_at = np.full(size, NONE, np.int64)
    made_at = np.full(size, NONE, np.int64)
    in_commit = np.full(size, NONE, np.int64)
    touched = np.empty(size, np.int64)
    touches = 0
    records = 0
    truncate = 0
    unsent_at = 0
    now = np.int64(-1)
    for i in range(changes + 1):
        while truncate < truncates.shape[0] and (i == changes or truncates[truncate] <= i):
            if truncate_commits[truncate] != now:
                _settle(
                    touched[:touches],
                    alive,
                    stale,
                    at_code,
                    seen_at,
                    shadow,
                    left_at,
                    made_at,
                    row,
                    gone,
                    since,
                )
                touches = 0
                now = truncate_commits[truncate]
            for code in range(codes):
                left_lake[code] = True
                entity = head[code]
                head[code] = NONE
                while entity != NONE:
                    if in_commit[entity] != now:
                        in_commit[entity] = now
                        touched[touches] = entity
                        touches += 1
                    if ignoring:
                        stale[entity] = True
                    else:
                        alive[entity] = False
                        if seen_at[entity] == code:
                            shadow[entity] = entity
                            left_at[entity] = truncate_places[truncate]
                    entity = following[entity]
            truncate += 1
        if i == changes:
            break
        if commit[i] != now:
            for n in range(touches):
                code = at_code[touched[n]]
                if head[code] != NONE and following[head[code]] != NONE:
                    return KEY_HELD_TWICE, i - 1, row, gone, since, in_lake, origin, last, source
            _settle(
                touched[:touches], alive, stale, at_code, seen_at, shadow, left_at, made_at, row, gone, since
            )
            touches = 0
            now = commit[i]
        if op[i] == INSERT:
            entity = records
            records += 1
        else:
            code = old_code[i]
            image = old_image[i] if with_images else np.uint64(0)
            entity = holder(code, image, head, following, images, left_lake)
            if entity != NONE:
                leave(code, entity, head, following)
            elif left_lake[code]:
                return ROW_MISSING, i, row, gone, since, in_lake, origin, last, source
            else:
                left_lake[code] = True
                in_lake[code] = True
                entity = records
                records += 1
                origin[entity] = code
                at_code[entity] = code
                seen_at[entity] = code
                alive[entity] = True
        if in_commit[entity] != now:
            in_commit[entity] = now
            touched[touches] = entity
            touches += 1
        if op[i] == DELETE:
            alive[entity] = False
            if seen_at[entity] == at_code[entity]:
                shadow[entity] = entity
                left_at[entity] = places[i]
            continue
        code = new_code[i]
        if seen_at[entity] != NONE and at_code[entity] == seen_at[entity] and code != seen_at[entity]:
            copy = records
            records += 1
            origin[copy], last[copy] = origin[entity], last[entity]
            source[copy] = source[entity]
            shadow[entity] = copy
            left_at[entity] = places[i]
        if not with_images:
            if head[code] != NONE:
                return KEY_HELD_TWICE, i, row, gone, since, in_lake, origin, last, source
            left_lake[code] = True
        else:
            images[entity] = new_image[i]
        arrive(code, entity, head, following)
        alive[entity] = True
        at_code[entity] = code
        last[entity] = i
        made_at[entity] = places[i]
        at = unsent_at
        while unsent_at < unsent_row.shape[0] and unsent_row[unsent_at] <= i:
            unsent_at += 1
        for j in range(unsent_width):
            sent = True
            for k in range(at, unsent_at):
                if unsent_column[k] == j and unsent_row[k] == i:
                    sent = False
            if sent:
                source[entity, j] = i
    for n in range(touches):
        code = at_code[touched[n]]
        if head[code] != NONE and following[head[code]] != NONE:
            return KEY_HELD_TWICE, changes - 1, row, gone, since, in_lake, origin, last, source
    _settle(touched[:touches], alive, stale, at_code, seen_at, shadow, left_at, made_at, row, gone, since)
    return OK, -1, row, gone, since, in_lake, origin[:records], last[:records], source[:records]
