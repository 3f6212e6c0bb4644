"""Names of tables and columns, and identifiers in the notation of SQL and of messages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote

_PLAIN_IDENTIFIER = re.compile(r"[a-z_][a-z0-9_]*")
_PART = re.compile(r'([Uu]&)?"((?:[^"]|"")+)"|([^".]+)')
_ESCAPED = re.compile(r"\\(?:(\\)|([0-9a-fA-F]{4})|\+([0-9a-fA-F]{6}))")


def quote_literal(text: str) -> str:
    """Return `text` as a string constant of SQL, for statements that a user runs."""
    return "'" + text.replace("'", "''") + "'"


def quote_identifier(name: str) -> str:
    """Quote a name for SQL. Always quotes, so that no list of reserved words is needed."""
    return '"' + name.replace('"', '""') + '"'


def show_identifier(name: str) -> str:
    """Return a name for messages: quoted only if necessary.

    Unprintable characters are escaped in PostgreSQL's notation: `U&"two\\000Alines"`.
    """
    return name if _PLAIN_IDENTIFIER.fullmatch(name) else show_quoted(name)


def show_quoted(name: str) -> str:
    """Return a name for a statement in a message: always quoted, without line breaks.

    Unprintable characters are escaped as by `show_identifier`.
    """
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
    """A schema-qualified table name. `str()` returns the key used in the lake, the state and messages."""

    schema: str
    name: str

    @classmethod
    def parse(cls, text: str) -> TableName:
        """Parse `public.orders` or `"My Schema"."a.b"`. Raises ValueError."""
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
        """The table's path under the lake root, `<schema>/<table>`, in ASCII characters without escaping.

        Characters other than letters, digits, `_`, `-` and `.` are encoded as `~` and two hexadecimal digits
        for each byte of their UTF-8. `%` is not used, because Delta readers do not always decode it. A
        leading underscore or dot is also encoded, so that no schema collides with `_pgrepl`.
        """
        return f"{_path_segment(self.schema)}/{_path_segment(self.name)}"


@dataclass(frozen=True, order=True)
class ColumnName:
    """A column of a schema-qualified table, as a pipeline file names it."""

    table: TableName
    name: str

    @classmethod
    def parse(cls, text: str) -> ColumnName:
        """Parse `public.orders.placed_at` or `"My Schema"."a.b"."c d"`. Raises ValueError."""
        parts = _parse_name(text)
        if len(parts) != 3:
            raise ValueError(f"{text!r} is not a column's full name (expected like public.orders.placed_at)")
        return cls(TableName(*parts[:2]), parts[2])

    def __str__(self) -> str:
        return f"{self.table}.{show_identifier(self.name)}"


def _parse_name(text: str) -> list[str]:
    """Return the parts of a dotted name, unquoted; an empty list if the text is not a name."""
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
