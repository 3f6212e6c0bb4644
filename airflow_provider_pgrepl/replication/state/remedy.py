"""What is unsafe, and the way out of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from airflow_provider_pgrepl.replication.relation import TableName


class Remedy(StrEnum):
    """What somebody has to do. `{anew}`, `{added}`: how a table is taken anew, or under its new name."""

    ANEW = "{anew}"
    UNDO = "set it back at the source, then retry the table; or {anew}"
    MOVED = "name it back, then retry the table; or {added}"
    PUBLISH = "put it into the publication again, then {anew}"
    GONE = "remove the table from the pipeline; or make it again, then {anew}"
    POLICY = "set on_drift to evolve for it, then retry the table; or {anew}"
    LOGGED = "make it an ordinary, logged table, then {anew}"
    CHOICE = "mend that at the source or in the pipeline, then retry the table; or {anew}"


@dataclass(frozen=True)
class Finding:
    """One thing because of which a lake table cannot go on."""

    text: str
    remedy: Remedy = Remedy.ANEW
    moved_to: TableName | None = None

    def hint(self, table: TableName, *, was_sent: bool) -> str:
        """`was_sent`: rows of this shape are in the changelog, so that setting it back does not help them."""
        anew = f"take it anew: run the snapshot app with --tables '{table}', or PgResnapshotOperator"
        added = (
            "remove it from the pipeline, and take it under its new name: run the snapshot app with --add"
            f" '{self.moved_to}', or PgAddTablesOperator"
        )
        if was_sent and self.remedy is Remedy.MOVED:
            return added
        remedy = Remedy.ANEW if was_sent and self.remedy is Remedy.UNDO else self.remedy
        return remedy.format(anew=anew, added=added)


def allows_retry(hint: str) -> bool:
    """Whether a recorded hint says that the table can go on without a new copy.

    One that does not stays true when the source is set back: rows of the other shape have been sent.
    """
    return "then retry the table" in hint
