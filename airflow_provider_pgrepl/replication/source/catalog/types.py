"""Types from pg_catalog, with all types that they consist of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from airflow_provider_pgrepl.replication.postgres.relation import MOST_LEVELS, MOST_PARTS, TOO_LARGE, PgType
from airflow_provider_pgrepl.replication.source.connection import Connection, rows

# Plain reads, like those of relations.py: they see the transaction's snapshot.
PARTS = """
WITH RECURSIVE wanted (oid) AS (
    SELECT pg_catalog.unnest(%(oids)s::oid[])
    UNION
    SELECT part.oid FROM wanted JOIN pg_catalog.pg_type t ON t.oid = wanted.oid, LATERAL (
        SELECT t.typelem WHERE t.typelem <> 0
            AND t.typsubscript = 'pg_catalog.array_subscript_handler'::regproc
        UNION ALL SELECT t.typbasetype WHERE t.typtype = 'd'
        UNION ALL SELECT a.atttypid FROM pg_catalog.pg_attribute a
            WHERE t.typtype = 'c' AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
        UNION ALL SELECT r.rngsubtype FROM pg_catalog.pg_range r WHERE r.rngtypid = t.oid
        UNION ALL SELECT r.rngtypid FROM pg_catalog.pg_range r WHERE r.rngmultitypid = t.oid
    ) AS part (oid)
)
"""

TYPES = """
SELECT t.oid::bigint, t.typname::text, t.typtype::text, t.typdelim::text, t.typelem::bigint,
    t.typelem <> 0 AND t.typsubscript = 'pg_catalog.array_subscript_handler'::regproc,
    t.typbasetype::bigint, t.typtypmod, coalesce(r.rngsubtype, m.rngtypid, 0)::bigint,
    coalesce((SELECT e.extname::text FROM pg_catalog.pg_depend d JOIN pg_catalog.pg_extension e
        ON e.oid = d.refobjid WHERE d.classid = 'pg_catalog.pg_type'::regclass AND d.objid = t.oid
        AND d.refclassid = 'pg_catalog.pg_extension'::regclass AND d.deptype = 'e'), '')
FROM wanted JOIN pg_catalog.pg_type t ON t.oid = wanted.oid
    LEFT JOIN pg_catalog.pg_range r ON r.rngtypid = t.oid
    LEFT JOIN pg_catalog.pg_range m ON m.rngmultitypid = t.oid
"""

FIELDS = """
SELECT t.oid::bigint, a.attname::text, a.atttypid::bigint, a.atttypmod
FROM wanted JOIN pg_catalog.pg_type t ON t.oid = wanted.oid
    JOIN pg_catalog.pg_attribute a ON a.attrelid = t.typrelid
WHERE t.typtype = 'c' AND a.attnum > 0 AND NOT a.attisdropped ORDER BY t.oid, a.attnum
"""

LABELS = """
SELECT e.enumtypid::bigint, e.oid::bigint, e.enumlabel::text
FROM pg_catalog.pg_enum e WHERE e.enumtypid = ANY (%(enums)s::oid[]) ORDER BY e.enumtypid, e.enumsortorder
"""

_FIRST_OWN_OID = 16384
"""The types below this oid exist in every database."""

_ENDLESS = MOST_PARTS + 1


@dataclass
class TypePartBudget:
    """The number of parts that the types of a table's columns may still have."""

    left: int = MOST_PARTS


@dataclass(frozen=True)
class _Size:
    """The size of a type with all its parts. Numbers beyond the limits are capped."""

    levels: int
    parts: int
    has_row: bool


_NO_END = _Size(_ENDLESS, _ENDLESS, True)


@dataclass
class Types:
    """The rows of pg_type that some columns need."""

    _types: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    _fields: dict[int, list[tuple[str, int, int]]] = field(default_factory=lambda: defaultdict(list))
    _labels: dict[int, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    _sizes: dict[int, _Size] = field(default_factory=dict)

    @classmethod
    def read(cls, connection: Connection, oids: Iterable[int]) -> Types:
        """Read these types, and all types that they consist of. Raises psycopg2's errors."""
        wanted = {"oids": sorted(set(oids))}
        types = cls({oid: tuple(more) for oid, *more in rows(connection, PARTS + TYPES, wanted)})
        for oid, *of_field in rows(connection, PARTS + FIELDS, wanted):
            types._fields[oid].append(tuple(of_field))
        enums = [oid for oid, (_, kind, *_) in types._types.items() if kind == "e"]
        for oid, *label in rows(connection, LABELS, {"enums": enums}) if enums else ():
            types._labels[oid].append(tuple(label))
        for oid in types._types:
            types._measure(oid)
        return types

    def with_rows(self) -> list[int]:
        """Return the oids of the row types, and of the types that contain row types."""
        return sorted(oid for oid, size in self._sizes.items() if size.has_row)

    def find(self, oid: int, typmod: int, room: TypePartBudget) -> PgType | None:
        """Return the type, or None for a built-in scalar, which oid and typmod describe completely.

        If `room` has too few parts left, return a type of kind TOO_LARGE without parts.
        """
        size = self._sizes[oid]
        if size.levels > MOST_LEVELS or size.parts > room.left:
            name, *_ = self._types[oid]
            return PgType(oid, typmod, name, TOO_LARGE)
        room.left -= size.parts
        found = self._build(oid, typmod)
        is_plain = found.kind == "b" and not found.extension and oid < _FIRST_OWN_OID
        return None if is_plain else found

    def _measure(self, oid: int) -> None:
        """Compute the size of a type and of its parts, without recursion and each type once.

        Some types are nested deeper than Python's stack, some contain the same type many times, and a message
        may hold a type that contains itself.
        """
        path, on_path = [oid], {oid}
        while path:
            top = path[-1]
            parts = self._parts(top)
            unknown = next((part for part in parts if part not in self._sizes), None)
            if unknown is not None and unknown not in on_path:
                path.append(unknown)
                on_path.add(unknown)
                continue
            self._sizes[top] = _NO_END if unknown is not None else self._size(top, parts)
            on_path.discard(path.pop())

    def _size(self, oid: int, parts: list[int]) -> _Size:
        sizes = [self._sizes[part] for part in parts]
        kind, labels = self._types[oid][1], len(self._labels.get(oid, ()))
        return _Size(
            min(_ENDLESS, 1 + max((size.levels for size in sizes), default=0)),
            min(_ENDLESS, 1 + labels + sum(size.parts for size in sizes)),
            kind == "c" or any(size.has_row for size in sizes),
        )

    def _parts(self, oid: int) -> list[int]:
        """Return the oids of the types that a type directly consists of, in order."""
        _, kind, _, element, is_array, base, _, subtype, _ = self._types[oid]
        if is_array:
            return [element]
        if kind == "c":
            return [part for _, part, _ in self._fields[oid]]
        return {"d": [base], "r": [subtype], "m": [subtype]}.get(kind, [])

    def _build(self, oid: int, typmod: int) -> PgType:
        name, kind, delimiter, element, is_array, base, base_typmod, subtype, extension = self._types[oid]
        parts: tuple[tuple[str, PgType], ...] = ()
        if is_array:
            # An array's typmod applies to its elements.
            kind, parts = "a", (("element", self._build(element, typmod)),)
        elif kind == "d":
            parts = (("base", self._build(base, base_typmod)),)
        elif kind == "c":
            parts = tuple((field, self._build(*of_field)) for field, *of_field in self._fields[oid])
        elif kind in ("r", "m"):
            parts = (("subtype" if kind == "r" else "range", self._build(subtype, -1)),)
        return PgType(oid, typmod, name, kind, delimiter, extension, parts, tuple(self._labels.get(oid, ())))
