"""A table whose shape changes, as catalog and stream tell of it, and a lake that follows verdicts.

Values are numbers whatever the type, so that a wrong one shows. Time is counted in steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.drift import DriftKind
from airflow_provider_pgrepl.replication.drift.judge import judge
from airflow_provider_pgrepl.replication.pgoutput.messages import RelationMessage
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline

PIPELINE = Pipeline(name="p", lake="/lake", tables=("public.*",))
TABLE = TableName("public", "t")
TYPES = {
    "smallint": (21, -1),
    "integer": (23, -1),
    "bigint": (20, -1),
    "character varying(8)": (1043, 12),
    "text": (25, -1),
}
WIDER = {"smallint": "integer", "integer": "bigint", "character varying(8)": "text"}
Row = dict[int, int | None]


def column(name: str, attnum: int, type_name: str, xmin: int, missing: int | None = None) -> Column:
    oid, typmod = TYPES[type_name]
    return Column(
        name,
        attnum,
        oid,
        typmod,
        type_name,
        is_key=attnum == 1,
        xmin=xmin,
        missing=None if missing is None else str(missing),
    )


@dataclass
class Source:
    """The table at the source. DDL that is not possible changes nothing and returns False."""

    columns: list[Column] = field(
        default_factory=lambda: [
            column("id", 1, "bigint", 1),
            column("a", 2, "integer", 1),
            column("b", 3, "integer", 1),
        ]
    )
    rows: dict[int, Row] = field(default_factory=dict)
    natts: int = 3
    relfilenode: int = 100
    time: int = 1
    widened: set[int] = field(default_factory=set)
    changed: set[int] = field(default_factory=set)
    """Columns of which an ALTER … TYPE rewrote the values as they were, or changed them. None is in both: it
    is known that the one could be taken for the other."""

    def catalog(self) -> Relation:
        return Relation(
            oid=7, table=TABLE, columns=tuple(self.columns), relfilenode=self.relfilenode, natts=self.natts
        )

    def message(self) -> RelationMessage:
        return RelationRecord.of_catalog(self.catalog()).message

    def _place(self, name: str) -> int | None:
        places = (i for i, known in enumerate(self.columns) if known.name == name and known.attnum > 1)
        return next(places, None)

    def add(self, name: str, type_name: str, default: str) -> bool:
        if self._place(name) is not None or name == "id":
            return False
        self.natts += 1
        missing = self.time if default == "constant" else None
        if default == "volatile":
            self._rewrite()
        self.columns.append(column(name, self.natts, type_name, self.time, missing))
        for row in self.rows.values():
            row[self.natts] = missing if default != "volatile" else self.time + 1000
        return True

    def drop(self, name: str) -> bool:
        place = self._place(name)
        if place is None:
            return False
        gone = self.columns.pop(place)
        for row in self.rows.values():
            row.pop(gone.attnum, None)
        return True

    def rename(self, name: str, to: str) -> bool:
        place = self._place(name)
        if place is None or self._place(to) is not None:
            return False
        self.columns[place] = replace(self.columns[place], name=to, xmin=self.time)
        return True

    def swap(self, name: str, other: str) -> bool:
        first, second = self._place(name), self._place(other)
        if first is None or second is None or first == second:
            return False
        self.columns[first] = replace(self.columns[first], name=other, xmin=self.time)
        self.columns[second] = replace(self.columns[second], name=name, xmin=self.time)
        return True

    def widen(self, name: str) -> bool:
        place = self._place(name)
        wider = WIDER.get(self.columns[place].type_name) if place is not None else None
        if place is None or wider is None or self.columns[place].attnum in self.changed:
            return False
        if wider != "text":
            self._rewrite()
            self.widened.add(self.columns[place].attnum)
        self._retype(place, wider)
        return True

    def retype(self, name: str, type_name: str) -> bool:
        """Change type and values of a column. Not to a wider integer: that change could not be detected."""
        place = self._place(name)
        if place is None or self.columns[place].type_name == type_name:
            return False
        widths = ["smallint", "integer", "bigint"]
        if self.columns[place].type_name in widths[: widths.index(type_name) if type_name in widths else 0]:
            return False
        if not self._may_change(place):
            return False
        self._rewrite()
        self._retype(place, type_name)
        self._change_values(self.columns[place].attnum)
        return True

    def use(self, name: str) -> bool:
        """ALTER … TYPE same USING expression. Not after a change of type: that could not be detected."""
        place = self._place(name)
        if place is None or not self._may_change(place):
            return False
        self._rewrite()
        self.columns[place] = replace(self.columns[place], xmin=self.time)
        self._change_values(self.columns[place].attnum)
        return True

    def _may_change(self, place: int) -> bool:
        attnum = self.columns[place].attnum
        if attnum in self.widened | self.changed:
            return False
        self.changed.add(attnum)
        return True

    def touch(self, name: str) -> bool:
        """SET STATISTICS, SET NOT NULL."""
        place = self._place(name)
        if place is None:
            return False
        self.columns[place] = replace(self.columns[place], xmin=self.time)
        return True

    def vacuum(self) -> bool:
        self._rewrite()
        return True

    def _rewrite(self) -> None:
        self.relfilenode = 100 + self.time
        self.columns = [replace(known, missing=None) for known in self.columns]

    def _retype(self, place: int, type_name: str) -> None:
        known = self.columns[place]
        self.columns[place] = replace(
            column(known.name, known.attnum, type_name, self.time), missing=known.missing
        )

    def _change_values(self, attnum: int) -> None:
        for row in self.rows.values():
            if row.get(attnum) is not None:
                row[attnum] = (row[attnum] or 0) + 10_000

    def write(self, key: int) -> list[int | None]:
        """Insert or overwrite a row, and return its values as the stream sends them."""
        row: Row = {c.attnum: self.time * 10 + c.attnum for c in self.columns}
        row[1] = key
        self.rows[key] = row
        return [row[c.attnum] for c in self.columns]

    def shown(self) -> dict[int, dict[str, int | None]]:
        """The rows, by name of column."""
        return {key: {c.name: row.get(c.attnum) for c in self.columns} for key, row in self.rows.items()}


@dataclass
class ModelLake:
    """A lake table that follows verdicts, until one is unsafe."""

    relation: Relation
    rows: dict[int, Row] = field(default_factory=dict)
    reason: str = ""

    def follow(self, record: RelationRecord, pipeline: Pipeline = PIPELINE) -> bool:
        """Apply an announced record. Returns False if the table cannot continue with it."""
        verdict = judge(self.relation, record, pipeline.options(self.relation.table))
        if verdict.kind is DriftKind.UNSAFE or verdict.relation is None:
            self.reason = verdict.reason
            return False
        sent = [(c.name, c.type_oid) for c in record.message.columns]
        assert [(c.name, c.type_oid) for c in verdict.relation.columns] == sent
        known = {c.attnum for c in (*self.relation.columns, *self.relation.dropped)}
        for added in verdict.relation.columns:
            if added.attnum not in known:
                for row in self.rows.values():
                    row[added.attnum] = None if added.missing is None else int(added.missing)
        self.relation = verdict.relation
        return True

    def take(self, values: list[int | None]) -> None:
        row = {c.attnum: value for c, value in zip(self.relation.columns, values, strict=True)}
        assert row[1] is not None
        self.rows[row[1]] = row

    def shown(self) -> dict[int, dict[str, int | None]]:
        return {
            key: {c.name: row.get(c.attnum) for c in self.relation.columns} for key, row in self.rows.items()
        }


@dataclass(frozen=True)
class Written:
    """A row as the stream carries it, and the table after it. `message`: sent before it, if one was."""

    at: int
    message: RelationMessage | None
    values: list[int | None]
    attnums: list[int]
    table: dict[int, dict[str, int | None]]


@dataclass
class Run:
    """The history of the source, step by step."""

    source: Source = field(default_factory=Source)
    catalogs: list[Relation] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    _stale: bool = True

    def __post_init__(self) -> None:
        self.catalogs.append(self.source.catalog())

    def step(self, ddl: tuple[object, ...] | int) -> None:
        """One DDL, or a write of the row with this key."""
        self.source.time += 1
        if isinstance(ddl, int):
            message = self.source.message() if self._stale else None
            self._stale = False
            values = self.source.write(ddl)
            attnums = [c.attnum for c in self.source.columns]
            at = len(self.catalogs)
            self.written.append(Written(at, message, values, attnums, self.source.shown()))
            self.said.append(f"write {ddl}")
        elif getattr(self.source, str(ddl[0]))(*ddl[1:]):
            self._stale = True
            self.said.append(" ".join(map(str, ddl)))
        self.catalogs.append(self.source.catalog())

    def reconnect(self) -> None:
        """Send the Relation message again before the next row."""
        self._stale = True

    def records(self, delays: Iterator[int]) -> Iterator[tuple[Written, RelationRecord | None]]:
        """Yield rows in order, each with the record announced before it, if any.

        `delays`: the number of steps after which each record's catalog is read.
        """
        read = 0
        for written in self.written:
            if written.message is None:
                yield written, None
                continue
            read = min(max(read, written.at + next(delays)), len(self.catalogs) - 1)
            yield written, RelationRecord(written.message, self.catalogs[read])
