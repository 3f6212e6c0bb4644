"""What a lake table is called in a catalog of tables (Hive's metastore, Glue, Unity Catalog). Pure.

There is one name per database and table, in small letters, digits and `_`: what all of them take.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from string import Formatter

from airflow_provider_pgrepl.replication.postgres.names import TableName

_FIELDS = ("pipeline", "schema", "table")
_OTHERS = re.compile(r"[^a-z0-9_]")


@dataclass(frozen=True)
class CatalogNames:
    """A pipeline's templates, with `{pipeline}`, `{schema}` and `{table}`.

    `schemas`: other names of some schemas in them. `tables`: the names of some tables, whatever the template.
    """

    pipeline: str
    database: str
    table: str
    schemas: Mapping[str, str]
    tables: Mapping[TableName, str]

    def of(self, table: TableName, ending: str = "") -> tuple[str, str]:
        """Database and table. `ending`: of what belongs to the table, as its history."""
        told = {
            "pipeline": self.pipeline,
            "schema": self.schemas.get(table.schema, table.schema),
            "table": table.name,
        }
        name = self.tables.get(table) or self.table.format(**told)
        return _plain(self.database.format(**told)), _plain(name + ending)


def faults_of_names(
    database: str, table: str, schemas: Mapping[str, object], tables: Mapping[str, object]
) -> Iterator[tuple[str, str | None, str]]:
    """What cannot be used of a pipeline's settings: the setting, its key where it has some, and why."""
    for setting, text, needed in (("target_database", database, ""), ("target_table", table, "table")):
        if fault := _fault_of_template(text, needed):
            yield setting, None, fault
    for setting, given in (("target_schemas", schemas), ("target_tables", tables)):
        for named, name in given.items():
            if not isinstance(name, str) or not name:
                yield setting, named, "its name must be a string, and not an empty one"


def _fault_of_template(text: str, needed: str) -> str:
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
    """Letters of other scripts by their numbers, or names of them would all look alike."""
    return _OTHERS.sub(_replaced, name.lower()) or "_"


def _replaced(found: re.Match[str]) -> str:
    letter = found[0]
    return "_" if letter.isascii() else f"u{ord(letter):04x}"
