"""The definition of a table as of a point in time of the source: its types, columns and partitions."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from .names import TableName

STATE_SCHEMA = "_pgrepl"
"""The schema of the pipelines' own tables, which are not replicated."""

TOO_LARGE = "x"
"""The kind of a type with more levels or parts than are read."""

MOST_LEVELS = 32
MOST_PARTS = 20_000
"""The maximum number of parts of all columns of a table, including enum labels. A few types can have very
many parts."""


@dataclass(frozen=True)
class PgType:
    """A type and its component types.

    `kind`: pg_type.typtype (`b` base, `e` enum, `d` domain, `c` composite, `r` range, `m` multirange), or `a`
    for an array, or TOO_LARGE. `parts`, with their names: `element` of an array, `base` of a domain,
    `subtype` of a range, `range` of a multirange, the fields of a composite in order.

    `delimiter` separates the elements of an array of this type. `extension`: the extension that owns the
    type, empty for none. `labels`: OID and label of each pg_enum row of an enum, in order. A renamed label
    keeps its OID.
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
        """The only component type of an array, domain, range or multirange."""
        ((_, part),) = self.parts
        return part

    @property
    def without_domain(self) -> PgType:
        """The type below all domains; a type that is no domain is returned unchanged."""
        return self.only_part.without_domain if self.kind == "d" and self.parts else self

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> PgType:
        parts = tuple((name, cls.from_dict(part)) for name, part in fields["parts"])
        labels = tuple((oid, label) for oid, label in fields.get("labels", ()))
        return cls(**{**fields, "parts": parts, "labels": labels})


@dataclass(frozen=True)
class Column:
    """A column as recorded in pg_catalog.

    `type_name`: `format_type(type_oid, typmod)`, such as `numeric(12,2)`. `type_kind`: pg_type.typtype (`b`
    base, `e` enum, `d` domain, …). `xmin`: that of its pg_attribute row, which changes with each ALTER.
    `type`: the details of a type, None for a built-in scalar type.

    `missing`: the value, as text, in rows from before the column was added (pg_attribute.attmissingval); None
    is NULL. `default_oid`: the OID of its default in pg_attrdef, which each ALTER … TYPE recreates; 0 without
    a default.
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
        """The column's type, also if it is a built-in scalar."""
        return self.type or PgType(self.type_oid, self.typmod, self.type_name, self.type_kind)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Column:
        known = fields.get("type")
        return cls(**{**fields, "type": PgType.from_dict(known) if known else None})


@dataclass(frozen=True)
class Partition:
    """A leaf partition of a partitioned table.

    `had_rows`: it may have held rows when it was attached, which the stream does not send. `relfilenode`:
    negative if the value of an added column in older rows cannot be determined. `xmin`: that of its pg_class
    row, which changes with the file. `links`: xmin of each pg_inherits row between the partitioned table and
    the partition. They change if the partition, or one of its parents, is detached and attached again.
    `relkind` and `persistence` are those of pg_class.
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
class PublicationStatus:
    """The publication status of a relation: the table that has its name now, and how that is published.

    `oid`: that of the relation, or, if it was dropped, of another table with its name, or 0. `moved_to`: its
    new name, if another table now has a former one. The other fields are those of Relation. If what they
    identify is changed and changed back, they do not return to the same values.
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
    def from_dict(cls, fields: dict[str, Any]) -> PublicationStatus:
        partitions = tuple(Partition.from_dict(part) for part in fields.get("partitions", ()))
        moved_to = TableName(**fields["moved_to"]) if fields.get("moved_to") else None
        links = tuple(fields.get("links", ()))
        return cls(**{**fields, "links": links, "partitions": partitions, "moved_to": moved_to})


@dataclass(frozen=True)
class Relation:
    """A table's definition as of a point in time. `columns`: the published ones, in the order of pgoutput.

    - `replica_identity`: pg_class.relreplident (`d`, `n`, `f`, `i`).
    - `is_key` of a column: True if it belongs to the key by which rows are matched in the lake: the identity
      index, or the primary key.
    - `persistence`: pg_class.relpersistence.
    - `xmin`: that of its pg_class row, which changes with the file, if the publication would silently keep
      the table when it is set unlogged; else 0.
    - `links`: of a partition, xmin of each pg_inherits row up to the table through which it is published.
    - `unpublished`: generated columns whose values the stream does not carry.
    - `publication_oid`, `membership_oid`, `membership_xmin`: identify the publication and the table's
      membership. `publication_xmin`: identifies the publication's options.
    - `natts`: pg_class.relnatts, the highest attnum ever assigned.
    - `renamed_to`: the name at the source, if the pipeline follows the table under an earlier one, `table`.

    These fields are set for a lake table only, never from the catalog:

    - `dropped`: columns that the lake table keeps; their values are null after the drop.
    - `ignored`: the attnums of published columns that the lake table leaves out.
    - `truncated_by`: the last transaction that truncated the table according to the stream, and thereby
      recreated the files of its partitions.

    Fields that an older version did not record are 0 or empty, and are not compared.
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
    renamed_to: TableName | None = None

    @property
    def source_table(self) -> TableName:
        """The table's name at the source."""
        return self.renamed_to or self.table

    def followed_as(self, table: TableName) -> Relation:
        """Return the relation under a name of the pipeline, which may differ from that at the source."""
        now = self.source_table
        return replace(self, table=table, renamed_to=None if now == table else now)

    @property
    def files(self) -> dict[int, tuple[int, int]]:
        """The relfilenode, and the xmin that changes with it, of each table whose file is watched, by OID."""
        if self.relkind == "p":
            return {part.oid: (abs(part.relfilenode), part.xmin) for part in self.partitions}
        return {self.oid: (abs(self.relfilenode), self.xmin)} if self.xmin else {}

    @property
    def key_columns(self) -> tuple[Column, ...]:
        return tuple(column for column in self.columns if column.is_key)

    @property
    def names(self) -> tuple[TableName, frozenset[tuple[int, str]]]:
        """The table's name, and the attnum and name of each column, to which settings refer."""
        columns = (*self.columns, *self.unpublished)
        return self.table, frozenset((column.attnum, column.name) for column in columns)

    @property
    def publication_status(self) -> PublicationStatus:
        return PublicationStatus(
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
        """Return canonical JSON: equal relations have equal texts."""
        fields = asdict(self)
        if self.renamed_to is None:
            # The version of a relation stays what it was before there was this field.
            del fields["renamed_to"]
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @classmethod
    @lru_cache(maxsize=4096)
    def from_json(cls, text: str) -> Relation:
        """Parse the text of `to_json`. Raises ValueError, KeyError or TypeError for other text.

        Cached, because the state's records of hundreds of tables are read repeatedly, and rarely change.
        """
        fields: dict[str, Any] = json.loads(text)
        fields["table"] = TableName(**fields["table"])
        if fields.get("renamed_to"):
            fields["renamed_to"] = TableName(**fields["renamed_to"])
        for name in ("columns", "unpublished", "dropped"):
            fields[name] = tuple(Column.from_dict(column) for column in fields.get(name, ()))
        fields["partitions"] = tuple(Partition.from_dict(part) for part in fields.get("partitions", ()))
        for name in ("ignored", "links"):
            fields[name] = tuple(fields.get(name, ()))
        return cls(**fields)

    @cached_property
    def version(self) -> int:
        """A 63-bit hash of the content: the changelog's `relation_version`."""
        return int.from_bytes(hashlib.blake2b(self.to_json().encode(), digest_size=8).digest()) >> 1
