"""What maintenance by hand did: for people, for programs, and as an exit code."""

from __future__ import annotations

from dataclasses import dataclass, field

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.status.text import show_bytes, show_count
from airflow_provider_pgrepl.replication.lake.files.thorough_compaction import Compaction
from airflow_provider_pgrepl.replication.lake.maintenance import MaintenanceResult


@dataclass(frozen=True)
class MaintainedTable:
    """A lake table, or a history, by its name in consistent points."""

    table: str
    compaction: Compaction | None = None
    failed: PgReplError | None = None

    @property
    def is_busy(self) -> bool:
        """Whether its writer was faster each time."""
        return self.compaction is not None and self.compaction.is_busy

    def to_text(self) -> str:
        """One line, and one more with the hint of what failed."""
        if self.compaction is None:
            return f"{self.table}: failed: {self.failed}"
        before, after = self.compaction.before, self.compaction.after
        now = f", now {after.files} of {show_bytes(after.bytes)}" if after != before else ""
        why = ""
        if self.compaction.is_busy:
            why = "; too busy: its writer was faster each time. Run it again when less is written"
        elif self.compaction.is_left:
            why = "; there is more to do: run it again, with a larger --limit-s"
        return f"{self.table}: {show_count(before.files, 'file')} of {show_bytes(before.bytes)}{now}{why}"

    def to_report(self) -> dict[str, object]:
        """The same for programs."""
        if self.compaction is None:
            return {"table": self.table, "error": str(self.failed)}
        before, after = self.compaction.before, self.compaction.after
        return {
            "table": self.table,
            "files_before": before.files,
            "files_after": after.files,
            "bytes_before": before.bytes,
            "bytes_after": after.bytes,
            "files_with_deletion_vectors_before": before.marked,
            "files_with_deletion_vectors_after": after.marked,
            "too_busy": self.compaction.is_busy,
            "unfinished": self.compaction.is_left,
        }


@dataclass
class Maintained:
    """Of a pipeline. `rest`: what was done besides compacting, None when pgrepl was asked to end before;
    `joined_files`: of the changelog, before that."""

    pipeline: str
    tables: list[MaintainedTable] = field(default_factory=list)
    joined_files: int = 0
    is_stopped: bool = False
    app_runs: bool = False
    rest: MaintenanceResult | None = None

    @property
    def failures(self) -> dict[str, PgReplError]:
        """By table or place."""
        own = {table.table: table.failed for table in self.tables if table.failed is not None}
        return {**own, **(self.rest.failed if self.rest is not None else {})}

    @property
    def exit_code(self) -> int:
        """75 also when a table was too busy, or pgrepl was asked to end."""
        is_unfinished = self.is_stopped or any(table.is_busy for table in self.tables)
        codes = {process.exit_code(error) for error in self.failures.values()}
        return max(codes | {process.RETRY_MAY_HELP if is_unfinished else process.DONE})

    def to_text(self) -> str:
        """What was done besides compacting tables."""
        if self.rest is None:
            return f"the changelog: {self.joined_files} files joined\nasked to end: the rest was not begun"
        rest = self.rest
        joined = self.joined_files + rest.joined_files
        lines = [
            f"the changelog: {joined} files joined, {rest.changelog_files} dropped with their hours",
            f"gone: {rest.points} consistent points, {rest.files} files, {rest.log_entries} log entries",
        ]
        if self.app_runs:
            lines.append("the replication app runs: it drops hours of the changelog and deletes its files")
        lines += [f"{path}: left alone: {reason}" for path, reason in rest.left_alone.items()]
        lines += [f"{place}: failed: {error}" for place, error in rest.failed.items()]
        return "\n".join(lines)

    def to_report(self) -> dict[str, object]:
        """All of it for programs."""
        rest = self.rest or MaintenanceResult()
        return {
            "pipeline": self.pipeline,
            "app_running": self.app_runs,
            "stopped_early": self.is_stopped,
            "tables": [table.to_report() for table in self.tables],
            "compacted_changelog_files": self.joined_files + rest.joined_files,
            "expired_changelog_files": rest.changelog_files,
            "deleted_consistent_points": rest.points,
            "deleted_files": rest.files,
            "deleted_log_entries": rest.log_entries,
            "left_alone": dict(rest.left_alone),
            "errors": {place: str(error) for place, error in self.failures.items()},
        }
