"""A model of a lake table's rows after some changes, for any policies: transaction by transaction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

from tests.support.model import Change, Model, Row

Key = tuple[str | None, ...]


@dataclass
class LakeModel:
    """The source's rows, and the lake's by key: (row, gone, commit LSN).

    Without key the lake is a list of (row, commit LSN), of which the newest of equal ones goes first.
    """

    key: tuple[int, ...]
    full: bool
    soft: bool
    ignoring: bool
    held: dict[Key, tuple[Row, bool, int]] = field(default_factory=dict)
    copies: list[tuple[Row, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.source = Model(self.key, self.full)

    def apply(self, changes: Iterable[Change]) -> None:
        for lsn, transaction in groupby(changes, lambda change: change.commit_lsn):
            if self.key:
                self._by_key(lsn, list(transaction))
            else:
                for change in transaction:
                    self._by_value(lsn, change)

    def rows(self) -> Iterator[tuple[object, ...]]:
        if not self.key:
            return ((*row, lsn) for row, lsn in self.copies)
        if self.soft:
            return ((*row, gone, lsn) for row, gone, lsn in self.held.values())
        return ((*row, lsn) for row, _, lsn in self.held.values())

    def _key(self, row: Row) -> Key:
        return tuple(row[index] for index in self.key)

    def _by_key(self, lsn: int, transaction: list[Change]) -> None:
        seen = {row_id: self._key(row) for row_id, row in self.source.rows.items()}
        left: dict[Key, Row] = {}
        made: dict[int, Row] = {}
        for change in transaction:
            before = dict(self.source.rows)
            self.source.apply(change)
            after = self.source.rows
            for row_id, row in before.items():
                at_home = seen.get(row_id) == self._key(row)
                stays = row_id in after and self._key(after[row_id]) == self._key(row)
                if at_home and not stays and not (change.op == "T" and self.ignoring):
                    left[self._key(row)] = row
                if row_id not in after and not (change.op == "T" and self.ignoring):
                    made.pop(row_id, None)
            if change.op in "IU":
                # The source's model has the row that it changed at the end.
                row_id = next(reversed(after))
                made[row_id] = after[row_id]
        self._settle(lsn, left, made)

    def _settle(self, lsn: int, left: dict[Key, Row], made: dict[int, Row]) -> None:
        for key, row in left.items():
            if self.soft:
                self.held[key] = (row, True, lsn)
            else:
                self.held.pop(key, None)
        passed_over = {row_id for row_id in made if row_id not in self.source.rows}
        for row_id in sorted(made, key=lambda row_id: row_id not in passed_over):
            self.held[self._key(made[row_id])] = (made[row_id], False, lsn)

    def _by_value(self, lsn: int, change: Change) -> None:
        if change.op == "T":
            self.copies = self.copies if self.ignoring else []
        if change.op in "UD":
            place = max(n for n, (row, _) in enumerate(self.copies) if row == change.old)
            del self.copies[place]
        if change.op in "IU":
            new = change.new or ()
            row = tuple(
                (change.old or ())[i] if i in change.unchanged else text for i, text in enumerate(new)
            )
            self.copies.append((row, lsn))
