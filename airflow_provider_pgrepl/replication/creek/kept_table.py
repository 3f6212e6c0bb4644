"""Where a consumer is: in the stream of a database, and with each of its tables."""

from __future__ import annotations

from dataclasses import dataclass, replace

from airflow_provider_pgrepl.replication.creek.messages import WalChange
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName

UP_TO_DATE = -1


@dataclass(frozen=True)
class KeptStream:
    """All messages up to `sequence` are applied, but for tables that failed. `made`: when the server made the
    stream, since one that is made anew counts from 1 again."""

    made: str = ""
    sequence: int = 0


@dataclass(frozen=True)
class KeptTable:
    """`stamp`: of the last change in it; `change`: its id, empty when that is not known. `sequence`: up to
    which message it is, where that is less than the stream, else UP_TO_DATE. `error`: why nothing after that
    is applied. `target_oid`: of the table that was filled; 0 if it is not recorded yet."""

    source: TableName
    target: TableName
    stamp: LSN
    change: str
    sequence: int = UP_TO_DATE
    error: str = ""
    target_oid: int = 0

    @property
    def is_behind(self) -> bool:
        """Whether it has yet to come to where the stream is."""
        return self.sequence != UP_TO_DATE

    def read_to(self, sequence: int, stream: int) -> KeptTable:
        """Once messages up to one were read, where others are at `stream`."""
        if not self.is_behind or self.error:
            return self
        return replace(self, sequence=UP_TO_DATE if sequence >= stream else sequence)

    def has(self, change: WalChange) -> bool:
        """Whether a change is in the table. One that is sent again has a higher stamp, and the same id."""
        if change.id and self.change:
            return EventPosition.parse(change.id) <= EventPosition.parse(self.change)
        return change.lsn <= self.stamp
