"""TableResult: how the work on one table ended, as a Spark task tells it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from airflow_provider_pgrepl import errors, hints
from airflow_provider_pgrepl.errors import LakeTableError, LakeUnavailableError, PgReplError, Remedy
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName


@dataclass(frozen=True)
class TableResult:
    """How a table's work ended: `version` is the lake table's own, `error` None when all went well.

    `history_version` is that of its history, None when it keeps none. `relation`, as JSON: what the table is
    for now, None when that is what was recorded. `fingerprint`: of the commits at which it was left.
    `trace`: classes and frames of the unexpected exception behind the error, if there is one.
    `has_gone_back`: it lacks what it was known to have; nothing was done. `overtaken`: which other program's
    commit prevented the work, that is done again later; empty when none did. `seconds` that it took, the
    `bytes_changed`, of the table's own values, the `bytes_written` to the lake, the history's too, and the
    `bytes_live` that the lake table has then.
    """

    relation_id: int
    position: int = 0
    version: int = 0
    changes: int = 0
    error: str | None = None
    hint: str = ""
    error_kind: str = ""
    stops_pipeline: bool = False
    error_lsn: int = 0
    history_version: int | None = None
    relation: str | None = None
    remedy: Remedy | None = None
    fingerprint: str = ""
    has_gone_back: bool = False
    overtaken: str = ""
    seconds: float = 0.0
    bytes_changed: int = 0
    bytes_written: int = 0
    bytes_live: int = 0
    trace: str = ""

    @classmethod
    def of_error(cls, relation_id: int, error: PgReplError) -> TableResult:
        """Of a table that cannot be worked on, which is its own trouble."""
        return cls(relation_id)._with(error)

    def stopped(self, lsn: LSN, error: PgReplError) -> TableResult:
        """The same, for a table that stops before the transaction at an LSN."""
        return replace(self._with(error), error_lsn=int(lsn))

    def _with(self, error: PgReplError) -> TableResult:
        return replace(
            self,
            error=error.message,
            hint=error.hint,
            error_kind=type(error).__name__,
            remedy=error.remedy,
            trace=error.trace,
        )

    def to_error(self, table: TableName) -> PgReplError:
        """What went wrong, as it was raised in the task; what stops the table alone has a way out."""
        of_unknown_kind = LakeUnavailableError if self.stops_pipeline else LakeTableError
        kind: type[PgReplError] = getattr(errors, self.error_kind, of_unknown_kind)
        if self.stops_pipeline:
            error = kind(str(self.error), self.hint)
        else:
            error = kind(str(self.error), self.hint or hints.resnapshot(table), self.remedy)
        error.trace = self.trace
        return error
