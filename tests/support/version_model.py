"""A model of a table's history after some transactions, which follows rows one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count, groupby

from tests.support.model import Change, Row

Version = tuple[Row, int, int, str]
"""A row, the commit that made it, the commit that ended it, and how (U D T)."""


class VersionModel:
    """One table with a key: `rows` by an id that no update changes, each with the commit that made it.

    `ignoring`: TRUNCATE is ignored, and its rows stay until others have their keys. `is_sure` is False once
    a change could mean two rows: equal ones, which a deferrable key allows temporarily.
    """

    def __init__(
        self, key: Sequence[int], *, full: bool, rows: Iterable[Row], made_at: int, ignoring: bool = False
    ) -> None:
        self._key, self._full, self._ids, self._ignoring = key, full, count(), ignoring
        self._left: dict[int, tuple[Row, int]] = {}
        self.rows = {next(self._ids): (row, made_at) for row in rows}
        self.ended: list[Version] = []
        self.is_sure = True

    def apply(self, changes: Iterable[Change]) -> None:
        """Apply whole transactions, in order."""
        for lsn, transaction in groupby(changes, key=lambda change: change.commit_lsn):
            self._commit(lsn, list(transaction))

    @property
    def open(self) -> list[tuple[Row, int]]:
        return [*self.rows.values(), *self._left.values()]

    def _commit(self, lsn: int, changes: list[Change]) -> None:
        before = self.rows | self._left
        held_by = {self._key_of(row): number for number, (row, _) in self.rows.items()}
        touched: set[int] = set()
        displaced: set[int] = set()
        truncated = False
        for change in changes:
            if change.op == "T":
                if self._ignoring:
                    displaced |= self._leave()
                truncated = not self._ignoring
                self.rows.clear()
                held_by.clear()
                continue
            if change.op == "I":
                deleted = held_by.get(self._key_of(change.new))
                free = deleted is None or deleted in self.rows
                number = next(self._ids) if free else deleted
                row = change.new
            else:
                number = self._find(change.old or change.new)
                old = self.rows.pop(number)[0]
                new = change.new or old
                row = tuple(old[i] if i in change.unchanged else text for i, text in enumerate(new))
            touched.add(number)
            if change.op != "D":
                self.rows[number] = (row, lsn)
        displaced |= self._give_way()
        for number, (row, made_at) in before.items():
            if truncated or number in touched | displaced:
                there = number in self.rows or number in self._left
                how = "T" if truncated or number in displaced else "U" if there else "D"
                self.ended.append((row, made_at, lsn, how))

    def _leave(self) -> set[int]:
        """Ignore a TRUNCATE: its rows stay, and replace those that an earlier one left under their keys."""
        displaced = self._give_way()
        self._left |= self.rows
        return displaced

    def _give_way(self) -> set[int]:
        """Drop the rows left under keys that other rows now have, and return their ids."""
        taken = {self._key_of(row) for row, _ in self.rows.values()}
        displaced = {number for number, (row, _) in self._left.items() if self._key_of(row) in taken}
        for number in displaced:
            del self._left[number]
        return displaced

    def _find(self, image: Row) -> int:
        found = [
            number
            for number, (row, _) in self.rows.items()
            if (row == image if self._full else self._key_of(row) == self._key_of(image))
        ]
        self.is_sure = self.is_sure and len(found) == 1
        return found[0]

    def _key_of(self, row: Row) -> Row:
        return tuple(row[i] for i in self._key)
