"""Registration of lake tables in Unity Catalog as external tables, over its REST API and without Spark.

Source: toColumnInfo of the server's ColumnUtils.java, which does what Spark's connector does: `type_json` is
the field of the Delta log, `type_text` the type as Spark's catalogs spell it. For changes: api/delta.yaml.

Unlike Hive's metastore, Unity Catalog stores the columns in addition to the location. Outdated columns are
changed with the server's Delta API. A server without that API (older than 0.5) has the table deleted and
created again, which loses the grants on it. Deleting an external table keeps its files (deleteTable of the
server's TableRepository.java), but deleting a managed table would delete them. Therefore only an external
table at the lake table's own location is changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from deltalake.exceptions import DeltaError, TableNotFoundError

from airflow_provider_pgrepl.errors import ConfigError, LakeError
from airflow_provider_pgrepl.replication.delta.table import open_delta
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.storage import storage_error

from .spark_catalog import CatalogEntry, catalog_entries, names_taken
from .unity_client import UnityRequestError, UnityServer

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
# Source: https://docs.unitycatalog.io. The characters that the server allows (ValidationUtils.java), so that
# no name is a path.
_CATALOG = re.compile(r"[A-Za-z0-9_@-]{1,255}")


def unity_columns(schema_json: str, partition_by: Sequence[str] = ()) -> list[Column]:
    """Return the columns of a Delta schema, in order, each in the form that the API accepts."""
    fields = json.loads(schema_json)["fields"]
    return [_column(place, field, partition_by) for place, field in enumerate(fields)]


def differ(ours: Table, theirs: Table) -> bool:
    """Return True if the registered table `theirs` no longer has the columns and comments of `ours`. A
    comment that only the catalog has is not a difference."""
    there = sorted(theirs.get("columns") or [], key=lambda column: int(column.get("position") or 0))
    columns = ours["columns"]
    return _comments_differ(ours, theirs) or len(columns) != len(there) or any(map(_differs, columns, there))


def with_comments(ours: Table, theirs: Table) -> Table:
    """Return `ours` with the comments that only the catalog has: its users wrote them there."""
    written = {one["name"]: _comment(one) for one in theirs.get("columns") or []}
    columns = [written.get(one["name"], {}) | one for one in ours["columns"]]
    return _comment(theirs) | ours | {"columns": columns}


def changes(table_id: str, table: Table) -> dict[str, Any]:
    """Return the request to the server's Delta API that gives the registered table the columns, the partition
    columns and the comment of `table`. It requires that the table's UUID is still `table_id`."""
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
    """Return a type, or a field of one, with the key names of the Delta API. The content of `metadata` is not
    changed."""
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
    # The server stores the type text in lower case, including the names of nested fields.
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


def register_in_unity(pipeline: Pipeline, url: str, catalog: str, token: str | None = None) -> dict[str, str]:
    """Register every table of the newest consistent point, with its current columns, and return the full
    names by location.

    `url`: the server's, such as http://localhost:8080. `catalog`: an existing catalog. Missing schemas are
    created, named as the pipeline's databases. A table that is already registered with these columns is left
    unchanged. Can be run at any time: nothing is written to the lake.

    Raises ConfigError for an address, a catalog name or a token that cannot be used. Raises LakeError if
    there is no consistent point, no such catalog, or a right is missing; LakeUnavailableError if the lake or
    the server cannot be reached. If a name identifies something else, or the server rejects a table, raises
    LakeError after registering all others.
    """
    if not _CATALOG.fullmatch(catalog):
        raise ConfigError(
            f"{catalog!r} cannot be the name of a catalog", "it has ASCII letters, digits and _ @ - alone"
        )
    server, refused = UnityServer(url, token), None
    entries, faults = catalog_entries(pipeline)
    _make_schemas(server, catalog, sorted({entry.database for entry in entries}))
    for entry in entries:
        try:
            faults += _register(server, catalog, entry)
        except UnityRequestError as error:
            refused = error
            faults.append(f"{catalog}.{entry.database}.{entry.table}: {error.message}")
    if faults:
        raise names_taken(faults, refused.hint if refused else "")
    return {entry.uri: f"{catalog}.{entry.database}.{entry.table}" for entry in entries}


def _make_schemas(server: UnityServer, catalog: str, schemas: list[str]) -> None:
    # Never create a catalog: with a mistyped name, the tables would be in another catalog, without any
    # grants.
    if server.find("catalogs", catalog) is None:
        raise LakeError(
            f"Unity Catalog at {server.url} has no catalog {catalog}",
            f"name one that is there, or have its admin make it: bin/uc catalog create --name {catalog}",
        )
    for schema in schemas:
        if server.find("schemas", f"{catalog}.{schema}") is None:
            server.create("schemas", {"name": schema, "catalog_name": catalog})


def _register(server: UnityServer, catalog: str, entry: CatalogEntry) -> list[str]:
    """Register the table, or update its registration if it is outdated. Return a phrase if the lake table no
    longer exists, or if the name identifies something else; otherwise nothing."""
    name = f"{catalog}.{entry.database}.{entry.table}"
    table = _table(catalog, entry)
    if table is None:
        return [f"{name}: there is no lake table any more at {entry.uri}"]
    found = server.find("tables", name)
    if found is not None:
        kind = (found.get("table_type"), found.get("data_source_format"))
        place = str(found.get("storage_location") or "")
        if kind != ("EXTERNAL", "DELTA"):
            return [f"{name} is no external Delta table: {' '.join(map(str, filter(None, kind)))}"]
        if not entry.is_at(place):
            return [f"{name} stands for another place: {place or 'none'}"]
        if differ(table, found):
            _renew(server, name, table, found)
        return []
    server.create("tables", table)
    return []


def _renew(server: UnityServer, name: str, table: dict[str, Any], found: dict[str, Any]) -> None:
    table = with_comments(table, found)
    where = (table["catalog_name"], table["schema_name"], table["name"])
    if server.has_delta_api(table["catalog_name"]):
        server.change(*where, changes(str(found.get("table_id")), table))
    else:
        server.delete("tables", name)
        server.create("tables", table)


def _table(catalog: str, entry: CatalogEntry) -> dict[str, Any] | None:
    """Return the table to register, or None if it was dropped since the consistent point. Raises
    LakeUnavailableError if the lake table cannot be read."""
    try:
        delta = open_delta(entry.uri)
        metadata = delta.metadata()
        columns = unity_columns(delta.schema().to_json(), metadata.partition_columns)
    except TableNotFoundError:
        return None
    except (DeltaError, OSError) as error:
        raise storage_error(f"the lake table {entry.uri} cannot be read", error) from None
    table = {
        "name": entry.table,
        "catalog_name": catalog,
        "schema_name": entry.database,
        "table_type": "EXTERNAL",
        "data_source_format": "DELTA",
        "columns": columns,
        "storage_location": entry.url,
    }
    return table | ({"comment": metadata.description} if metadata.description else {})
