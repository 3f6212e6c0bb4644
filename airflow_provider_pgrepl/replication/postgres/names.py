"""TableName, ColumnName, and identifiers as SQL and people write them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote

_PLAIN_IDENTIFIER = re.compile(r"[a-z_][a-z0-9_]*")
_PART = re.compile(r'([Uu]&)?"((?:[^"]|"")+)"|([^".]+)')
_ESCAPED = re.compile(r"\\(?:(\\)|([0-9a-fA-F]{4})|\+([0-9a-fA-F]{6}))")


def quote_literal(text: str) -> str:
    """Return `text` as a string constant of SQL, for statements that people run."""
    return "'" + text.replace("'", "''") + "'"


def quote_identifier(name: str) -> str:
    """Quote a name for SQL. Always quotes, so reserved words need no list."""
    return '"' + name.replace('"', '""') + '"'


def show_identifier(name: str) -> str:
    """A name as people write it: quoted only where it must be, and with what cannot be shown escaped, as
    PostgreSQL reads it: `U&"two\\000Alines"`."""
    if _PLAIN_IDENTIFIER.fullmatch(name):
        return name
    return quote_identifier(name) if name.isprintable() else _escaped_identifier(name)


def _escaped_identifier(name: str) -> str:
    shown = (letter if letter.isprintable() else _unicode(letter) for letter in name.replace("\\", "\\\\"))
    return "U&" + quote_identifier("".join(shown))


def _unicode(letter: str) -> str:
    code = ord(letter)
    return f"\\{code:04X}" if code < 1 << 16 else f"\\+{code:06X}"


def _unescaped(name: str) -> str:
    return _ESCAPED.sub(lambda found: found[1] or chr(int(found[2] or found[3], 16)), name)


@dataclass(frozen=True, order=True)
class TableName:
    """A schema-qualified table name; `str()` gives the key used in lake, state and messages."""

    schema: str
    name: str

    @classmethod
    def parse(cls, text: str) -> TableName:
        """Read `public.orders` or `"My Schema"."a.b"`. Raises ValueError."""
        parts = _parse_name(text)
        if len(parts) != 2:
            raise ValueError(f"{text!r} is not a schema-qualified table name (expected like public.orders)")
        return cls(*parts)

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


@dataclass(frozen=True, order=True)
class ColumnName:
    """A column of a schema-qualified table, as configurations name it."""

    table: TableName
    name: str

    @classmethod
    def parse(cls, text: str) -> ColumnName:
        """Read `public.orders.placed_at` or `"My Schema"."a.b"."c d"`. Raises ValueError."""
        parts = _parse_name(text)
        if len(parts) != 3:
            raise ValueError(f"{text!r} is not a column's full name (expected like public.orders.placed_at)")
        return cls(TableName(*parts[:2]), parts[2])

    def __str__(self) -> str:
        return f"{self.table}.{show_identifier(self.name)}"


def _parse_name(text: str) -> list[str]:
    """The parts of a dotted name, unquoted; empty when it is none."""
    parts: list[str] = []
    at = 0
    while match := _PART.match(text, at):
        escaped, quoted, plain = match.groups()
        name = quoted.replace('""', '"') if quoted else plain
        parts.append(_unescaped(name) if escaped else name)
        at = match.end() + 1
        if match.end() == len(text):
            return parts
        if text[match.end()] != ".":
            break
    return []


def _path_segment(name: str) -> str:
    text = quote(name, safe="").replace("~", "~7E").replace("%", "~")
    return f"~{ord(text[0]):02X}{text[1:]}" if text[0] in "._" else text
