"""A pipeline: its settings, read from the text of a pipeline file, JSON or YAML, and checked.

All reading goes through `Pipeline`. Ambiguous values of YAML are rejected.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from airflow_provider_pgrepl.errors import ConfigError, reference
from airflow_provider_pgrepl.replication.postgres.names import ColumnName, TableName
from airflow_provider_pgrepl.replication.runtime.process_io import read_text

from .lake import canonical, is_object_store
from .mistakes import Check, Fields, Mistake, check_together, frozen, refuse
from .publisher import PublisherSettings, parse_publisher, read_publisher
from .sections import (
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
from .tables import (
    COLUMN_FIELDS,
    SHAPES_COPY,
    ColumnOptions,
    ColumnSettings,
    LakeType,
    TableOptions,
    TablePolicies,
    TablePolicy,
)

if TYPE_CHECKING:
    from yaml import Node, SafeLoader

_REFERENCE = reference("pipeline")
_SCHEMA = "$schema"
"""The key by which an editor finds the JSON Schema of a file."""
_YAML_ENDINGS = (".yaml", ".yml")
_JSON_HINT = (
    "correct it there: names and texts are in double quotes, and neither a comment nor a comma before ] or }"
    " is JSON"
)
_YAML_HINT = "correct it there: indent with blanks, and put a text with : or # in quotes"
_JSON_VALUE = re.compile(r"null|~|true|false|-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?|", re.ASCII)


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
            return cls.from_dict((read_yaml if Path(path).suffix in _YAML_ENDINGS else read_json)(text))
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
    found = check_together(values, list(PIPELINE_FIELDS.mistakes(given)), _CHECKS)
    if isinstance(values["publishers"], dict):
        # A publisher with a mistake is compared, too, because a mistake concerns one of its settings only.
        others = [mistake for mistake in found if mistake.path[0] != "publishers"]
        found += check_together(values, others, (_check_publishers,))
    refuse(found)


def _check_lake_conn_id(pipeline: Pipeline) -> Iterator[Mistake]:
    if pipeline.lake_conn_id is not None and not is_object_store(pipeline.lake):
        hint = "leave it out, or give the URI of a place in an object store"
        yield Mistake(("lake_conn_id",), "the lake is a directory", hint)


def _check_points(pipeline: Pipeline) -> Iterator[Mistake]:
    if pipeline.consistent_point_retention_h > pipeline.changelog_retention_h:
        yield Mistake(("consistent_point_retention_h",), "must not be longer than changelog_retention_h")


def _check_wal_budget(pipeline: Pipeline) -> Iterator[Mistake]:
    if pipeline.on_wal_budget == "drop_slot" and pipeline.wal_budget is None:
        hint = "set wal_budget to bytes of WAL, as 53687091200"
        yield Mistake(("on_wal_budget",), "drop_slot needs a wal_budget", hint)


def _check_paces(pipeline: Pipeline) -> Iterator[Mistake]:
    for path, given in (((), {}), *((("per_table", name), own) for name, own in pipeline.per_table.items())):
        least = given.get("merge_interval_s", pipeline.merge_interval_s)
        most = given.get("max_staleness_s", pipeline.max_staleness_s)
        if most < least:
            problem = f"{most} must not be less than merge_interval_s, {least}"
            yield Mistake((*path, "max_staleness_s"), problem)


def _check_columns(pipeline: Pipeline) -> Iterator[Mistake]:
    for first, second in (
        ("text_columns", "exclude_columns"),
        ("types", "exclude_columns"),
        ("types", "text_columns"),
    ):
        columns, others = (set(map(ColumnName.parse, getattr(pipeline, name))) for name in (first, second))
        if names := columns & others:
            listed = ", ".join(map(str, sorted(names)))
            yield Mistake((first,), f"{first} and {second} both list {listed}", "take it out of one")


def _check_history(pipeline: Pipeline) -> Iterator[Mistake]:
    if not pipeline.history and not any(given.get("history") for given in pipeline.per_table.values()):
        return
    if pipeline.lake_tables == "none":
        hint = "set history to false, or lake_tables to all"
        yield Mistake(("history",), "there is none without lake tables", hint)
    if not (pipeline.commit_lsn_column and pipeline.commit_ts_column):
        yield Mistake(
            ("history",),
            "needs commit_lsn_column and commit_ts_column",
            "they say since when the rows of the lake tables have been as they are",
        )


def _check_sequences(pipeline: Pipeline) -> Iterator[Mistake]:
    if pipeline.sequences and pipeline.lake_tables == "none":
        hint = "set sequences to false, or lake_tables to all"
        yield Mistake(("sequences",), "they are recorded at consistent points, which need lake tables", hint)


def _name(pipeline: Pipeline) -> str:
    """Return the pipeline's name; a mistaken one must not hide the mistakes of publishers."""
    return getattr(pipeline, "name", "pipeline")


def _check_publishers(pipeline: Pipeline) -> Iterator[Mistake]:
    """Check each publisher alone, then its business events, then that no two have one destination."""
    first: dict[tuple[str, str], str] = {}
    has_lake_tables = getattr(pipeline, "lake_tables", "all") == "all"
    publishers: Mapping[str, Any] = pipeline.publishers
    for name, given in publishers.items():
        if not isinstance(given, dict):
            continue
        settings, mistakes = read_publisher(_name(pipeline), name, given, has_lake_tables=has_lake_tables)
        yield from (mistake.below("publishers", name) for mistake in mistakes)
        if settings is None:
            continue
        for mistake in _check_business(pipeline, settings):
            yield mistake.below("publishers", name)
        other = first.setdefault((settings.conn_id, settings.place), name)
        if other != name:
            yield Mistake(
                ("publishers", name),
                f"{other} and {name} both send to {settings.place}",
                "give each a place of its own: consumers could not tell what of each they have",
            )


def _check_business(pipeline: Pipeline, settings: PublisherSettings) -> Iterator[Mistake]:
    """Yield the sources of business events that do not reach the publisher.

    The tables of its rules must be in `tables`, and its prefixes in the pipeline's `message_prefixes`.
    """
    patterns = [text for text in settings.tables or () if text.endswith(".*")]
    schemas = {TableName.parse(f"{text[:-1]}any").schema for text in patterns}
    named = {TableName.parse(text) for text in settings.tables or () if text not in patterns}
    for table in settings.rules:
        if settings.tables is not None and table not in named and table.schema not in schemas:
            problem = f"{table}, which outbox or transform names, is none of tables"
            yield Mistake(("tables",), problem, "name it in tables, too")
    kept = pipeline.message_prefixes
    if "*" not in kept and (unkept := sorted(set(settings.messages) - set(kept))):
        problem = f"the pipeline does not keep those of {', '.join(unkept)}"
        yield Mistake(("messages",), problem, "name the prefix in message_prefixes of the pipeline")


_CHECKS: tuple[Check, ...] = (
    _check_lake_conn_id,
    _check_points,
    _check_wal_budget,
    _check_paces,
    _check_columns,
    _check_history,
    _check_sequences,
)


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


def read_json(text: str) -> dict[str, Any]:
    """Return the object of a JSON text. Raises ConfigError, naming the line of a syntax error."""
    try:
        found = json.loads(text, object_pairs_hook=_object)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # also if digits or nesting exceed Python's limits
        raise ConfigError(f"the pipeline file is not JSON that can be read: {error}", _JSON_HINT) from None
    return _settings(found, "JSON")


def read_yaml(text: str) -> dict[str, Any]:
    """Return the object of a YAML text. Raises ConfigError, naming the line of a mistake.

    Rejects duplicate keys, aliases, and plain values that are no text in YAML 1.1 and no value in JSON, such
    as `no`, `010` or `2026-01-31`: YAML 1.2 and people read them as text.
    """
    import yaml

    try:
        found = yaml.load(text, Loader=_strict_loader())  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the pipeline file is not YAML that can be read: {_problem_with_place(error)}", _YAML_HINT
        ) from None
    return _settings(found, "YAML")


def _strict_loader() -> type[SafeLoader]:
    from yaml import AliasEvent, MappingNode, SafeLoader, ScalarNode
    from yaml.constructor import ConstructorError

    class StrictLoader(SafeLoader):
        def compose_node(self, parent: Node | None, index: int) -> Node | None:
            if self.check_event(AliasEvent):
                event = self.peek_event()
                raise ConstructorError(None, None, "aliases (*name) are not supported", event.start_mark)
            return super().compose_node(parent, index)

        def construct_object(self, node: Node, deep: bool = False) -> Any:
            is_plain = isinstance(node, ScalarNode) and node.style is None
            if is_plain and node.tag != "tag:yaml.org,2002:str" and not _JSON_VALUE.fullmatch(node.value):
                problem = f"{node.value} is text or not, by YAML's version: quote it, or write it as JSON"
                raise ConstructorError(None, None, problem, node.start_mark)
            return super().construct_object(node, deep=deep)

        def construct_mapping(self, node: MappingNode, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value:
                if key.tag != "tag:yaml.org,2002:str":
                    raise ConstructorError(None, None, "a key must be a text: quote it", key.start_mark)
                if key.value in seen:
                    raise ConstructorError(None, None, f"has key {key.value!r} twice", key.start_mark)
                seen.add(key.value)
            return super().construct_mapping(node, deep=deep)

    return StrictLoader


def _problem_with_place(error: Exception) -> str:
    """Return the problem and its line, without the quoted text that YAML's messages contain."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error) or type(error).__name__
    return problem if mark is None else f"line {mark.line + 1} column {mark.column + 1}: {problem}"


def _settings(found: object, kind: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ConfigError(f"the pipeline file must hold one {kind} object", _REFERENCE)
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Raises ConfigError for a duplicate key.

    Python's parser would silently use the last value of a duplicate key.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        doubled = sorted({key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1})
        raise ConfigError(f"the pipeline file has key {', '.join(map(repr, doubled))} twice in one object")
    return found
