"""The compiled loops of `collapse`: replay of a batch's changes over key codes, and hashes of values."""

from __future__ import annotations

import numpy as np

from airflow_provider_pgrepl.replication.compiled import BYTES, FLAG, FLAGS, HASHES, INT, INTS, inner, loop

OK, KEY_HELD_TWICE, ROW_MISSING = range(3)

INSERT, DELETE = ord("I"), ord("D")
NONE = -1


@inner
def holder(code, image, head, following, images, left_lake):  # type: ignore[no-untyped-def]
    """The entity that a change of key `code` means; NONE: the lake's row of that key.

    A deferrable key may be held by several rows for a moment; then the whole old row tells them apart,
    and of equal ones any will do. Without images a key has one holder at any moment.
    """
    first = head[code]
    if first == NONE or images.shape[0] == 0:
        return first
    entity = first
    while entity != NONE:
        if images[entity] == image:
            return entity
        entity = following[entity]
    return first if left_lake[code] else NONE


@inner
def leave(code, entity, head, following):  # type: ignore[no-untyped-def]
    if head[code] == entity:
        head[code] = following[entity]
        return
    before = head[code]
    while following[before] != entity:
        before = following[before]
    following[before] = following[entity]


@inner
def arrive(code, entity, head, following):  # type: ignore[no-untyped-def]
    following[entity] = NONE
    if head[code] == NONE:
        head[code] = entity
        return
    last = head[code]
    while following[last] != NONE:
        last = following[last]
    following[last] = entity


@loop(BYTES, INTS, INTS, INT, FLAG, INTS, INTS, INT, HASHES, HASHES)
def replay(  # type: ignore[no-untyped-def] # noqa: C901 - one loop, kept in one piece for speed
    op, old_code, new_code, codes, emptied, unsent_row, unsent_column, unsent_width, old_image, new_image
):
    """Follow every row of the batch from the key it has in the lake to its final state.

    `op` I, U, D; codes of the key before and after; `emptied`: the lake holds nothing (TRUNCATE);
    (unsent_row, unsent_column): columns, numbered among those ever unsent, which a change did not send;
    images: hashes of the whole rows, empty unless the replica identity is FULL.

    Returns status, the change at fault, and per entity: origin code (-1: not in the lake), final code
    (-1: deleted), last change, and per unsent column the change that sent it last (-1: keep the lake's).
    """
    changes = op.shape[0]
    with_images = new_image.shape[0] > 0
    head = np.full(codes, NONE, np.int64)
    deleted = np.full(codes, NONE, np.int64)
    left_lake = np.full(codes, emptied, np.bool_)
    origin = np.empty(changes, np.int64)
    final = np.empty(changes, np.int64)
    last = np.empty(changes, np.int64)
    following = np.empty(changes, np.int64)
    images = np.empty(changes if with_images else 0, np.uint64)
    source = np.empty((changes if unsent_width > 0 else 0, unsent_width), np.int64)
    entities = 0
    unsent_at = 0
    for i in range(changes):
        if op[i] == INSERT:
            code = new_code[i]
            entity = deleted[code]
            if entity != NONE:
                deleted[code] = NONE
            else:
                entity = entities
                entities += 1
                origin[entity] = NONE
        else:
            code = old_code[i]
            image = old_image[i] if with_images else np.uint64(0)
            entity = holder(code, image, head, following, images, left_lake)
            if entity != NONE:
                leave(code, entity, head, following)
            elif left_lake[code]:
                return ROW_MISSING, i, 0, origin, final, last, source
            else:
                left_lake[code] = True
                entity = entities
                entities += 1
                origin[entity] = code
                for j in range(unsent_width):
                    source[entity, j] = NONE
        last[entity] = i
        if op[i] == DELETE:
            final[entity] = NONE
            if origin[entity] != NONE:
                deleted[origin[entity]] = entity
            continue
        code = new_code[i]
        if not with_images:
            if head[code] != NONE:
                return KEY_HELD_TWICE, i, 0, origin, final, last, source
            # Somebody else could take this key only because the lake's row had left it, or never was.
            left_lake[code] = True
        else:
            images[entity] = new_image[i]
        arrive(code, entity, head, following)
        final[entity] = code
        if unsent_width > 0:
            at = unsent_at
            while unsent_at < unsent_row.shape[0] and unsent_row[unsent_at] == i:
                unsent_at += 1
            for j in range(unsent_width):
                sent = True
                for k in range(at, unsent_at):
                    if unsent_column[k] == j:
                        sent = False
                if sent:
                    source[entity, j] = i
    for entity in range(entities):
        code = final[entity]
        if code != NONE and following[head[code]] != NONE:
            return KEY_HELD_TWICE, last[entity], 0, origin, final, last, source
    return OK, -1, entities, origin, final, last, source


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
def replay_rows(op, old_code, new_code, codes, emptied):  # type: ignore[no-untyped-def]
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
