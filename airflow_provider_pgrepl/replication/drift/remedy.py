"""What is unsafe, and the words for the way out of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_provider_pgrepl.errors import Remedy
from airflow_provider_pgrepl.replication.relation import TableName

__all__ = ["DriftFinding", "Remedy"]

_WORDS = {
    Remedy.ANEW: "{anew}",
    Remedy.UNDO: "set it back at the source, then retry the table; or {anew}",
    Remedy.MOVED: "name it back, then retry the table; or {added}",
    Remedy.ADDED: "{added}",
    Remedy.PUBLISH: "put it into the publication again, then {anew}",
    Remedy.GONE: "remove the table from the pipeline; or make it again, then {anew}",
    Remedy.POLICY: "set on_drift to evolve for it, then retry the table; or {anew}",
    Remedy.LOGGED: "make it an ordinary, logged table, then {anew}",
    Remedy.CHOICE: "mend that at the source or in the pipeline, then retry the table; or {anew}",
}
# Once rows of another shape are in the changelog, setting the source back does not help them.
_ONCE_SENT = {Remedy.UNDO: Remedy.ANEW, Remedy.MOVED: Remedy.ADDED}


@dataclass(frozen=True)
class DriftFinding:
    """One thing because of which a lake table cannot go on."""

    text: str
    remedy: Remedy = Remedy.ANEW
    moved_to: TableName | None = None

    def way_out(self, *, was_sent: bool) -> Remedy:
        """`was_sent`: rows of this shape are in the changelog."""
        return _ONCE_SENT.get(self.remedy, self.remedy) if was_sent else self.remedy

    def hint(self, table: TableName, *, was_sent: bool) -> str:
        """The way out, in words."""
        anew = f"take it anew: run the snapshot app with --tables '{table}', or PgResnapshotOperator"
        added = (
            "remove it from the pipeline, and take it under its new name: run the snapshot app with --add"
            f" '{self.moved_to}', or PgAddTablesOperator"
        )
        return _WORDS[self.way_out(was_sent=was_sent)].format(anew=anew, added=added)
