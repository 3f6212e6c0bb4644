"""WaitingChanges: what has come for a table and is not merged yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Portion:
    """Files of a table's changes, which are merged at once. `since`: when the first came (monotonic clock).

    `through`: the version of the changelog at which it ends, None while it may grow. `is_overflow`: there are
    more than fit into one merge, so that they are not kept here.
    """

    paths: tuple[str, ...]
    bytes: int
    since: float
    through: int | None = None
    is_overflow: bool = False

    def with_more(self, other: Portion, limit: int) -> Portion:
        """And what came later."""
        size = self.bytes + other.bytes
        if self.is_overflow or other.is_overflow or (self.bytes and size > limit):
            return replace(self, paths=(), bytes=size, through=other.through, is_overflow=True)
        return replace(self, paths=self.paths + other.paths, bytes=size, through=other.through)


class WaitingChanges:
    """Of one table: portions in the order in which they came, of which the last may grow."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._portions: deque[Portion] = deque()

    @property
    def first(self) -> Portion:
        """What is to be merged next."""
        return self._portions[0]

    @property
    def bytes(self) -> int:
        """Of all."""
        return sum(portion.bytes for portion in self._portions)

    def add(self, portion: Portion) -> None:
        """It has come."""
        if self._portions and self._portions[-1].through is None:
            portion = self._portions.pop().with_more(portion, self._limit)
        self._portions.append(portion)

    def seal(self, through: int) -> None:
        """What has come up to a version of the changelog is merged without what comes later."""
        if self._portions[-1].through is None:
            self._portions[-1] = replace(self._portions[-1], through=through)

    def take(self) -> bool:
        """The first is being merged; whether that was the last."""
        self._portions.popleft()
        return not self._portions
