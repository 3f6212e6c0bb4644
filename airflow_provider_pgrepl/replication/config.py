"""Pipeline: the whole configuration of one replication, frozen and validated, JSON both ways."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.choices import (
    POLICIES,
    VALUE_CHOICES,
    ColumnChoice,
    Deletes,
    Infinity,
    LakeType,
    NewTables,
    NumericNan,
    OnDrift,
    TablePolicy,
    Truncate,
    overrides,
)
from airflow_provider_pgrepl.replication.relation import ColumnName, TableName
from airflow_provider_pgrepl.replication.text_file import read_text

_SLOT_NAME = re.compile(r"[a-z0-9_]{1,63}")
_PIPELINE_NAME = re.compile(r"[a-z0-9_]{1,55}")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_QUOTED = re.compile(r'"[^"]*"')
_CREDENTIALS = re.compile(r"[A-Za-z0-9+.-]+://[^/@]*:[^/@]*@")
# JSON can spell these, and neither PostgreSQL nor a file system takes them.
_UNUSABLE = re.compile("[\0\ud800-\udfff]")
_NAME_BYTES = 63
# Beyond these, times cannot be reckoned with; a number of anything else counts in floats to here.
_MOST = {"h": 876_000, "s": 1_000_000_000}
_MOST_OF_ALL = 2**53
_REFERENCE = "see docs/reference/pipeline.md"
_TYPES_REFERENCE = "see Choices in docs/reference/types.md"

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """One source database, one slot, one publication, one lake root.

    Raises ConfigError, naming the field, when a value cannot be used.
    """

    name: str
    lake: str
    tables: tuple[str, ...]
    insert_only: tuple[str, ...] = ()
    conn_id: str = "pgrepl_default"
    state_conn_id: str | None = None
    slot: str = ""
    publication: str = ""
    publication_mode: Literal["create", "use"] = "create"
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
    new_tables: NewTables = "add"
    event_trigger: bool = False
    trust_table_owners: bool = False
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
    batch_bytes: int = 256 * MIB
    slice_bytes: int = 128 * MIB
    changelog_retention_h: float = 168.0
    points_keep_all_h: float = 1.0
    points_thin_min: float = 10.0
    points_keep_h: float = 168.0
    points_bytes: float = 2.0
    maintenance_interval_s: float = 600.0
    snapshot_range_bytes: int = 128 * MIB
    lock_timeout_s: float = 10.0
    slot_timeout_s: float = 60.0
    reconnect_s: float = 60.0

    def __post_init__(self) -> None:
        _check_types(self)
        for setting in dataclasses.fields(self):
            if any(map(_UNUSABLE.search, _texts(getattr(self, setting.name)))):
                raise ConfigError(f"{setting.name}: a text in it holds a NUL or half a character")
        if not _PIPELINE_NAME.fullmatch(self.name):
            raise ConfigError(
                f"name: {self.name!r} may hold only a-z, 0-9 and _, and at most 55 of them",
                "it becomes part of the slot's name, and PostgreSQL allows no other characters there",
            )
        for name in ("slot", "publication"):
            if not getattr(self, name):
                object.__setattr__(self, name, f"pgrepl_{self.name}")
        if not _SLOT_NAME.fullmatch(self.slot):
            raise ConfigError(f"slot: {self.slot!r} may hold only a-z, 0-9 and _, and at most 63 of them")
        if len(self.publication.encode()) > _NAME_BYTES:
            raise ConfigError(f"publication: is longer than the {_NAME_BYTES} bytes that PostgreSQL allows")
        self._check_lake()
        if "%" in self.lake:
            raise ConfigError("lake: must not contain %", "Delta readers decode it in some places only")
        self._check_tables()
        self._check_numbers()
        self._check_choices()

    def _check_lake(self) -> None:
        if not self.lake.strip():
            raise ConfigError("lake: is empty", "give the path under which the lake tables are to be")
        if _CREDENTIALS.match(self.lake):
            raise ConfigError(
                "lake: the URI holds credentials",
                "those of a store come from the environment or an Airflow connection, never from the file",
            )
        if self.lake != self.lake.strip():
            raise ConfigError("lake: begins or ends with a blank", "give the path without it")
        if scheme := _SCHEME.match(self.lake):
            raise ConfigError(
                f"lake: is a URI ({scheme[0]}…), not a path; object stores are not supported yet",
                "give a directory of this host, or of a file system that all hosts share",
            )

    def _check_tables(self) -> None:
        if not self.tables:
            raise ConfigError("tables: is empty", 'list tables or patterns, as ["public.orders", "sales.*"]')
        for name in ("tables", "insert_only"):
            for text in getattr(self, name):
                _check_table(name, text, pattern_allowed=name == "tables")

    def _check_numbers(self) -> None:
        may_be_zero = {"trigger_interval_s", "reconnect_s"}
        for name, value in vars(self).items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and value > (most := _MOST.get(name.rpartition("_")[2], _MOST_OF_ALL)):
                raise ConfigError(f"{name}: must not be more than {most}")
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{name}: {value} is not a finite number")
            if is_number and (value < 0 or (value == 0 and name not in may_be_zero)):
                least = "must not be negative" if name in may_be_zero else "must be greater than 0"
                raise ConfigError(f"{name}: {value} {least}")
        if self.points_keep_h > self.changelog_retention_h:
            raise ConfigError("points_keep_h: must not be longer than changelog_retention_h")

    def _check_choices(self) -> None:
        for column, given in self.types.items():
            _lake_type(f"types: {column}", given)
        if not _is_of_numeric(self.unconstrained_numeric):
            raise ConfigError(
                f"unconstrained_numeric: {self.unconstrained_numeric!r} must be"
                " string or decimal(p,s), with p to 38",
                _TYPES_REFERENCE,
            )
        texts, excluded = (
            _columns("text_columns", self.text_columns),
            _columns("exclude_columns", self.exclude_columns),
        )
        typed = _columns("types", self.types)
        for first, second, names in (
            ("text_columns", "exclude_columns", texts & excluded),
            ("types", "exclude_columns", typed & excluded),
            ("types", "text_columns", typed & texts),
        ):
            if names:
                raise ConfigError(
                    f"{first} and {second} both list {', '.join(map(str, sorted(names)))}",
                    "take it out of one",
                )
        for column, given in self.per_column.items():
            _columns("per_column", (column,))
            overrides("per_column", column, given, VALUE_CHOICES)
        for table, given in self.per_table.items():
            _check_table("per_table", table, pattern_allowed=False)
            overrides("per_table", table, given, POLICIES)
        for field_name, parse in (
            ("types", ColumnName.parse),
            ("per_column", ColumnName.parse),
            ("per_table", TableName.parse),
        ):
            _refuse_doubles(field_name, parse, getattr(self, field_name))

        keeps_history = self.history or any(given.get("history") for given in self.per_table.values())
        if keeps_history and not (self.commit_lsn_column and self.commit_ts_column):
            raise ConfigError(
                "history: needs commit_lsn_column and commit_ts_column",
                "they say since when the rows of the lake tables have been as they are",
            )

    def choice(self, column: ColumnName, *, is_key: bool = False) -> ColumnChoice:
        """How the values of a column are to look in the lake; those of a key must stay exact."""
        own: dict[str, Any] = next(
            (given for name, given in self.per_column.items() if ColumnName.parse(name) == column), {}
        )
        lake_type = next(
            (text for name, text in self.types.items() if ColumnName.parse(name) == column), None
        )
        if column in _columns("text_columns", self.text_columns):
            lake_type = "string"
        return ColumnChoice(
            lake_type=LakeType.parse(lake_type) if lake_type else None,
            excluded=column in _columns("exclude_columns", self.exclude_columns),
            infinity="error" if is_key else own.get("infinity", self.infinity),
            numeric_nan="error" if is_key else own.get("numeric_nan", self.numeric_nan),
            unconstrained_numeric=LakeType.parse(self.unconstrained_numeric),
            timestamp_without_tz=self.timestamp_without_tz,
        )

    def policy(self, table: TableName) -> TablePolicy:
        """What the changes of a table do in the lake."""
        own: dict[str, Any] = next(
            (given for name, given in self.per_table.items() if TableName.parse(name) == table), {}
        )
        return TablePolicy(**{name: own.get(name, getattr(self, name)) for name in POLICIES})

    @property
    def lake_root(self) -> str:
        """The lake's path, absolute and without a trailing slash.

        Raises ConfigError where it is in the home of a user whom this host does not know.
        """
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
        """Raises ConfigError naming the key or value that cannot be used."""
        try:
            fields = json.loads(text, object_pairs_hook=_object)
        except ConfigError:
            raise
        except (ValueError, RecursionError) as error:  # also for numbers and brackets beyond Python's limits
            raise ConfigError(f"the pipeline file is not JSON that can be read: {error}") from None
        if not isinstance(fields, dict):
            raise ConfigError("the pipeline file must hold one JSON object", _REFERENCE)
        return cls.from_dict(fields)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Pipeline:
        known = {known.name: known for known in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - set(known))
        if unknown:
            raise ConfigError(
                f"unknown key {', '.join(map(repr, unknown))}", f"known keys: {', '.join(known)}"
            )
        missing = [name for name in ("name", "lake", "tables") if name not in fields]
        if missing:
            raise ConfigError(f"missing key {', '.join(map(repr, missing))}", _REFERENCE)
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()
        }
        return cls(**values)

    @classmethod
    def read(cls, path: str | Path) -> Pipeline:
        """Read a pipeline file. Raises ConfigError."""
        return cls.from_json(read_text("pipeline file", path))


def _texts(value: object) -> Iterator[str]:
    """All that a setting consists of, names of its parts too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value.keys(), *value.values()])
    elif isinstance(value, Sequence | Set):
        for part in value:
            yield from _texts(part)
    elif dataclasses.is_dataclass(value):
        for part in dataclasses.fields(value):
            yield from _texts(getattr(value, part.name))


def _check_table(field: str, text: str, *, pattern_allowed: bool) -> None:
    if text.endswith(".*") and pattern_allowed:
        text = text[:-1] + "any"
    try:
        if "*" in _QUOTED.sub("", text):
            raise ValueError(f"{text!r} has a * where none may be")
        TableName.parse(text)
    except ValueError as error:
        raise ConfigError(
            f"{field}: {error}", 'schema.table, "Quoted"."Names", or (in tables) schema.*'
        ) from None


def _columns(field: str, names: Iterable[str]) -> set[ColumnName]:
    try:
        return {ColumnName.parse(name) for name in names}
    except ValueError as error:
        raise ConfigError(f"{field}: {error}") from None


def _refuse_doubles(field: str, parse: Callable[[str], Hashable], names: Iterable[str]) -> None:
    """One name in two spellings would say two things of one table or column."""
    first: dict[Hashable, str] = {}
    for name in names:
        if (other := first.setdefault(parse(name), name)) != name:
            raise ConfigError(f"{field}: {other} and {name} are the same", "take one out")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, of whose doubled keys Python would take the last in silence."""
    found = dict(pairs)
    if len(found) != len(pairs):
        doubled = sorted({key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1})
        raise ConfigError(f"the pipeline file has key {', '.join(map(repr, doubled))} twice in one object")
    return found


def _lake_type(field: str, text: object) -> LakeType:
    try:
        return LakeType.parse(text if isinstance(text, str) else json.dumps(text))
    except ValueError as error:
        raise ConfigError(f"{field}: {error}", _TYPES_REFERENCE) from None


def _is_of_numeric(text: str) -> bool:
    """Whether a lake type is one for numeric without precision."""
    try:
        return LakeType.parse(text).name in ("string", "decimal")
    except ValueError:
        return False


def _check_types(pipeline: Pipeline) -> None:
    for name, hint in get_type_hints(Pipeline).items():
        value = getattr(pipeline, name)
        if not _is_of(value, hint):
            shown = list(value) if isinstance(value, tuple) else value
            raise ConfigError(f"{name}: {shown!r} must be {_describe(hint)}")


def _is_of(value: object, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is dict:
        return isinstance(value, dict)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, get_args(hint)))
    if get_origin(hint) is tuple:
        return "a list of strings"
    if get_origin(hint) is dict:
        return "an object"
    names = {str: "a string", bool: "true or false", int: "a whole number", float: "a number"}
    return names.get(hint, "a string or null")
