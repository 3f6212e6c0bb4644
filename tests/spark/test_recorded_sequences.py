"""The replication app itself records the values of the source's sequences."""

from __future__ import annotations

from pathlib import Path

from airflow_provider_pgrepl.replication.app import sequences
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
from airflow_provider_pgrepl.replication.lake.sequences import read_recorded
from tests.support.in_process import InProcess
from tests.support.replicated import execute


def test_a_run_that_ends_has_recorded_the_values_at_its_last_point(
    spark, dsn: str, tmp_path: Path, monkeypatch
):
    # Only the last reading is left. It needs the receiver, which must not be stopped before.
    monkeypatch.setattr(sequences, "INTERVAL_S", 3600.0)
    execute(dsn, "create table t (id serial primary key)", "insert into t default values")
    replicated = InProcess(spark, dsn, tmp_path, ("public.t",), sequences=True)
    replicated.snapshot()
    execute(dsn, "insert into t select from generate_series(1, 4)")
    replicated.catch_up()
    recorded = read_recorded(replicated.pipeline.lake_root)
    assert recorded.unread == {}
    (one,) = recorded.values
    last = ConsistentPoints(replicated.pipeline.lake_root).latest()
    assert last is not None
    assert (str(one.name), one.value.last_value, one.value.is_called) == ("public.t_id_seq", 5, True)
    assert one.point == (last.epoch, last.lsn)
    replicated.assert_equal("public.t")
