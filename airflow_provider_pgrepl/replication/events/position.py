"""The positions of a reader of change events, and the check that no change after one is missing."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from deltalake import DeltaTable

from airflow_provider_pgrepl.errors import ChangelogError, ConfigError
from airflow_provider_pgrepl.replication.changelog.reader import (
    AppTransactions,
    first_commit_after,
    read_durable_lsn,
    read_epoch_number,
    read_floor_lsn,
)
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch

_LAST = 1 << 62
"""An ordinal above that of every change."""
log = logging.getLogger(__name__)
_EARLIEST = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, order=True)
class EventPosition:
    """The position right after the change `ordinal` of the transaction that committed at `commit_lsn`.

    Its text is `<epoch>:<commit LSN>:<ordinal>`, for example `1:0/16B3748:4`. It is also the id of that
    change, which never differs between readers. With `end` as the ordinal, it is the position after the whole
    transaction.
    """

    epoch: Epoch
    commit_lsn: LSN
    ordinal: int

    @classmethod
    def after_transaction(cls, epoch: Epoch, commit_lsn: LSN) -> EventPosition:
        """Return the position after everything that committed at or before `commit_lsn`."""
        return cls(epoch, commit_lsn, _LAST)

    @classmethod
    def after_point(cls, point: ConsistentPoint) -> EventPosition:
        """Return the position after everything that the lake tables contain at a consistent point."""
        return cls.after_transaction(Epoch(point.epoch), LSN(point.lsn))

    @property
    def is_after_transaction(self) -> bool:
        """Return True if the position is after all changes of its transaction."""
        return self.ordinal == _LAST

    @property
    def before_transaction(self) -> EventPosition:
        """Return the position before the transaction if this one is inside it; otherwise this position."""
        # Rows that do not come from a transaction have an ordinal below 0.
        return self if self.ordinal < 0 or self.is_after_transaction else replace(self, ordinal=-1)

    def is_within(self, durable: LSN) -> bool:
        """Return True if a changelog of this epoch with all commits before `durable` reaches this
        position."""
        # Rows that do not come from a transaction precede the one at their LSN, which need not exist yet.
        return self.commit_lsn < durable or (self.commit_lsn == durable and self.ordinal < 0)

    @classmethod
    def parse(cls, text: str) -> EventPosition:
        """Parse the text of a position. Raises ConfigError."""
        try:
            epoch, lsn, ordinal = text.split(":")
            ordinal, *rest = ordinal.split(".")
            # The id of one of several events of a change: the other events may come after it.
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


After = str | int | datetime | EventPosition | ConsistentPoint | None
"""A change's id, an LSN, a timestamp, a position, a consistent point, or None for the oldest retained
change."""


def begin_after(changelog: DeltaTable, after: After) -> EventPosition:
    """Return the position that `after` names in the open changelog.

    An LSN or a timestamp belongs to the newest epoch. Raises ConfigError, ChangelogError.
    """
    epoch = read_epoch_number(changelog)
    if after is None:
        return EventPosition.after_transaction(epoch, read_floor_lsn(changelog, epoch))
    if isinstance(after, datetime):
        return EventPosition.after_transaction(epoch, _before_moment(changelog, epoch, after))
    position = _position(after, epoch)
    must_have_state = not isinstance(after, int) and not (isinstance(after, str) and ":" not in after)
    if position.epoch > epoch:
        raise ConfigError(
            f"after: {position} is of epoch {position.epoch}, the changelog is in epoch {epoch}",
            "check that this is the lake from which it came",
        )
    if not 0 <= position.commit_lsn < 1 << 63:
        raise ConfigError(f"after: {position.commit_lsn} is no LSN of a changelog")
    durable = read_durable_lsn(changelog)
    if position.epoch == epoch and durable and not position.is_within(durable):
        beyond = f"after: {position} is beyond {durable}, up to which the changelog holds everything"
        if must_have_state:
            raise ConfigError(
                beyond,
                "check that the position comes from this lake, and that the lake was not restored"
                " from a copy",
            )
        log.warning("%s: nothing is read until it has come there", beyond)
    return position


def _position(after: str | int | EventPosition | ConsistentPoint, epoch: Epoch) -> EventPosition:
    if isinstance(after, EventPosition):
        return after
    if isinstance(after, ConsistentPoint):
        return EventPosition.after_point(after)
    if isinstance(after, int) and not isinstance(after, bool):
        return EventPosition.after_transaction(epoch, LSN(after))
    if not isinstance(after, str):
        raise ConfigError(
            f"after: a {type(after).__name__} is no place",
            "give a change's id, an LSN, a point or a datetime",
        )
    if ":" in after:
        return EventPosition.parse(after)
    try:
        return EventPosition.after_transaction(epoch, LSN.parse(after))
    except ValueError:
        raise ConfigError(
            f"after: {after!r} is neither the id of a change nor an LSN",
            "give it as 1:0/16B3748:4 or 0/16B3748",
        ) from None


def _before_moment(changelog: DeltaTable, epoch: Epoch, moment: datetime) -> LSN:
    """Return the LSN right before the first transaction that committed later than `moment`.

    If there is none yet, returns the LSN before the next transaction. Raises ConfigError for a timestamp
    without a time zone, ChangelogError if an earlier epoch has later transactions or retention may have
    dropped some.
    """
    if moment.tzinfo is None:
        raise ConfigError(f"after: {moment} has no time zone", "give one, as datetime.now(UTC)")
    for earlier in range(1, epoch):
        if first_commit_after(changelog, Epoch(earlier), moment) is not None:
            raise ChangelogError(
                f"transactions of epoch {earlier}, which is over, committed later than {moment}",
                "read the tables from the lake at a consistent point of the newest epoch, then go on with"
                " after= that point",
            )
    found, floor = first_commit_after(changelog, epoch, moment), read_floor_lsn(changelog, epoch)
    if floor and found == first_commit_after(changelog, epoch, _EARLIEST):
        raise ChangelogError(
            f"no transaction is kept that committed at or before {moment}: some after it may be gone",
            "changelog_retention_h says how long they are kept; after=None begins with the oldest",
        )
    if found is None:
        return LSN(max(0, read_durable_lsn(changelog) - 1))
    return LSN(found - 1)


def check_kept(changelog: AppTransactions, position: EventPosition) -> None:
    """Raise ChangelogError if the open changelog no longer holds all changes after `position`."""
    floor = read_floor_lsn(changelog, position.epoch)
    whole = EventPosition.after_transaction(position.epoch, floor)
    if position.commit_lsn == floor and not position.is_after_transaction:
        raise ChangelogError(
            f"the transaction at {floor} is gone, and with it all that came in it after {position}",
            f"if that was its last change nothing is missing: go on with after={str(whole)!r}",
        )
    if position.commit_lsn < floor:
        raise ChangelogError(
            f"changes up to {floor} are gone from the changelog, those after {position} are asked for",
            "changelog_retention_h says how long they are kept. Read the tables from the lake at a consistent"
            " point, then go on with after= that point",
        )
