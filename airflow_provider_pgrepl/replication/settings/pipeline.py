"""A pipeline: its settings, read from a pipeline file and checked. All reading goes through `Pipeline`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.postgres.names import ColumnName, TableName
from airflow_provider_pgrepl.replication.runtime.process_io import read_text
from airflow_provider_pgrepl.replication.settings.checks import CHECKS, check_publishers
from airflow_provider_pgrepl.replication.settings.document import YAML_ENDINGS, read_json, read_yaml
from airflow_provider_pgrepl.replication.settings.lake import canonical, is_object_store
from airflow_provider_pgrepl.replication.settings.mistakes import Fields, check_together, frozen, refuse
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings, parse_publisher
from airflow_provider_pgrepl.replication.settings.sections import (
    TABLE_FIELDS,
    Applying,
    CatalogTemplates,
    LakeLayout,
    PerTable,
    PointsAndMaintenance,
    Publishing,
    Receiving,
    Snapshotting,
    SourceSettings,
)
from airflow_provider_pgrepl.replication.settings.tables import (
    COLUMN_FIELDS,
    SHAPES_COPY,
    ColumnOptions,
    ColumnSettings,
    LakeType,
    TableOptions,
    TablePolicies,
    TablePolicy,
)

_REFERENCE = errors.reference("pipeline")
_SCHEMA = "$schema"
"""The key by which an editor finds the JSON Schema of a file."""


@dataclass(frozen=True, kw_only=True)
class Pipeline(
    SourceSettings,
    LakeLayout,
    ColumnSettings,
    TablePolicies,
    PerTable,
    Receiving,
    Applying,
    PointsAndMaintenance,
    Snapshotting,
    Publishing,
    CatalogTemplates,
):
    """The settings of a pipeline: one source database, one slot, one publication, one lake root.

    Raises ConfigError if a value is invalid. The error names every mistake with its path.
    """

    def __post_init__(self) -> None:
        _check(vars(self))
        for name in ("slot", "publication"):
            if not getattr(self, name):
                object.__setattr__(self, name, f"pgrepl_{self.name}")

    def publisher(self, name: str) -> PublisherSettings:
        """Return the settings of a publisher. Raises ConfigError if there is no publisher of this name."""
        if name not in self.publishers:
            raise ConfigError(
                f"publishers: there is no {name!r}",
                f"the pipeline has {', '.join(self.publishers) or 'no publishers: ' + _REFERENCE}",
            )
        return parse_publisher(self.name, name, self.publishers[name], has_lake_tables=self.has_lake_tables)

    def options(self, table: TableName) -> TableOptions:
        """Return the settings of a table and its columns."""
        named = {name: self._columns_of(name, table) for name in COLUMN_FIELDS}
        columns = {column for given in named.values() for column in given}
        own: dict[str, Any] = next(
            (given for name, given in self.per_table.items() if TableName.parse(name) == table), {}
        )
        # Only `per_table` can set `partition_by`, so the pipeline has no such attribute.
        policies = {name: own.get(name, getattr(self, name, None)) for name in TABLE_FIELDS.fields}
        return TableOptions(
            TablePolicy(**frozen(policies)),
            {column: self._column_options(column, named) for column in columns},
            self._column_options(None, {}),
            named,
            self.commit_lsn_column,
            self.commit_ts_column,
        )

    def _columns_of(self, field: str, table: TableName) -> dict[str, Any]:
        """Return the values of a field by column, for the columns of one table; True for a list's columns."""
        given = getattr(self, field)
        names = ((ColumnName.parse(name), name) for name in given)
        return {
            column.name: given[name] if isinstance(given, dict) else True
            for column, name in names
            if column.table == table
        }

    def _column_options(self, column: str | None, named: dict[str, dict[str, Any]]) -> ColumnOptions:
        said = {name: given[column] for name, given in named.items() if column in given}
        values: dict[str, Any] = said.get("per_column", {})
        lake_type = "string" if "text_columns" in said else said.get("types")
        return ColumnOptions(
            lake_type=LakeType.parse(lake_type) if lake_type else None,
            excluded="exclude_columns" in said,
            infinity=values.get("infinity", self.infinity),
            numeric_nan=values.get("numeric_nan", self.numeric_nan),
            unconstrained_numeric=LakeType.parse(self.unconstrained_numeric),
            timestamp_without_tz=self.timestamp_without_tz,
        )

    @property
    def has_lake_tables(self) -> bool:
        """True if changes are applied to lake tables; otherwise they are only written to the changelog."""
        return self.lake_tables == "all"

    @property
    def used_publication(self) -> str:
        """The publication if `publication_mode` is `use`, that is, if it was created elsewhere; else ""."""
        return self.publication if self.publication_mode == "use" else ""

    @property
    def lake_root(self) -> str:
        """The lake's absolute path, or its URI in a store, without a trailing slash.

        Raises ConfigError if the path begins with `~` and this host does not know that home directory.
        """
        if is_object_store(self.lake):
            return canonical(self.lake)
        try:
            return str(Path(self.lake).expanduser().absolute())
        except RuntimeError:
            raise ConfigError(
                f"lake: this host does not know the home directory at the start of {self.lake!r}",
                "give the absolute path",
            ) from None

    def to_json(self) -> str:
        """Return the text of a pipeline file with all settings."""
        return json.dumps({name: getattr(self, name) for name in PIPELINE_FIELDS.fields}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Pipeline:
        """Read the text of a JSON pipeline file. Raises ConfigError, naming every mistake."""
        return cls.from_dict(read_json(text))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Pipeline:
        """Return a pipeline with the settings of a file. Raises ConfigError, naming every mistake."""
        given = frozen({name: value for name, value in fields.items() if name != _SCHEMA})
        _check(given)
        return cls(**given)

    @classmethod
    def read(cls, path: str | Path) -> Pipeline:
        """Read a pipeline file, JSON or, by its ending, YAML. Raises ConfigError, naming the file."""
        text = read_text("pipeline file", path)
        try:
            return cls.from_dict((read_yaml if Path(path).suffix in YAML_ENDINGS else read_json)(text))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.message}", error.hint) from None


PIPELINE_FIELDS = Fields(
    Pipeline,
    "pipeline",
    misplaced={
        "partition_by": "it is set for single tables, in per_table:"
        ' "per_table": {"public.orders": {"partition_by": "month(placed_at)"}}'
    },
)
"""The settings of a pipeline file."""


def _check(given: Mapping[str, Any]) -> None:
    """Raise ConfigError with every mistake of a pipeline's settings."""
    values = {**PIPELINE_FIELDS.defaults, **given}
    found = check_together(values, list(PIPELINE_FIELDS.mistakes(given)), CHECKS)
    if isinstance(values["publishers"], dict):
        # A publisher with a mistake is compared, too, because a mistake concerns one of its settings only.
        others = [mistake for mistake in found if mistake.path[0] != "publishers"]
        found += check_together(values, others, (check_publishers,))
    refuse(found)


def _shaping(hints: Mapping[str, Any]) -> list[str]:
    """Return the settings that apply from a table's next snapshot on."""
    return [name for name, hint in hints.items() if any(one is SHAPES_COPY for one in get_args(hint))]


def copied_options(running: Pipeline, config: str | None, table: TableName) -> TableOptions:
    """Return the settings with which a table was copied. Only these of its policy are from then: `deletes`,
    `history`, `partition_by`; the others are the current ones.

    `config`: the pipeline file at that time, as TableRecord stores it. If it is None, because an older
    version copied the table, all settings are the current ones. Raises ConfigError if `config` is invalid.
    """
    now = running.options(table)
    if config is None:
        return now
    then = Pipeline.from_json(config).options(table)
    shape = {name: getattr(then.policy, name) for name in _shaping(TABLE_FIELDS.hints)}
    return dataclasses.replace(then, policy=dataclasses.replace(now.policy, **shape))


def changed_options(running: Pipeline, config: str | None, table: TableName) -> list[str]:
    """Return the fields whose settings for a table differ from those with which the table was copied.

    Only settings that apply from a snapshot on are compared. Returns an empty list if `config` is None.
    """
    if config is None:
        return []
    copied = Pipeline.from_json(config)
    now, then = running.options(table), copied.options(table)
    policies = _shaping(TABLE_FIELDS.hints)
    plain = [name for name in _shaping(PIPELINE_FIELDS.hints) if name not in policies]
    return [
        *(name for name in COLUMN_FIELDS if now.named[name] != then.named[name]),
        *(name for name in plain if getattr(running, name) != getattr(copied, name)),
        *(name for name in policies if getattr(now.policy, name) != getattr(then.policy, name)),
    ]
