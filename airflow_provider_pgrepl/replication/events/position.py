"""Where a reader of change events is: after one change, in the one order that all changes have."""

from __future__ import annotations

from dataclasses import dataclass, replace

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.lake.point_files import ConsistentPoint
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch

_LAST = 1 << 62
"""Above every ordinal."""


@dataclass(frozen=True, order=True)
class EventPosition:
    """After the change `ordinal` of the transaction that committed at `commit_lsn`, in an epoch.

    Its text, `<epoch>:<commit LSN>:<ordinal>` as in `1:0/16B3748:4`, is also the id of that change: it is the
    same whenever and by whomever the change is read. With `end` for an ordinal: after all of a transaction.
    """

    epoch: Epoch
    commit_lsn: LSN
    ordinal: int

    @classmethod
    def after_transaction(cls, epoch: Epoch, commit_lsn: LSN) -> EventPosition:
        """After all that committed at or before an LSN."""
        return cls(epoch, commit_lsn, _LAST)

    @classmethod
    def after_point(cls, point: ConsistentPoint) -> EventPosition:
        """After all that the lake's tables show at a consistent point."""
        return cls.after_transaction(Epoch(point.epoch), LSN(point.lsn))

    @property
    def is_after_transaction(self) -> bool:
        """Whether nothing of its transaction comes after it."""
        return self.ordinal == _LAST

    @property
    def before_transaction(self) -> EventPosition:
        """Before a transaction that it is amid; else itself."""
        # What no transaction brought has an ordinal below 0.
        return self if self.ordinal < 0 or self.is_after_transaction else replace(self, ordinal=-1)

    def is_within(self, durable: LSN) -> bool:
        """Whether a changelog of its epoch that holds all commits before `durable` reaches up to it."""
        # What no transaction brought stands before the one at its LSN, which need not be there yet.
        return self.commit_lsn < durable or (self.commit_lsn == durable and self.ordinal < 0)

    @classmethod
    def parse(cls, text: str) -> EventPosition:
        """Raises ConfigError."""
        try:
            epoch, lsn, ordinal = text.split(":")
            ordinal, *rest = ordinal.split(".")
            # One of several events of a change: the others may come after it.
            number = _LAST if ordinal == "end" else int(ordinal) - bool(rest and int(rest[0]))
            if not -(1 << 62) < number <= _LAST:
                raise ValueError(text)
            return cls(Epoch(int(epoch)), LSN.parse(lsn), number)
        except ValueError:
            raise ConfigError(
                f"{text!r} is not the id of a change", "give one as 1:0/16B3748:4: epoch, commit LSN, ordinal"
            ) from None

    def __str__(self) -> str:
        return f"{self.epoch}:{self.commit_lsn}:{'end' if self.is_after_transaction else self.ordinal}"
