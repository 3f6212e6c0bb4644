"""Settings of other programs on a lake table that make its commits fail, and how to remove them.

Read from the table itself: the text of Delta's errors is for people, and may hold values of rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from deltalake import DeltaTable

from airflow_provider_pgrepl import hints

_WRITTEN = {
    *("appendOnly", "invariants", "checkConstraints", "changeDataFeed", "generatedColumns", "columnMapping"),
    *("timestampNtz", "deletionVectors", "v2Checkpoint", "variantType"),
}
"""Writer features that deltalake 1.6.6 satisfies (tried)."""
_IDENTITY = "identityColumns"
_IDENTITY_WRITER = 6
"""The version of writers without features that demands identity columns."""
_DROPPED_AT_ONCE = ("rowTracking", "inCommitTimestamp", "domainMetadata")
"""Features that Spark drops in one statement. Dropping another one leaves checkpointProtection behind, or is
impossible. In the order in which they are dropped: row tracking needs domainMetadata."""
_CONSTRAINT = "delta.constraints."


@dataclass(frozen=True)
class Obstacle:
    """`what` is set on the table, and the `remedy`: what to run. Of one setting it is empty where only a new
    snapshot helps."""

    what: str
    remedy: str


def find_obstacle(table: DeltaTable, *, at_rows: bool) -> Obstacle | None:
    """The setting because of which a commit through `table` failed, None if there is none.

    `at_rows`: it failed while rows were written, which constraints reject, and not as a whole.
    """
    alter = f"ALTER TABLE delta.`{table.table_uri}`"
    if at_rows:
        found = list(_of_rows(table, alter)) or list(_mapped_columns(table))
    else:
        found = [*_of_features(table, alter), *_append_only(table, alter)]
    return _joined(table, found) if found else None


def find_fixed_columns(table: DeltaTable) -> Obstacle | None:
    """The setting with which the table's columns cannot be changed or replaced, None if there is none.

    deltalake does not notice when files are replaced, and leaves a table that no reader can open.
    """
    found = list(_mapped_columns(table))
    return _joined(table, found) if found else None


def _joined(table: DeltaTable, found: Sequence[Obstacle]) -> Obstacle:
    what = ", ".join(one.what for one in found)
    if not all(one.remedy for one in found):
        return Obstacle(what, f"move the folder {table.table_uri} away, then {hints.RESNAPSHOT}")
    return Obstacle(what, "; ".join([*(one.remedy for one in found), "then retry the table"]))


def _mapped_columns(table: DeltaTable) -> Iterator[Obstacle]:
    if table.metadata().configuration.get("delta.columnMapping.mode", "none").lower() != "none":
        yield Obstacle(
            "the property delta.columnMapping.mode, with which no column can be added or replaced", ""
        )


def _append_only(table: DeltaTable, alter: str) -> Iterator[Obstacle]:
    if table.metadata().configuration.get("delta.appendOnly", "false").lower() == "true":
        yield Obstacle(
            "the property delta.appendOnly, which forbids to change and delete rows",
            f"{alter} UNSET TBLPROPERTIES ('delta.appendOnly')",
        )


def _of_features(table: DeltaTable, alter: str) -> Iterator[Obstacle]:
    protocol = table.protocol()
    demanded = set(protocol.writer_features or ()) - _WRITTEN
    if protocol.writer_features is None and int(protocol.min_writer_version) >= _IDENTITY_WRITER:
        demanded.add(_IDENTITY)
    at_once = [name for name in _DROPPED_AT_ONCE if name in demanded]
    for name in at_once:
        yield Obstacle(f"the table feature {name}", f"{alter} DROP FEATURE {name}")
    for name in sorted(demanded - set(at_once)):
        yield Obstacle(f"the table feature {name}", "")


def _of_rows(table: DeltaTable, alter: str) -> Iterator[Obstacle]:
    for key in sorted(table.metadata().configuration):
        if key.startswith(_CONSTRAINT):
            name = key.removeprefix(_CONSTRAINT)
            yield Obstacle(f"the CHECK constraint {name}", f"{alter} DROP CONSTRAINT {name}")
    for field in _fields(table):
        about, name = field["metadata"], field["name"]
        if "delta.generationExpression" in about:
            what = f"the generated column {name}"
        elif "delta.invariants" in about:
            what = f"the invariant of column {name}"
        elif not field["nullable"]:
            yield Obstacle(f"NOT NULL of column {name}", f"{alter} ALTER COLUMN `{name}` DROP NOT NULL")
            continue
        else:
            continue
        yield Obstacle(what, "")


def _fields(table: DeltaTable) -> list[dict[str, Any]]:
    fields: list[dict[str, Any]] = json.loads(table.schema().to_json())["fields"]
    return fields
