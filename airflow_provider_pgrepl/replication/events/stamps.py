"""Stamps: numbers of events, of which each is above all before it, and none is below its commit LSN."""

from __future__ import annotations

from airflow_provider_pgrepl.replication.postgres.lsn import LSN

RESERVE = 1 << 24
"""More events than are sent before a publisher writes down how far its stamps have got."""


class Stamps:
    """Consumers that pass over what is not above the last that they had lose nothing, and get again at most
    what they had: whatever is sent again has higher stamps than what may have been sent before."""

    def __init__(self) -> None:
        self.last = 0

    def next(self, commit_lsn: LSN) -> int:
        """For a change of the transaction that committed there, which comes after all that had a stamp."""
        self.last = max(self.last + 1, commit_lsn)
        return self.last


def above_all(written_down: int, durable: LSN) -> int:
    """At or above each stamp that an earlier run may have given: events that it sent were durable, and had
    no higher commit LSN than what is durable now."""
    return max(written_down, durable) + RESERVE
