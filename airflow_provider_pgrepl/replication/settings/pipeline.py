"""The configuration of one pipeline: immutable, validated, read from JSON and written to it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.postgres.names import ColumnName, TableName
from airflow_provider_pgrepl.replication.runtime.process_io import read_text
from airflow_provider_pgrepl.replication.settings.checks import check_settings, check_texts
from airflow_provider_pgrepl.replication.settings.lake import canonical, is_object_store
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings, parse_publisher
from airflow_provider_pgrepl.replication.settings.tables import (
    COLUMN_FIELDS,
    POLICIES,
    ColumnChoice,
    Deletes,
    Infinity,
    LakeType,
    Merge,
    NewTables,
    NumericNan,
    OnDrift,
    TableChoices,
    TablePolicy,
    Truncate,
)

_REFERENCE = errors.reference("pipeline")

MIB = 1 << 20
_OF_ALL_COLUMNS = ("infinity", "numeric_nan", "unconstrained_numeric", "timestamp_without_tz")
_BOOKKEEPING = ("commit_lsn_column", "commit_ts_column")
_SHAPING = ("deletes", "history", "partition_by")


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The settings of a pipeline: one source database, one slot, one publication, one lake root.

    Raises ConfigError, naming the field, if a value is invalid.
    """

    name: str
    lake: str
    tables: tuple[str, ...]
    insert_only: tuple[str, ...] = ()
    conn_id: str = "pgrepl_default"
    state_conn_id: str | None = None
    lake_conn_id: str | None = None
    slot: str = ""
    publication: str = ""
    publication_mode: Literal["create", "use"] = "create"
    lake_tables: Literal["all", "none"] = "all"
    types: dict[str, str] = field(default_factory=dict)
    text_columns: tuple[str, ...] = ()
    exclude_columns: tuple[str, ...] = ()
    infinity: Infinity = "error"
    numeric_nan: NumericNan = "error"
    unconstrained_numeric: str = "string"
    timestamp_without_tz: Literal["ntz", "string"] = "ntz"
    truncate: Truncate = "apply"
    deletes: Deletes = "hard"
    history: bool = False
    on_drift: OnDrift = "evolve"
    merge: Merge = "auto"
    freshness_s: float = 1.0
    max_staleness_s: float = 60.0
    write_amplification: float = 20.0
    cluster_by: tuple[str, ...] = ()
    new_tables: NewTables = "add"
    event_trigger: bool = False
    trust_table_owners: bool = False
    protect_source: bool = False
    wal_budget: int | None = None
    on_wal_budget: Literal["alert", "drop_slot"] = "alert"
    per_table: dict[str, Any] = field(default_factory=dict)
    per_column: dict[str, Any] = field(default_factory=dict)
    commit_lsn_column: bool = True
    commit_ts_column: bool = True
    flush_interval_s: float = 1.0
    flush_bytes: int = 64 * MIB
    part_bytes: int = 32 * MIB
    receive_buffer_bytes: int = 64 * MIB
    message_bytes: int = 4 * MIB
    message_prefixes: tuple[str, ...] = ("*",)
    trigger_interval_s: float = 0.0
    batch_bytes: int = 64 * MIB
    slice_bytes: int = 64 * MIB
    changelog_retention_h: float = 168.0
    points_every_s: float = 60.0
    points_keep_all_h: float = 1.0
    points_thin_min: float = 10.0
    points_keep_h: float = 168.0
    points_bytes: float = 1.25
    maintenance_interval_s: float = 600.0
    snapshot_range_bytes: int = 128 * MIB
    lock_timeout_s: float = 10.0
    slot_timeout_s: float = 60.0
    reconnect_s: float = 60.0
    publishers: dict[str, Any] = field(default_factory=dict)
    target_database: str = "{pipeline}"
    target_table: str = "{schema}_{table}"
    target_schemas: dict[str, str] = field(default_factory=dict)
    target_tables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_texts(self)
        for name in ("slot", "publication"):
            if not getattr(self, name):
                object.__setattr__(self, name, f"pgrepl_{self.name}")
        check_settings(self)

    def publisher(self, name: str) -> PublisherSettings:
        """Return the settings of a publisher. Raises ConfigError if there is no publisher of this name."""
        if name not in self.publishers:
            raise ConfigError(
                f"publishers: there is no {name!r}",
                f"the pipeline has {', '.join(self.publishers) or 'no publishers: ' + _REFERENCE}",
            )
        return parse_publisher(self.name, name, self.publishers[name], has_lake_tables=self.has_lake_tables)

    def choices(self, table: TableName) -> TableChoices:
        """Return the settings of a table and its columns."""
        named = {name: self._columns_of(name, table) for name in COLUMN_FIELDS}
        columns = {column for given in named.values() for column in given}
        own: dict[str, Any] = next(
            (given for name, given in self.per_table.items() if TableName.parse(name) == table), {}
        )
        return TableChoices(
            # Only `per_table` can set `partition_by`, so the pipeline has no such attribute.
            TablePolicy(**{name: _frozen(own.get(name, getattr(self, name, None))) for name in POLICIES}),
            {column: self._column_choice(column, named) for column in columns},
            self._column_choice(None, {}),
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

    def _column_choice(self, column: str | None, named: dict[str, dict[str, Any]]) -> ColumnChoice:
        said = {name: given[column] for name, given in named.items() if column in given}
        values: dict[str, Any] = said.get("per_column", {})
        lake_type = "string" if "text_columns" in said else said.get("types")
        return ColumnChoice(
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
                f"lake: {self.lake!r} begins with ~, and whose home that is, this host does not know",
                "give the whole path",
            ) from None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Pipeline:
        """Parse a pipeline file's text. Raises ConfigError, naming the invalid key or value."""
        try:
            fields = json.loads(text, object_pairs_hook=_object)
        except ConfigError:
            raise
        except (ValueError, RecursionError) as error:  # also if digits or nesting exceed Python's limits
            raise ConfigError(
                f"the pipeline file is not JSON that can be read: {error}",
                "correct it there: names and texts are in double quotes, and neither a comment nor a comma"
                " before ] or } is JSON",
            ) from None
        if not isinstance(fields, dict):
            raise ConfigError("the pipeline file must hold one JSON object", _REFERENCE)
        return cls.from_dict(fields)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Pipeline:
        known = {known.name: known for known in dataclasses.fields(cls)}
        if "partition_by" in fields:
            raise ConfigError(
                "partition_by: is said of single tables, in per_table",
                'write "per_table": {"public.orders": {"partition_by": "month(placed_at)"}}',
            )
        unknown = sorted(set(fields) - set(known))
        if unknown:
            raise ConfigError(
                f"unknown key {', '.join(map(repr, unknown))}", errors.known_keys(unknown, known)
            )
        missing = [name for name in ("name", "lake", "tables") if name not in fields]
        if missing:
            raise ConfigError(f"missing key {', '.join(map(repr, missing))}", _REFERENCE)
        values: dict[str, Any] = {key: _frozen(value) for key, value in fields.items()}
        return cls(**values)

    @classmethod
    def read(cls, path: str | Path) -> Pipeline:
        """Read a pipeline file. Raises ConfigError, naming the file."""
        text = read_text("pipeline file", path)
        try:
            return cls.from_json(text)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.message}", error.hint) from None


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Raises ConfigError for a duplicate key.

    Python's parser would silently use the last value of a duplicate key.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        doubled = sorted({key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1})
        raise ConfigError(f"the pipeline file has key {', '.join(map(repr, doubled))} twice in one object")
    return found


def copied_choices(running: Pipeline, config: str | None, table: TableName) -> TableChoices:
    """Return the settings with which a table was copied. Only these of its policy are from then: `deletes`,
    `history`, `partition_by`; the others are the current ones.

    `config`: the pipeline file at that time, as TableRecord stores it. If it is None, because an older
    version copied the table, all settings are the current ones. Raises ConfigError if `config` is invalid.
    """
    now = running.choices(table)
    if config is None:
        return now
    then = Pipeline.from_json(config).choices(table)
    shape = {name: getattr(then.policy, name) for name in _SHAPING}
    return dataclasses.replace(then, policy=dataclasses.replace(now.policy, **shape))


def changed_choices(running: Pipeline, config: str | None, table: TableName) -> list[str]:
    """Return the fields whose settings for a table differ from those with which the table was copied.

    Only settings that apply from a snapshot on are compared. Returns an empty list if `config` is None.
    """
    if config is None:
        return []
    copied = Pipeline.from_json(config)
    now, then = running.choices(table), copied.choices(table)
    named = [name for name in COLUMN_FIELDS if now.named[name] != then.named[name]]
    plain = [
        name for name in (*_OF_ALL_COLUMNS, *_BOOKKEEPING) if getattr(running, name) != getattr(copied, name)
    ]
    policies = [name for name in _SHAPING if getattr(now.policy, name) != getattr(then.policy, name)]
    return [*named, *plain, *policies]
