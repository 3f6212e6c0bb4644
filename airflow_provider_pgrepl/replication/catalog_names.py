"""What a lake table is called in a catalog of tables (Hive's metastore, Glue, Unity Catalog). Pure.

There is one name per database and table, in small letters, digits and `_`: what all of them take.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from string import Formatter

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.names import TableName

_FIELDS = ("pipeline", "schema", "table")
_OTHERS = re.compile(r"[^a-z0-9_]+")


@dataclass(frozen=True)
class CatalogNames:
    """A pipeline's templates, with `{pipeline}`, `{schema}` and `{table}`; `schemas`: other names of some."""

    pipeline: str
    database: str
    table: str
    schemas: Mapping[str, str]

    def of(self, table: TableName) -> tuple[str, str]:
        """Database and table."""
        told = {
            "pipeline": self.pipeline,
            "schema": self.schemas.get(table.schema, table.schema),
            "table": table.name,
        }
        return _plain(self.database.format(**told)), _plain(self.table.format(**told))

    def of_all(self, tables: Iterable[TableName]) -> dict[TableName, tuple[str, str]]:
        """Raises ConfigError when two tables would get one name."""
        found = {table: self.of(table) for table in tables}
        owners = defaultdict(list)
        for table, name in found.items():
            owners[name].append(str(table))
        doubles = [" and ".join(owner) for owner in owners.values() if len(owner) > 1]
        if doubles:
            raise ConfigError(
                f"target_table: these tables would get one name: {'; '.join(doubles)}",
                "have target_database or target_table tell them apart, or give a schema another name in"
                " target_schemas",
            )
        return found


def fault_of_template(text: str, needed: str = "") -> str:
    """What is wrong with a template, in words; empty when it can be used."""
    try:
        parts = list(Formatter().parse(text))
    except ValueError as error:
        return f"{text!r} is no template: {error}"
    fields = [field for _, field, spec, conversion in parts if field is not None]
    unknown = [field for field in fields if field not in _FIELDS]
    if unknown:
        return f"{text!r} has {{{unknown[0]}}}; there are {', '.join(f'{{{name}}}' for name in _FIELDS)}"
    if any(spec or conversion for _, _, spec, conversion in parts):
        return f"{text!r} has a format, which names need not"
    if needed and needed not in fields:
        return f"{text!r} lacks {{{needed}}}, without which all tables would have one name"
    return ""


def _plain(name: str) -> str:
    return _OTHERS.sub("_", name.lower()) or "_"
