"""Changes of a table with a key, laid over a version of it by Spark: rows are found by joins."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from airflow_provider_pgrepl.replication.lake.time_travel.entries import (
    ALIVE,
    KIND,
    MARK,
    MISSING,
    MUST,
    ROW,
    kept,
    origin,
    replaced,
    value,
)
from airflow_provider_pgrepl.replication.lake.time_travel.overlay import Overlay
from airflow_provider_pgrepl.replication.lake.time_travel.spark_task import one_task, quoted
from airflow_provider_pgrepl.replication.values import COMMIT_LSN, COMMIT_TS, DELETED

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

_SMALL = 200_000
"""Up to so many changed rows are sent to every executor instead of moving the table's rows to them."""


class SparkReplaced:
    """A table with a key: the rows that changes replace are found by joins."""

    def __init__(self, version: DataFrame, overlay: Overlay) -> None:
        from pyspark.sql import functions

        policy = overlay.choices.policy
        emptied = overlay.truncated and policy.truncate == "apply"
        self.sql = functions
        self.version = version
        self.keys = overlay.key_names
        self.small = overlay.count <= _SMALL
        self.emptied = emptied and policy.deletes == "hard"
        self.marked = emptied and policy.deletes == "soft"
        self.is_own_origin = not policy.follows_keys
        schema = _entry_schema(version.schema, self.keys)
        self.entries = one_task(version.sparkSession, schema, overlay.entries)

    def result(self) -> DataFrame:
        if self.emptied:
            return self._coming()
        remaining = self._remaining()
        return (self._marked(remaining) if self.marked else remaining).unionByName(self._coming())

    def _rows(self) -> DataFrame:
        return self.entries.where(self.sql.col(KIND) == ROW)

    def _hinted(self, frame: DataFrame) -> DataFrame:
        return self.sql.broadcast(frame) if self.small else frame

    def _remaining(self) -> DataFrame:
        """Rows of the version that no entry replaces."""
        keys = self._rows().select(*(self.sql.col(replaced(n)) for n in range(len(self.keys))))
        same = self._all((self.version[quoted(key)], keys[replaced(n)]) for n, key in enumerate(self.keys))
        return self.version.join(self._hinted(keys), same, "left_anti")

    def _marked(self, remaining: DataFrame) -> DataFrame:
        """The same, softly deleted; rows that were so before stay as they are."""
        stamps = {name: f"new_{name}" for name in (COMMIT_LSN, COMMIT_TS) if name in self.version.columns}
        marks = self.entries.where(self.sql.col(KIND) == MARK).select(
            *(
                self.sql.col(value(self.version.columns.index(name))).alias(alias)
                for name, alias in stamps.items()
            ),
            self.sql.lit(True).alias("new_mark"),
        )
        live = ~self.sql.col(DELETED)
        changed = remaining.crossJoin(self.sql.broadcast(marks))
        columns = {name: self.sql.col(quoted(name)) for name in self.version.columns}
        for name, alias in stamps.items():
            columns[name] = self.sql.when(live, self.sql.col(alias)).otherwise(columns[name])
        columns[DELETED] = self.sql.lit(True)
        return changed.select(*(column.alias(name) for name, column in columns.items()))

    def _coming(self) -> DataFrame:
        """The rows that come, with what stays of those that go; an error for one that is missing."""
        sql, numbers = self.sql, range(len(self.version.columns))
        joined = self._with_touched(self._rows(), replaced, "b")
        before, known = "b", "b_there"
        if not self.is_own_origin:
            joined = self._with_touched(joined, origin, "k")
            before, known = "k", "k_there"
        keeps = sql.greatest(sql.lit(False), *(sql.col(kept(n)) for n in numbers)) & sql.col(ALIVE)
        lacks = (sql.col(MUST) & sql.col("b_there").isNull()) | (keeps & sql.col(known).isNull())
        error = sql.raise_error(sql.lit(MISSING)).cast("boolean")
        checked = joined.where(sql.when(lacks, error).otherwise(sql.col(ALIVE)))
        return checked.select(
            *(
                sql.when(sql.col(kept(n)), sql.col(f"{before}{n}")).otherwise(sql.col(value(n))).alias(name)
                for n, name in enumerate(self.version.columns)
            )
        )

    def _with_touched(self, entries: DataFrame, name: Callable[[int], str], prefix: str) -> DataFrame:
        """Entries beside the version's rows of that key: columns as prefix and number, and whether they are.

        Such rows are few, so they are picked out before the join.
        """
        sql, numbers = self.sql, range(len(self.keys))
        keys = self._rows().select(*(sql.col(name(n)).alias(f"w{n}") for n in numbers))
        version = self.version.limit(0) if self.emptied else self.version
        same = self._all((version[quoted(key)], keys[f"w{n}"]) for n, key in enumerate(self.keys))
        touched = version.join(self._hinted(keys), same, "left_semi").select(
            *(sql.col(quoted(column)).alias(f"{prefix}{n}") for n, column in enumerate(version.columns)),
            sql.lit(True).alias(f"{prefix}_there"),
        )
        places = [self.version.columns.index(key) for key in self.keys]
        pairs = ((sql.col(name(n)), sql.col(f"{prefix}{place}")) for n, place in enumerate(places))
        return entries.join(touched, self._all(pairs), "left")

    def _all(self, pairs: Iterable[tuple[Column, Column]]) -> Column:
        result = self.sql.lit(True)
        for one, other in pairs:
            result = result & (one == other)
        return result


def _entry_schema(version: StructType, keys: list[str]) -> StructType:
    from pyspark.sql.types import BooleanType, LongType, StructField, StructType

    types = {field.name: field.dataType for field in version.fields}
    fields = [
        StructField(KIND, LongType()),
        StructField(ALIVE, BooleanType()),
        StructField(MUST, BooleanType()),
        *(StructField(replaced(number), types[key]) for number, key in enumerate(keys)),
        *(StructField(origin(number), types[key]) for number, key in enumerate(keys)),
    ]
    for number, field in enumerate(version.fields):
        fields += [StructField(value(number), field.dataType), StructField(kept(number), BooleanType())]
    return StructType(fields)
