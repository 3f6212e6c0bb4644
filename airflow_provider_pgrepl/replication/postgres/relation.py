"""PgType, Column, Relation: what a table is at one moment of the source."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any

from airflow_provider_pgrepl.replication.postgres.names import TableName

STATE_SCHEMA = "_pgrepl"
"""The pipelines' own tables are in it; none of them is replicated."""

TOO_LARGE = "x"
"""Kind of a type that is made of more than is looked at."""

MOST_LEVELS = 32
MOST_PARTS = 20_000
"""Of all columns of a table together, with enum labels. Few types can be made of very many."""


@dataclass(frozen=True)
class PgType:
    """A type, and what it is made of.

    `kind`: pg_type.typtype (`b` base, `e` enum, `d` domain, `c` composite, `r` range, `m` multirange), or `a`
    for an array, or TOO_LARGE. `parts`, named: `element` of an array, `base` of a domain, `subtype` of a
    range, `range` of a multirange, the fields of a composite in order. `delimiter` stands between an array's
    elements when this type is the element. `extension`: the name of the extension that owns it, empty for
    none. `labels` of an enum: pg_enum's oid and label of each, in order; a label that was renamed keeps its
    oid.
    """

    oid: int
    typmod: int = -1
    name: str = ""
    kind: str = "b"
    delimiter: str = ","
    extension: str = ""
    parts: tuple[tuple[str, PgType], ...] = ()
    labels: tuple[tuple[int, str], ...] = ()

    @property
    def only_part(self) -> PgType:
        """What an array, domain, range or multirange is made of."""
        ((_, part),) = self.parts
        return part

    @property
    def without_domain(self) -> PgType:
        """What a domain is made of at last; any other type is itself."""
        return self.only_part.without_domain if self.kind == "d" and self.parts else self

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> PgType:
        parts = tuple((name, cls.from_dict(part)) for name, part in fields["parts"])
        labels = tuple((oid, label) for oid, label in fields.get("labels", ()))
        return cls(**{**fields, "parts": parts, "labels": labels})


@dataclass(frozen=True)
class Column:
    """One column as pg_catalog has it.

    `type_name` is `format_type(type_oid, typmod)`, as `numeric(12,2)`; `type_kind` is pg_type.typtype
    (`b` base, `e` enum, `d` domain, …); `xmin` is that of its pg_attribute row, which moves with each ALTER.
    `type` says more of a type that is no built-in scalar, and is None for one that is. `missing` is what rows
    from before the column have in it, as text (pg_attribute.attmissingval); None is NULL. `default_oid` is
    that of its default (pg_attrdef), which each ALTER … TYPE makes anew; 0 without one.
    """

    name: str
    attnum: int
    type_oid: int
    typmod: int
    type_name: str
    type_kind: str = "b"
    is_key: bool = False
    not_null: bool = False
    xmin: int = 0
    type: PgType | None = None
    missing: str | None = None
    default_oid: int = 0

    @property
    def pg_type(self) -> PgType:
        """The column's type, whatever it is."""
        return self.type or PgType(self.type_oid, self.typmod, self.type_name, self.type_kind)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Column:
        known = fields.get("type")
        return cls(**{**fields, "type": PgType.from_dict(known) if known else None})


@dataclass(frozen=True)
class Partition:
    """A table at the bottom of a partitioned one.

    `had_rows`: it may have held rows when it became a partition, which no stream tells of. `relfilenode` is
    negative where what older rows have in an added column cannot be told; `xmin` is that of its pg_class row,
    which moves with the file. `links`: xmin of each pg_inherits row between the partitioned table and it,
    which moves when it, or what it is below, is detached and attached again. `relkind` and `persistence` are
    those of pg_class.
    """

    oid: int
    table: TableName
    relfilenode: int
    had_rows: bool = False
    xmin: int = 0
    links: tuple[int, ...] = ()
    relkind: str = ""
    persistence: str = ""

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Partition:
        table, links = TableName(**fields["table"]), tuple(fields.get("links", ()))
        return cls(**{**fields, "table": table, "links": links})


@dataclass(frozen=True)
class PublicationStanding:
    """Which table has a relation's place now, and how the publication publishes it.

    `oid`: the relation's own; another one's that has its name, or 0, when it is gone. The others are those of
    Relation: none of them ever comes back when what it stands for was altered, and set back.
    """

    oid: int
    publication_oid: int = 0
    publication_xmin: int = 0
    membership_oid: int = 0
    membership_xmin: int = 0
    links: tuple[int, ...] = ()
    persistence: str = ""
    partitions: tuple[Partition, ...] = ()
    moved_to: TableName | None = None

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> PublicationStanding:
        partitions = tuple(Partition.from_dict(part) for part in fields.get("partitions", ()))
        moved_to = TableName(**fields["moved_to"]) if fields.get("moved_to") else None
        links = tuple(fields.get("links", ()))
        return cls(**{**fields, "links": links, "partitions": partitions, "moved_to": moved_to})


@dataclass(frozen=True)
class Relation:
    """A table's definition at one moment: published columns in the order in which pgoutput sends them.

    `replica_identity` is pg_class.relreplident (`d`, `n`, `f`, `i`); `is_key` of a column says that it
    belongs to the key by which rows are matched in the lake: the identity index, or the primary key.
    `persistence` is pg_class.relpersistence; `xmin` that of its pg_class row, which moves with the file, in
    case the publication keeps it, without a word, when it is made unlogged; else 0. `links`, of a
    partition: xmin of each pg_inherits row up to the table through which the publication publishes it.
    `unpublished` are generated columns whose values the stream does not carry.
    `publication_oid`, `membership_oid` and `membership_xmin` pin the publication and the table's place in it,
    `publication_xmin` what it publishes. `natts` is pg_class.relnatts: the highest attnum ever given.

    Of a lake table, and never of the catalog: `dropped` are columns that it keeps, null from their drop on;
    `ignored` the attnums of published columns that it leaves out; `truncated_by` the transaction that last
    truncated the table as the stream told, and so made its partitions' files anew.

    What a version written before this was recorded does not say is 0 or empty, and compared with nothing.
    """

    oid: int
    table: TableName
    columns: tuple[Column, ...]
    replica_identity: str = "d"
    relkind: str = "r"
    relfilenode: int = 0
    publication_oid: int = 0
    membership_oid: int = 0
    membership_xmin: int = 0
    unpublished: tuple[Column, ...] = ()
    publication_xmin: int = 0
    natts: int = 0
    partitions: tuple[Partition, ...] = ()
    dropped: tuple[Column, ...] = ()
    ignored: tuple[int, ...] = ()
    truncated_by: int = 0
    persistence: str = ""
    xmin: int = 0
    links: tuple[int, ...] = ()

    @property
    def files(self) -> dict[int, tuple[int, int]]:
        """Of each table whose file is watched, by oid: the file, and the xmin that moves with it."""
        if self.relkind == "p":
            return {part.oid: (abs(part.relfilenode), part.xmin) for part in self.partitions}
        return {self.oid: (abs(self.relfilenode), self.xmin)} if self.xmin else {}

    @property
    def key_columns(self) -> tuple[Column, ...]:
        return tuple(column for column in self.columns if column.is_key)

    @property
    def names(self) -> tuple[TableName, frozenset[tuple[int, str]]]:
        """Its name, and the attnum and name of each column: what settings are bound to."""
        columns = (*self.columns, *self.unpublished)
        return self.table, frozenset((column.attnum, column.name) for column in columns)

    @property
    def standing(self) -> PublicationStanding:
        return PublicationStanding(
            self.oid,
            self.publication_oid,
            self.publication_xmin,
            self.membership_oid,
            self.membership_xmin,
            self.links,
            self.persistence,
            self.partitions,
        )

    def to_json(self) -> str:
        """Canonical JSON: equal relations give equal text."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    @lru_cache(maxsize=4096)
    def from_json(cls, text: str) -> Relation:
        """Raises ValueError or TypeError on anything but `to_json`'s text.

        The state's records of hundreds of tables are read again and again, and seldom differ.
        """
        fields: dict[str, Any] = json.loads(text)
        fields["table"] = TableName(**fields["table"])
        for name in ("columns", "unpublished", "dropped"):
            fields[name] = tuple(Column.from_dict(column) for column in fields.get(name, ()))
        fields["partitions"] = tuple(Partition.from_dict(part) for part in fields.get("partitions", ()))
        for name in ("ignored", "links"):
            fields[name] = tuple(fields.get(name, ()))
        return cls(**fields)

    @cached_property
    def version(self) -> int:
        """63-bit hash of the content: the changelog's `relation_version`."""
        return int.from_bytes(hashlib.blake2b(self.to_json().encode(), digest_size=8).digest()) >> 1
