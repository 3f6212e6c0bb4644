"""Drift of a table as a whole: what it is, how it is published and identified. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from airflow_provider_pgrepl.errors import Remedy
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.drift.column_matching import MatchedColumn
from airflow_provider_pgrepl.replication.drift.remedy import DriftFinding
from airflow_provider_pgrepl.replication.postgres.names import TableName, show_identifier
from airflow_provider_pgrepl.replication.postgres.relation import PublicationStanding, Relation

MADE_AGAIN = "the table was dropped and another made under its name"

NO_IDENTITY = (
    "the table has no replica identity any more, so the source refuses UPDATE and DELETE on it while it is"
    " published. Give it a primary key, or an identity by REPLICA IDENTITY USING INDEX or FULL, or take it"
    " out of the publication"
)


def table_findings(recorded: Relation, received: RelationRecord, current: Relation) -> Iterator[DriftFinding]:
    """What keeps the lake table from going on, whatever its columns are."""
    message = received.message
    if not recorded.oid == current.oid == message.oid:
        yield DriftFinding(MADE_AGAIN)
        return
    name = TableName(message.schema, message.name)
    # Renamed and renamed back, it has been the same table all the time.
    if recorded.table not in (name, current.table):
        yield DriftFinding(f"the table was renamed or moved to {name}", Remedy.MOVED, name)
    if current.relkind != recorded.relkind:
        yield DriftFinding("the table became another kind of relation")
    if message.replica_identity != recorded.replica_identity:
        yield DriftFinding("the replica identity changed", Remedy.UNDO)
    yield from _publication_findings(recorded, current.standing)


def standing_findings(recorded: Relation, standing: PublicationStanding) -> Iterator[DriftFinding]:
    """What keeps it from going on, whatever the table is like now: changes may be missing."""
    if standing.oid == 0:
        yield DriftFinding("the table was dropped", Remedy.GONE)
    elif standing.oid != recorded.oid:
        yield DriftFinding(MADE_AGAIN)
    elif standing.moved_to not in (None, recorded.table):
        text = f"the table was renamed or moved to {standing.moved_to}, and another one has its name"
        yield DriftFinding(text)
    else:
        yield from _publication_findings(recorded, standing)


def _publication_findings(recorded: Relation, current: PublicationStanding) -> Iterator[DriftFinding]:
    if _differ(recorded.publication_oid, current.publication_oid):
        yield DriftFinding("the publication was dropped, or created again: changes between are missing")
    elif _differ(recorded.membership_oid, current.membership_oid):
        if current.membership_oid:
            text = "the table was taken out of the publication and put back: changes between are missing"
            yield DriftFinding(text)
        else:
            yield DriftFinding("the table was taken out of the publication", Remedy.PUBLISH)
    elif _differ(recorded.publication_xmin, current.publication_xmin):
        yield DriftFinding("the publication was altered: changes of some kind may be missing")
    elif _differ(recorded.membership_xmin, current.membership_xmin):
        yield DriftFinding("the column list, row filter or schema of the table in the publication changed")
    elif recorded.links and recorded.links != current.links:
        yield DriftFinding(
            "the table was detached from the one through which it is published, and attached again: changes"
            " between are missing"
        )


def _differ(recorded: int, current: int) -> bool:
    return recorded not in (0, current)


def key_findings(
    recorded: Relation, received: RelationRecord, current: Relation, places: list[MatchedColumn]
) -> Iterator[DriftFinding]:
    """Columns that joined the key or left it, be it by being dropped.

    With FULL the stream marks every column, so the catalog must do; a key that is published only in part is
    none of the lake's, although the stream marks it.
    """
    before = {column.attnum for column in recorded.key_columns}
    now = {column.attnum for column in current.key_columns}
    if received.message.replica_identity != "f" and (before or now):
        now = {place.attnum for place in places if place.sent.is_identity}
    for place in places:
        if (place.attnum in before) != (place.attnum in now):
            verb = "left" if place.attnum in before else "joined"
            yield DriftFinding(f"the key changed: column {place.shown} {verb} it", Remedy.UNDO)
    for gone in sorted(before - {place.attnum for place in places}):
        (column,) = (column for column in recorded.columns if column.attnum == gone)
        yield DriftFinding(f"the key changed: column {show_identifier(column.name)} was dropped")
    if before and not now and received.message.replica_identity != "f":
        yield DriftFinding(NO_IDENTITY, Remedy.UNDO)
