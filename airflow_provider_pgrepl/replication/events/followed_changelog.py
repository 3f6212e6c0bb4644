"""FollowedChangelog: the newest state of a changelog, looked at again and again."""

from __future__ import annotations

import hashlib
import time

from airflow_provider_pgrepl.errors import ChangelogError
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.changelog.reader import open_changelog
from airflow_provider_pgrepl.replication.changelog.tail import ChangelogTail
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.storage import open_storage, read_commit, read_commit_actions

_SURE_S = 60.0
"""After so long without a commit the log itself is asked for the newest: some may have been cleaned away."""


class FollowedChangelog:
    """Reads only commits that are new, as long as the log is the one that it knows.

    What is remembered is checked: the last known commit must be there as it was, else all is read again.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._tail: ChangelogTail | None = None
        self._known = b""
        self._record: EpochRecord | None = None
        self._moved_at = 0.0

    def look(self, after: EventPosition) -> tuple[ChangelogTail, bool]:
        """The changelog as it is now, for who goes on after a position or a later one, and whether anything
        has come since the last time.

        Raises NoChangelogError, LakeUnavailableError, ChangelogError when it is not the same any more.
        """
        tail = self._tail
        if tail is None or tail.epoch != after.epoch or not self._is_known(tail):
            return self._open(after), True
        before, described = tail.version, tail.description
        try:
            self._take_new(tail)
            if tail.description != described:
                self._check_same(tail)
        except (OSError, ValueError, KeyError, TypeError):
            # A commit that is not whole, or not of ours: the whole log tells.
            return self._open(after), True
        if tail.version > before:
            self._note(tail)
            return tail, True
        if time.monotonic() - self._moved_at > _SURE_S:
            tail = self._open(after)
        return tail, tail.version > before

    def forget(self) -> None:
        """All is read anew the next time, whatever is known."""
        self._tail = None

    def _open(self, after: EventPosition) -> ChangelogTail:
        above = LSN(max(0, after.commit_lsn - 1))
        tail = ChangelogTail.of(open_changelog(self.uri), after.epoch, above)
        self._check_same(tail)
        self._tail = tail
        self._note(tail)
        return tail

    def _take_new(self, tail: ChangelogTail) -> None:
        filesystem, root = open_storage(self.uri)
        while True:
            try:
                actions = read_commit_actions(filesystem, root, tail.version + 1)
            except FileNotFoundError:
                return
            tail.take(actions)

    def _note(self, tail: ChangelogTail) -> None:
        self._known, self._moved_at = self._digest(tail), time.monotonic()

    def _is_known(self, tail: ChangelogTail) -> bool:
        return bool(self._known) and self._digest(tail) == self._known

    def _digest(self, tail: ChangelogTail) -> bytes:
        """Of the last known commit; nothing when it is gone."""
        commit = read_commit(self.uri, tail.version)
        return b"" if commit is None else hashlib.blake2b(commit).digest()

    def _check_same(self, tail: ChangelogTail) -> None:
        found = tail.record
        known, self._record = self._record or found, found
        if found.epoch == known.epoch and found != known:
            raise ChangelogError(
                f"the changelog under {self.uri} is another one than before: its epoch {found.epoch} began"
                f" at {found.consistent_point}, not at {known.consistent_point}",
                "read the tables from the lake at a consistent point, then go on with after= that point",
            )
