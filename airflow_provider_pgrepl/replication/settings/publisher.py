"""The settings of a publisher, and the checks that compare several of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from airflow_provider_pgrepl.errors import ConfigError, reference
from airflow_provider_pgrepl.replication.postgres.names import TableName

from .mistakes import Mistake, check_together, frozen, refuse
from .publisher_sections import (
    PUBLISHER_FIELDS,
    ColumnRules,
    EventRule,
    PublisherFile,
    RowFilter,
    parse_address,
    parse_rules,
)
from .targets import FORMATS, TARGETS

_REFERENCE = reference("publishers")


@dataclass(frozen=True, kw_only=True)
class PublisherSettings(PublisherFile):
    """The settings of one publisher, as `parse_publisher` returns them. `name`: its key in `publishers`."""

    name: str

    @property
    def whole(self) -> int | None:
        """The maximum number of changes of a transaction that must be read whole; None if none must be."""
        return self.transaction_changes if self.transform_transaction else None

    @property
    def place(self) -> str:
        """The destination of the events at the target. No two publishers may have the same one."""
        return (FORMATS[self.format].place_of or TARGETS[self.target].place_of)(self)

    @property
    def destination_of(self) -> str:
        """The destination of the events, with the kind of the target."""
        return f"{self.target}: {self.place}"

    @cached_property
    def column_rules(self) -> ColumnRules:
        """The rules of the columns that are excluded, hashed, masked or renamed."""
        return ColumnRules.parse(
            self.exclude_columns, self.hash_columns, self.mask_columns, self.rename_columns
        )

    @cached_property
    def rows(self) -> RowFilter:
        """The filter of the rows that are published."""
        return RowFilter.parse(self.row_filter)

    @cached_property
    def rules(self) -> dict[TableName, EventRule]:
        """The rule of each table whose changes become business events."""
        return parse_rules(self.outbox, self.transform)

    def metrics_address(self) -> tuple[str, int]:
        """Return host and port of the Prometheus endpoint."""
        return parse_address(self.metrics)


def parse_publisher(
    pipeline: str, name: str, given: Mapping[str, Any], *, has_lake_tables: bool = True
) -> PublisherSettings:
    """Return the settings of an entry of `publishers`. Raises ConfigError, naming every mistake."""
    settings, mistakes = read_publisher(pipeline, name, given, has_lake_tables=has_lake_tables)
    refuse(mistake.below("publishers", name) for mistake in mistakes)
    assert settings is not None
    return settings


def read_publisher(
    pipeline: str, name: str, given: Mapping[str, Any], *, has_lake_tables: bool
) -> tuple[PublisherSettings | None, list[Mistake]]:
    """Return the settings of an entry of `publishers`, or None and every mistake."""
    values = frozen(given)
    found = list(PUBLISHER_FIELDS.mistakes(given))
    if not any(mistake.path[0] in ("target", "format") for mistake in found):
        values, more = _completed(pipeline, values, has_lake_tables=has_lake_tables)
        found += more
    mistaken = {mistake.path[0] for mistake in found}
    sound: dict[str, Any] = {key: value for key, value in values.items() if key not in mistaken}
    if "target" in sound and "format" in sound:
        settings = PublisherSettings(**sound, name=name)
        found = check_together(vars(settings), found, _CHECKS)
        if not found:
            return settings, []
    return None, found


def _completed(
    pipeline: str, values: dict[str, Any], *, has_lake_tables: bool
) -> tuple[dict[str, Any], list[Mistake]]:
    """Return the settings with the defaults of their target and format, and mistakes in their combination."""
    target = TARGETS[values["target"]]
    body = values.get("format", target.formats[0])
    if body not in target.formats:
        problem = f"{body!r} is not of target {values['target']!r}"
        return values, [Mistake(("format",), problem, f"one of {', '.join(map(repr, target.formats))}")]
    own = FORMATS[body]
    found = list(_kind_mistakes(values, body))
    unchanged = values.get("unchanged", own.unsent if own.unsent and not has_lake_tables else "fill")
    if not has_lake_tables:
        found += _unchanged_mistakes(unchanged, own.unsent)
    defaults = {"conn_id": f"pgrepl_{values['target']}", "source": pipeline, **target.defaults(pipeline)}
    defaults = {key: value for key, value in defaults.items() if key not in own.excludes}
    named = {key: value for key, value in values.items() if value != "" or key not in defaults}
    return {**defaults, **named, "format": body, "unchanged": unchanged}, found


def _kind_mistakes(values: Mapping[str, Any], body: str) -> Iterator[Mistake]:
    """Yield the settings of another target, or of another format."""
    for key in values:
        owners = [name for name, kind in TARGETS.items() if key in kind.settings]
        if owners and values["target"] not in owners:
            yield Mistake((key,), f"is of target {' or '.join(map(repr, owners))} alone", _REFERENCE)
    own = FORMATS[body]  # type: ignore[index]
    for name, other in FORMATS.items():
        if own is not other and other.unsent and values.get("unchanged") == other.unsent:
            hint = "set it to look_up: other formats name the values that are missing"
            yield Mistake(("unchanged",), f"{other.unsent!r} is of {name}'s format", hint)
        for key in other.settings:
            if key in values and own is not other:
                yield Mistake((key,), f"is of {name}'s format", _REFERENCE)
    for key in own.excludes:
        if key in values:
            yield Mistake((key,), f"is not of {body}'s format", "set format to json, or debezium")


def _unchanged_mistakes(given: str, unsent: str) -> Iterator[Mistake]:
    """Check `unchanged` for a pipeline without lake tables.

    There, a value that the server did not send can only be in the changelog. A missing value would look like
    NULL in creek's format, so an event with one is not sent. Other formats name missing values.
    """
    if given != unsent if unsent else given == "look_up":
        yield Mistake(
            ("unchanged",),
            f"{given!r} does not go with lake_tables: none",
            "set it to require: an event that lacks a value stops its table, or is recorded and not sent"
            " (on_error); a NULL would be taken for the value"
            if unsent
            else "there is no lake to look into: set it to fill",
        )


def _check_columns(settings: PublisherSettings) -> Iterator[Mistake]:
    try:
        ColumnRules.parse(
            settings.exclude_columns, settings.hash_columns, settings.mask_columns, settings.rename_columns
        )
    except ConfigError as error:
        yield Mistake((), error.message, error.hint)


def _check_rules(settings: PublisherSettings) -> Iterator[Mistake]:
    try:
        parse_rules(settings.outbox, settings.transform)
    except ConfigError as error:
        yield Mistake(("transform",), error.message, error.hint)


def _check_messages(settings: PublisherSettings) -> Iterator[Mistake]:
    if settings.messages and "{route}" not in (settings.route or "{route}"):
        yield Mistake(("route",), "logical messages have a {route}, and no {type}", _REFERENCE)
    if settings.tables == () and not settings.messages:
        yield Mistake(("tables",), "none is named", "name some, or give null for all")


def _check_transaction(settings: PublisherSettings) -> Iterator[Mistake]:
    given = [name for name in ("outbox", "transform", "messages", "schemas") if getattr(settings, name)]
    if not FORMATS[settings.format].takes_transactions:
        given.append("format")
    if settings.transform_transaction and given:
        yield Mistake(
            ("transform_transaction",),
            f"makes all events, and {', '.join(given)} would make others",
            "have the function do it, or give it another publisher",
        )


_CHECKS = (
    _check_columns,
    _check_rules,
    _check_messages,
    _check_transaction,
    lambda settings: FORMATS[settings.format].check(settings),
    lambda settings: TARGETS[settings.target].check(settings),
)
