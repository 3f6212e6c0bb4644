"""What is unsafe, and the words for the way out of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.errors import Remedy
from airflow_provider_pgrepl.replication.postgres.names import TableName

__all__ = ["DriftFinding", "Remedy"]

_WORDS = {
    Remedy.RESNAPSHOT: "{resnapshot}",
    Remedy.UNDO: "set it back at the source, then retry the table; or {resnapshot}",
    Remedy.MOVED: "name it back, then retry the table; or {added}",
    Remedy.ADDED: "{added}",
    Remedy.PUBLISH: "put it into the publication again, then {resnapshot}",
    Remedy.GONE: "remove the table from the pipeline; or create it again, then {resnapshot}",
    Remedy.POLICY: "set on_drift to evolve for it, then retry the table; or {resnapshot}",
    Remedy.LOGGED: "make it an ordinary, logged table, then {resnapshot}",
    Remedy.CHOICE: "correct that at the source or in the pipeline, then retry the table; or {resnapshot}",
}
# Once rows of another shape are in the changelog, setting the source back does not help them.
_ONCE_SENT = {Remedy.UNDO: Remedy.RESNAPSHOT, Remedy.MOVED: Remedy.ADDED}


@dataclass(frozen=True)
class DriftFinding:
    """One thing because of which a lake table cannot go on."""

    text: str
    remedy: Remedy = Remedy.RESNAPSHOT
    moved_to: TableName | None = None

    def way_out(self, *, was_sent: bool) -> Remedy:
        """`was_sent`: rows of this shape are in the changelog."""
        return _ONCE_SENT.get(self.remedy, self.remedy) if was_sent else self.remedy

    def hint(self, table: TableName, *, was_sent: bool) -> str:
        """The way out, in words."""
        resnapshot = hints.resnapshot(table)
        renamed = hints.rename_settings(table, self.moved_to)
        added = f"{renamed}, remove {table} from the pipeline, then {hints.add(self.moved_to)}"
        added += f"; but if the two changed places, resnapshot both: --tables '{table},{self.moved_to}'"
        return _WORDS[self.way_out(was_sent=was_sent)].format(resnapshot=resnapshot, added=added)
