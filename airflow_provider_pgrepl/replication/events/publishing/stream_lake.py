"""StreamLake: of which lake the events in a stream of changes are.

Streams are found by names, and another pipeline may have the same: staging, with the settings of production.
Its events, and its snapshots, would replace what consumers have.
"""

from __future__ import annotations

from typing import Any

from airflow_provider_pgrepl.errors import TargetError
from airflow_provider_pgrepl.replication.changelog.layout import LAKE_APP, changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import lake_id, open_changelog

LAKE = "Pgrepl-Lake"
"""Header of a change: the id of the lake that it came from."""


class StreamLake:
    """A publisher's own lake. Raises NoChangelogError, LakeUnavailableError."""

    def __init__(self, lake_root: str) -> None:
        self._uri = changelog_uri(lake_root)
        self.id = lake_id(open_changelog(self._uri))

    def check(self, stream: str, headers: Any) -> None:
        """Raise TargetError where the last message of the stream, with these headers, came from another lake.

        Earlier versions, and creek, did not say from which.
        """
        found = (headers or {}).get(LAKE)
        if not found or found == self.id:
            return
        # A changelog that took the place of a lost one has the mark of that.
        if open_changelog(self._uri).transaction_version(f"{LAKE_APP}{found}") is not None:
            return
        raise TargetError(
            f"NATS: the last event in stream {stream} is of another lake ({found}) than this one ({self.id}):"
            " another pipeline publishes there. Nothing was sent",
            "check the connection of NATS (conn_id, or PGREPL_TARGET_URI), and that this is the pipeline file"
            " meant; or give the publisher another `database` or `namespace`. If this lake has taken the"
            f" place of that one, delete stream {stream}: consumers then have to take all tables whole again",
        )
