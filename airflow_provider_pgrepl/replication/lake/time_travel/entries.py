"""Entries: what changes do to the rows of a table with a key, one entry for each row that they leave changed.

Columns: `kind`; `r…` the key of the version's row that goes (null: none), `must` whether there is to be one;
`alive` whether a row comes instead; `c…` its values, `u…` those that are the origin's, `o…` its key (null:
the origin is not in the version).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl.replication.lake.merge.collapse import collapse
from airflow_provider_pgrepl.replication.lake.merge.held_keys import held_keys
from airflow_provider_pgrepl.replication.lake.merge.keyed import RowsCommit
from airflow_provider_pgrepl.replication.lake.merge.soft_deletes import KeysCommit
from airflow_provider_pgrepl.replication.lake.merge.tuples import Bools
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.tables import TableChoices
from airflow_provider_pgrepl.replication.values import COMMIT_LSN, COMMIT_TS, lake_schema, typed_column

_STAMPS = {COMMIT_LSN: "commit_lsn", COMMIT_TS: "commit_ts"}

ROW, EMPTY, MARK = range(3)
"""Kinds of entries. EMPTY: nothing of the version counts; MARK: each row of the version that no entry
replaces is deleted, softly, with the bookkeeping of this entry."""

KIND, ALIVE, MUST = "kind", "alive", "must"

MISSING = (
    "a row to be updated or deleted is missing or there twice: the lake table is not as this pipeline left it"
)


def replaced(number: int) -> str:
    """The entry's column for the key column `number` of the version's row that goes."""
    return f"r{number}"


def origin(number: int) -> str:
    """… of the version's row whose values stay where no change sent them."""
    return f"o{number}"


def value(number: int) -> str:
    """The entry's column for the lake table's column `number`."""
    return f"c{number}"


def kept(number: int) -> str:
    """Whether the value of the lake table's column `number` is that of the origin."""
    return f"u{number}"


def entries_of(changes: pa.Table, relation: Relation, choices: TableChoices) -> pa.Table:
    """The entries of changelog rows of one relation with a key: ops I U D T, in order.

    Raises DriftError, LakeTableError (the changes contradict each other), ValueRangeError.
    """
    policy = choices.policy
    builder = _Builder(changes, relation, choices)
    return builder.of_held(soft=policy.deletes == "soft") if policy.follows_keys else builder.of_collapsed()


Values = Iterable[tuple[pa.Array, Bools | None]]
"""By lake column: values, and where the origin's stays."""


@dataclass(frozen=True)
class _Builder:
    changes: pa.Table
    relation: Relation
    choices: TableChoices

    def of_collapsed(self) -> pa.Table:
        done = collapse(self.changes, self.relation)
        alive, dead = np.flatnonzero(done.final >= 0), np.flatnonzero(done.final < 0)
        order = np.concatenate([alive, dead])
        keys = [self._typed_key(number, done.key_texts(number, done.origin[order])) for number in self._keys]
        values = RowsCommit(done, self.changes, self.relation, self.choices).values(alive)
        columns = {
            KIND: pa.array(np.full(len(order), ROW)),
            ALIVE: pa.array(done.final[order] >= 0),
            MUST: pa.array(done.origin[order] >= 0),
            **{replaced(number): key for number, key in enumerate(keys)},
            **{origin(number): key for number, key in enumerate(keys)},
            **_rows(values, len(alive), len(dead)),
        }
        entries = pa.table(columns)
        return pa.concat_tables([entries, _special(entries.schema, EMPTY)]) if done.overwrite else entries

    def of_held(self, *, soft: bool) -> pa.Table:
        policy = self.choices.policy
        done = held_keys(self.changes, self.relation, policy.truncate)
        values = KeysCommit(done, self.changes, self.relation, self.choices).values()
        columns = {
            KIND: pa.array(np.full(len(done), ROW)),
            ALIVE: pa.array(np.ones(len(done), np.bool_) if soft else ~done.gone),
            MUST: pa.array(done.in_lake),
        }
        for number in self._keys:
            columns[replaced(number)] = self._typed_key(number, done.key_texts(number, done.code))
            columns[origin(number)] = self._typed_key(number, done.key_texts(number, done.origin))
        entries = pa.table({**columns, **_rows(values, len(done), 0)})
        if done.truncated < 0:
            return entries
        mark = _special(entries.schema, MARK)
        for number, name in enumerate(lake_schema(self.relation, self.choices).names):
            if name in _STAMPS:
                at = mark.schema.get_field_index(value(number))
                stamp = self.changes[_STAMPS[name]].slice(done.truncated, 1)
                mark = mark.set_column(at, mark.schema.field(at), stamp)
        return pa.concat_tables([entries, mark])

    @property
    def _keys(self) -> range:
        return range(len(self.relation.key_columns))

    def _typed_key(self, number: int, texts: pa.Array) -> pa.Array:
        column = self.relation.key_columns[number]
        return typed_column(column, self.relation.table, self.choices).parse(texts)


def _rows(values: Values, present: int, missing: int) -> dict[str, pa.ChunkedArray]:
    """Values and kept flags of the rows that come, and `missing` nulls after them."""
    columns: dict[str, pa.ChunkedArray] = {}
    for number, (found, keep) in enumerate(values):
        columns[value(number)] = pa.chunked_array([found, pa.nulls(missing, found.type)])
        stays = np.zeros(present, np.bool_) if keep is None else keep
        columns[kept(number)] = pa.chunked_array([pa.array(stays), pa.array(np.zeros(missing, np.bool_))])
    return columns


def _special(schema: pa.Schema, kind: int) -> pa.Table:
    """An entry that is no row."""
    flags = {ALIVE: False, MUST: False, KIND: kind}
    return pa.table(
        [
            pa.array([flags[field.name]], field.type) if field.name in flags else pa.nulls(1, field.type)
            for field in schema
        ],
        schema=schema,
    )
