"""Tables that only the pipeline file or only the records have, in the log of replicate and in status."""

from __future__ import annotations

from pathlib import Path

from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.status.status import read_status
from tests.support.events_only import EventsOnly
from tests.support.replicated import execute


def test_replicate_and_status_warn_of_tables_that_differ(dsn: str, tmp_path: Path) -> None:
    execute(dsn, *(f"create table {name}(id int primary key)" for name in ("kept", "gone", "new")))
    events = EventsOnly(dsn, tmp_path, ("public.kept", "public.gone"), "nats://127.0.0.1:1")
    events.take()
    assert not read_status(events.pipeline, events.access).warnings
    events.configure(tables=("public.kept", "public.new"))
    expected = (
        "no longer in the pipeline file, but still replicated: public.gone; add them to the file again, or ",
        "in the pipeline file, and not replicated: public.new; add them: ",
    )

    status = read_status(events.pipeline, events.access)
    for found in (status.problems, status.warnings):
        assert [each for each in expected if not any(one.startswith(each) for one in found)] == []

    assert events.run_here("replicate", "--until", "caught-up") == process.DONE, events.log_tail()
    log = events.log.read_text()
    assert [each for each in expected if each not in log] == []
