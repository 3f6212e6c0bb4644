"""TableName, Column, Relation: what a table is at one moment of the source."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any
from urllib.parse import quote

_PLAIN_IDENTIFIER = re.compile(r"[a-z_][a-z0-9_]*")
_QUOTED_NAME = re.compile(r'(?:"((?:[^"]|"")+)"|([^".]+))\.(?:"((?:[^"]|"")+)"|([^".]+))')


def quote_identifier(name: str) -> str:
    """Quote a name for SQL. Always quotes, so reserved words need no list."""
    return '"' + name.replace('"', '""') + '"'


def show_identifier(name: str) -> str:
    """A name as people write it: quoted only where it must be."""
    return name if _PLAIN_IDENTIFIER.fullmatch(name) else quote_identifier(name)


@dataclass(frozen=True, order=True)
class TableName:
    """A schema-qualified table name; `str()` gives the key used in lake, state and messages."""

    schema: str
    name: str

    @classmethod
    def parse(cls, text: str) -> TableName:
        """Read `public.orders` or `"My Schema"."a.b"`. Raises ValueError."""
        match = _QUOTED_NAME.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a schema-qualified table name (expected like public.orders)")
        schema, name = match[1] or match[2], match[3] or match[4]
        return cls(
            schema.replace('""', '"') if match[1] else schema, name.replace('""', '"') if match[3] else name
        )

    def __str__(self) -> str:
        return f"{show_identifier(self.schema)}.{show_identifier(self.name)}"

    @property
    def sql(self) -> str:
        """The name, quoted for SQL."""
        return f"{quote_identifier(self.schema)}.{quote_identifier(self.name)}"

    @property
    def path(self) -> str:
        """The table's place under the lake root: `<schema>/<table>`, in ASCII letters that need no care.

        Anything but letters, digits, `_`, `-` and `.` is written as `~` and two hexadecimal digits for each
        byte of its UTF-8. Not `%`: Delta's readers decode that in some places and not in others. A leading
        underscore or dot is encoded as well, so that no schema can meet `_pgrepl`.
        """
        return f"{_path_segment(self.schema)}/{_path_segment(self.name)}"


def _path_segment(name: str) -> str:
    text = quote(name, safe="").replace("~", "~7E").replace("%", "~")
    return f"~{ord(text[0]):02X}{text[1:]}" if text[0] in "._" else text


@dataclass(frozen=True)
class Column:
    """One column as pg_catalog has it.

    `type_name` is `format_type(type_oid, typmod)`, as `numeric(12,2)`; `type_kind` is pg_type.typtype
    (`b` base, `e` enum, `d` domain, …); `xmin` is that of its pg_attribute row, which moves with each ALTER.
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


@dataclass(frozen=True)
class Relation:
    """A table's definition at one moment: published columns in the order in which pgoutput sends them.

    `replica_identity` is pg_class.relreplident (`d`, `n`, `f`, `i`); `is_key` of a column says that it
    belongs to the key by which rows are matched in the lake: the identity index, or the primary key.
    `publication_oid`, `membership_oid` and `membership_xmin` pin the publication and the table's place in it.
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

    @property
    def key_columns(self) -> tuple[Column, ...]:
        return tuple(column for column in self.columns if column.is_key)

    def to_json(self) -> str:
        """Canonical JSON: equal relations give equal text."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Relation:
        """Raises ValueError or TypeError on anything but `to_json`'s text."""
        fields: dict[str, Any] = json.loads(text)
        fields["table"] = TableName(**fields["table"])
        fields["columns"] = tuple(Column(**column) for column in fields["columns"])
        return cls(**fields)

    @cached_property
    def version(self) -> int:
        """63-bit hash of the content: the changelog's `relation_version`."""
        return int.from_bytes(hashlib.blake2b(self.to_json().encode(), digest_size=8).digest()) >> 1
