"""Types of a copy that would take a value, and keep less of it: PostgreSQL rounds and cuts without a word."""

from __future__ import annotations

import re

_INTEGERS = frozenset({"smallint", "integer", "bigint", "int2", "int4", "int8"})
_FLOATS = frozenset({"real", "double precision", "float4", "float8"})
_MOMENTS = ("timestamp", "time")
_SIZED = re.compile(r"(?P<name>[a-z0-9 _\"]+?)(\((?P<first>\d+)(,(?P<second>-?\d+))?\))?(?P<zone> with.*)?")


def keeps_less(source: str, target: str) -> bool:
    """Whether a column of type `target` may keep less of a value than what one of `source` has. Both as SQL
    writes them: `pg_catalog."numeric"(10,2)`, `timestamp(0) with time zone`."""
    (name, size, scale, zone), (of, limit, to, to_zone) = _parts(source), _parts(target)
    if of in _INTEGERS:
        return name == "numeric" or name in _FLOATS
    if of == "numeric" and limit is not None:
        return name in _FLOATS or (name == "numeric" and (scale is None or (to or 0) < scale))
    if of in ("real", "float4"):
        return name == "numeric" or name in ("double precision", "float8")
    if of in ("double precision", "float8"):
        return name == "numeric"
    if of == "date":
        return name.startswith("timestamp")
    if of.startswith(_MOMENTS):
        is_moment = name.startswith(_MOMENTS)
        return is_moment and ((limit is not None and size is None) or of[:5] != name[:5] or zone != to_zone)
    return False


def _parts(text: str) -> tuple[str, int | None, int | None, bool]:
    """Name, length or precision, scale, and whether a moment has a zone."""
    found = _SIZED.fullmatch(text.replace("pg_catalog.", "").replace('"', "").lower())
    if found is None:
        return text, None, None, False
    first, second = (None if found[key] is None else int(found[key]) for key in ("first", "second"))
    name = found["name"]
    has_zone = name.endswith("tz") or (found["zone"] or "").startswith(" with time zone")
    scale = (second or 0) if first is not None else None
    return _SHORT.get(name, name).removesuffix("tz"), first, scale, has_zone


_SHORT = {"decimal": "numeric", "timestamp without time zone": "timestamp"}
