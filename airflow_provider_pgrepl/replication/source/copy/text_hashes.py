"""Queries by which the server hashes the text of rows, so that no row leaves it.

A value is hashed as the text that its type's output function writes, which COPY and the stream send. Each
column is hashed with the hash of the columns before it as the seed. The hash is `hashtextextended`, of 64
bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from airflow_provider_pgrepl.replication.source.connection import Connection, row
from airflow_provider_pgrepl.replication.source.server_errors import source_errors

HASHED_TOGETHER = 50
"""The most columns whose hashes depend on each other. The hashes of such groups are hashed as texts: an
expression of 1,600 levels would exceed the server's `max_stack_depth`."""
_PROBE = 'SELECT pg_catalog.hashtextextended(%s COLLATE pg_catalog."C", %s)'
_IS_UTF8 = "SELECT pg_catalog.getdatabaseencoding() = 'UTF8'"


def hash_of_server(connection: Connection, text: str, seed: int) -> int:
    """Return the server's hash of a text of ASCII characters. Raises SourceError."""
    with source_errors("hashing a text"):
        return int(row(connection, _PROBE, (text, seed))[0])


def is_utf8(connection: Connection) -> bool:
    """Return True if the database's encoding is UTF-8, so that texts have the same bytes there. Raises
    SourceError."""
    with source_errors("reading the database's encoding"):
        return bool(row(connection, _IS_UTF8)[0])


@dataclass(frozen=True)
class BucketSql:
    """The buckets of rows, by the hash of their keys, as the server computes them.

    `slots`: for each remainder of the key's hash the number of its range, or -1; None if that is the
    remainder. `ranges`: how many remainders there are, `sub_buckets`: buckets in each range, both powers of
    2. `wanted`: the buckets whose rows are listed, None for all.
    """

    ranges: int
    slots: Sequence[int] | None = None
    sub_buckets: int = 1
    wanted: Sequence[int] | None = None

    def of_key(self, key: str) -> str:
        """Return SQL of the bucket of a key with this hash; negative for none."""
        slot = f"({key} & {self.ranges - 1})"
        if self.slots is not None:
            slot = f"('{_array(self.slots)}'::int4[])[{slot}::int4 + 1]::int8"
        return f"({slot} * {self.sub_buckets} + (({key} >> 32) & {self.sub_buckets - 1}))"

    def condition(self, bucket: str) -> str:
        wanted = "" if self.wanted is None else f" AND {bucket} = ANY ('{_array(self.wanted)}'::int8[])"
        return f"{bucket} >= 0{wanted}"


def _array(numbers: Sequence[int]) -> str:
    return f"{{{','.join(map(str, numbers))}}}"


@dataclass(frozen=True)
class TextHashes:
    """The hashes of a table's rows as SQL.

    `columns`: those that a SELECT of the rows has, in its order. `hashed`: those that are compared. `keys`:
    those of the key; empty if whole rows identify themselves. `seed`: signed. `as_hex`: hash the hexadecimal
    digits of each text in UTF-8, for a database of another encoding.
    """

    columns: Sequence[str]
    hashed: Sequence[str]
    keys: Sequence[str]
    seed: int
    as_hex: bool = False

    def sums(self, select: str, buckets: BucketSql) -> str:
        """Return a query of number, rows and sum of the hashes of each bucket, from a SELECT of the rows."""
        rows, bucket = self._hashed_rows(select), buckets.of_key("k")
        found = f"(SELECT {bucket} AS b, r FROM ({rows}) AS h) AS s"  # noqa: S608 - this module's names
        sums = "SELECT b, pg_catalog.count(*), pg_catalog.sum(r)"
        return f"{sums} FROM {found} WHERE {buckets.condition('b')} GROUP BY b"

    def lists(self, select: str, buckets: BucketSql, *, shows_keys: bool) -> str:
        """Return a query of the hashes of wanted rows: of key, row and each column, and the texts of keys."""
        listed = ["k", "r", *(self._of_column(str(self.seed), name) for name in self.hashed)]
        if shows_keys:
            listed += [f"pg_catalog.concat({self._sql(name)})" for name in self.keys]
        rows, wanted = self._hashed_rows(select), buckets.condition(buckets.of_key("k"))
        return f"SELECT {', '.join(listed)} FROM ({rows}) AS h WHERE {wanted}"  # noqa: S608 - as above

    def _hashed_rows(self, select: str) -> str:
        # Columns get other names, so that none is named like a hash. OFFSET keeps the planner from computing
        # a hash wherever it is named.
        names = [self._sql(name) for name in self.columns]
        alias = f"AS q ({', '.join(names)})" if names else "AS q"
        whole = self._of_columns(self.hashed)
        key = self._of_columns(self.keys) if self.keys else whole
        found = ", ".join([*names, f"{key} AS k", f"{whole} AS r"])
        return f"SELECT {found} FROM ({select}) {alias} OFFSET 0"  # noqa: S608 - as above

    def _sql(self, name: str) -> str:
        return f"c{self.columns.index(name)}"

    def _of_columns(self, names: Sequence[str]) -> str:
        groups = [
            self._of_group(names[first : first + HASHED_TOGETHER])
            for first in range(0, len(names), HASHED_TOGETHER)
        ]
        found = groups[0] if groups else f"({self.seed})::int8"
        for group in groups[1:]:
            found = f"pg_catalog.hashtextextended(({group})::text, {found})"
        return found

    def _of_group(self, names: Sequence[str]) -> str:
        found = str(self.seed)
        for name in names:
            found = self._of_column(found, name)
        return found

    def _of_column(self, seed: str, name: str) -> str:
        # A cast to text may differ from the output function, as for boolean. IS NULL is true of a row of
        # NULLs, therefore num_nulls.
        column = self._sql(name)
        text = f"pg_catalog.concat({column})"
        if self.as_hex:
            text = f"pg_catalog.encode(pg_catalog.convert_to({text}, 'UTF8'), 'hex')"
        seed = f"({seed})::int8 # pg_catalog.num_nulls({column})::int8"
        return f'pg_catalog.hashtextextended({text} COLLATE pg_catalog."C", {seed})'
