"""A Delta table's columns as Unity Catalog writes them down. Pure.

Source: toColumnInfo of the server's ColumnUtils.java, which does as Spark's connector to it: `type_json` is
the field of the Delta log, `type_text` the type as Spark's catalogs spell it; and api/delta.yaml for changes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Field = Mapping[str, Any]
Column = dict[str, Any]
Table = dict[str, Any]

_TYPE_NAMES = {"integer": "INT"}
_TYPE_TEXTS = {"long": "bigint", "integer": "int", "short": "smallint", "byte": "tinyint"}
_KEBAB = {
    "elementType": "element-type",
    "containsNull": "contains-null",
    "keyType": "key-type",
    "valueType": "value-type",
    "valueContainsNull": "value-contains-null",
}
_SAME = ("name", "nullable", "partition_index")


def unity_columns(schema_json: str, partition_by: Sequence[str] = ()) -> list[Column]:
    """The columns of a Delta schema, in order, each with what the API takes."""
    fields = json.loads(schema_json)["fields"]
    return [_column(place, field, partition_by) for place, field in enumerate(fields)]


def differ(ours: Table, theirs: Table) -> bool:
    """Whether what is registered is not true any more. A comment that only the catalog has is no
    difference."""
    there = sorted(theirs.get("columns") or [], key=lambda column: int(column.get("position") or 0))
    columns = ours["columns"]
    return _comments_differ(ours, theirs) or len(columns) != len(there) or any(map(_differs, columns, there))


def with_comments(ours: Table, theirs: Table) -> Table:
    """Ours, with the comments that only the catalog has: who reads there has written them."""
    written = {one["name"]: _comment(one) for one in theirs.get("columns") or []}
    columns = [written.get(one["name"], {}) | one for one in ours["columns"]]
    return _comment(theirs) | ours | {"columns": columns}


def changes(table_id: str, table: Table) -> dict[str, Any]:
    """What makes it be registered so, as the server's Delta API takes it."""
    columns = table["columns"]
    parts = sorted(
        (one for one in columns if "partition_index" in one), key=lambda one: one["partition_index"]
    )
    fields = [_field(one) for one in columns]
    return {
        "requirements": [{"type": "assert-table-uuid", "uuid": table_id}],
        "updates": [
            {"action": "set-columns", "columns": {"type": "struct", "fields": fields}},
            {"action": "set-partition-columns", "partition-columns": [one["name"] for one in parts]},
            *({"action": "set-table-comment"} | comment for comment in [_comment(table)] if comment),
        ],
    }


def _field(column: Column) -> Column:
    field = _kebab(json.loads(column["type_json"]))
    return {**field, "metadata": field["metadata"] | _comment(column)}


def _comment(one: Table | Column) -> dict[str, Any]:
    return {"comment": one["comment"]} if one.get("comment") else {}


def _comments_differ(ours: Table | Column, theirs: Table | Column) -> bool:
    return "comment" in ours and ours["comment"] != theirs.get("comment")


def _kebab(kind: Any) -> Any:
    """A type, or a field of one, by the names of the Delta API. What is in `metadata` has none of them."""
    if isinstance(kind, list):
        return [_kebab(one) for one in kind]
    if not isinstance(kind, dict):
        return kind
    return {
        _KEBAB.get(key, key): value if key == "metadata" else _kebab(value) for key, value in kind.items()
    }


def _differs(ours: Column, theirs: Column) -> bool:
    if any(ours.get(key) != theirs.get(key) for key in _SAME):
        return True
    # The server keeps it in small letters, names of nested fields, too.
    if str(ours["type_text"]).lower() != str(theirs.get("type_text")).lower():
        return True
    return _comments_differ(ours, theirs)


def _column(place: int, field: Field, partition_by: Sequence[str]) -> Column:
    kind, name = field["type"], field["name"]
    column = {
        "name": name,
        "position": place,
        "type_name": _type_name(kind),
        "type_text": _type_text(kind),
        "type_json": json.dumps(field),
        "nullable": field["nullable"],
    }
    if _is_decimal(kind):
        precision, scale = kind.removeprefix("decimal(").removesuffix(")").split(",")
        column |= {"type_precision": int(precision), "type_scale": int(scale)}
    column |= _comment(field["metadata"])
    if name in partition_by:
        column["partition_index"] = partition_by.index(name)
    return column


def _type_name(kind: str | Field) -> str:
    if isinstance(kind, Mapping):
        return str(kind["type"]).upper()
    return "DECIMAL" if _is_decimal(kind) else _TYPE_NAMES.get(kind, kind.upper())


def _type_text(kind: str | Field) -> str:
    if not isinstance(kind, Mapping):
        return _TYPE_TEXTS.get(kind, kind)
    if kind["type"] == "array":
        return f"array<{_type_text(kind['elementType'])}>"
    if kind["type"] == "map":
        return f"map<{_type_text(kind['keyType'])},{_type_text(kind['valueType'])}>"
    fields = (f"{field['name']}:{_type_text(field['type'])}" for field in kind["fields"])
    return f"struct<{','.join(fields)}>"


def _is_decimal(kind: str | Field) -> bool:
    return isinstance(kind, str) and kind.startswith("decimal(")
