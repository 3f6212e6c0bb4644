"""The check that the events in a stream of changes come from this publisher's lake.

Streams are found by name, and another pipeline may have the same names: staging with the settings of
production. Its events and snapshots would replace the rows of consumers.
"""

from __future__ import annotations

from typing import Any

from airflow_provider_pgrepl.errors import ConfigError, TargetError, TargetUnavailableError
from airflow_provider_pgrepl.replication.changelog.layout import LAKE_APP, changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import (
    AppTransactions,
    lake_id,
    open_changelog,
    read_durable_lsn,
    read_epoch_number,
)
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.targets.base import NATS_ID

LAKE = "Pgrepl-Lake"
"""The header of a change with the id of the lake that it came from."""


class StreamLake:
    """A publisher's own lake. Raises NoChangelogError, LakeUnavailableError."""

    def __init__(self, lake_root: str) -> None:
        self._uri = changelog_uri(lake_root)
        self.id = lake_id(open_changelog(self._uri))

    def check(self, stream: str, headers: Any) -> None:
        """Check the headers of the stream's last message. Raises TargetError if the message came from another
        lake, TargetUnavailableError if its position is after the end of this lake.

        Messages of earlier versions, and of creek, do not name their lake; they are accepted.
        """
        found = (headers or {}).get(LAKE)
        if not found:
            return
        changelog = open_changelog(self._uri)
        if found == self.id:
            _check_has(changelog, stream, headers[NATS_ID])
            return
        # A changelog that replaced a lost one is marked with the id of the lost one.
        if changelog.transaction_version(f"{LAKE_APP}{found}") is not None:
            return
        raise TargetError(
            f"NATS: the last event in stream {stream} is of another lake ({found}) than this one ({self.id}):"
            " another pipeline publishes there. Nothing was sent",
            "check the connection of NATS (conn_id, or PGREPL_TARGET_URI), and that this is the pipeline file"
            " meant; or give the publisher another `database` or `namespace`. If this lake has taken the"
            f" place of that one, delete stream {stream}: consumers then have to take all tables whole again",
        )


def _check_has(changelog: AppTransactions, stream: str, event: str) -> None:
    """Raise TargetUnavailableError if the event is after the end of the changelog. A copy of the lake has the
    same id: if it sent old events again, they would be the newest to consumers."""
    epoch, durable = read_epoch_number(changelog), read_durable_lsn(changelog)
    try:
        at = EventPosition.parse(event)
    except ConfigError:
        return
    if at.epoch > epoch or (at.epoch == epoch and not at.is_within(durable)):
        raise TargetUnavailableError(
            f"NATS: the last event in stream {stream} is at {at}, beyond what this lake has (up to"
            f" {durable} in epoch {epoch}): the lake is a copy of the lake that publishes there, was"
            " restored from a copy, or is receiving again the changes that it lost in a crash."
            " Nothing was sent",
            "if the replication was just started after a crash of its host, wait. Otherwise check"
            " that `lake` names the lake that publishes there",
        )
