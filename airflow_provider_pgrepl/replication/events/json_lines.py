"""Changes as lines of JSON, for whatever reads them from a pipe."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from pathlib import Path

from airflow_provider_pgrepl.replication.events.beginning import After
from airflow_provider_pgrepl.replication.events.change_reader import ChangeReader
from airflow_provider_pgrepl.replication.events.formats.json_format import to_json
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline


def json_lines(
    lake: str | Path | Pipeline,
    tables: Collection[str] | None = None,
    after: After = None,
    *,
    follow: bool = False,
    poll_s: float = 0.5,
) -> Iterator[str]:
    """Some lines at a time, each as `to_json` has it. Arguments and errors are those of `stream`."""
    reader = ChangeReader(lake, tables, after=after)
    while True:
        for batch in reader.read():
            yield "".join(f"{to_json(change)}\n" for change in batch)
        if not follow:
            return
        time.sleep(poll_s)
