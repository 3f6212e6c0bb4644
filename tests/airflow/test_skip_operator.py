"""The operator that skips a transaction which a real server cannot send."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.postgres import Server
from tests.airflow.test_drift_sensor import Said, provide
from tests.support.encoded_database import NOT_UTF8, encoded_database, insert_bytes
from tests.support.kept import Kept
from tests.support.replicated import execute


@pytest.mark.slow
def test_skip_is_reported_first_and_stops_only_tables_that_may_have_changed(
    server: Server, tmp_path: Path, connection: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    from airflow_provider_pgrepl.operators.skip import PgSkipTransactionOperator

    with encoded_database(server, "SQL_ASCII") as dsn:
        execute(dsn, "create table u(a int primary key, b text)")
        kept = Kept(dsn, tmp_path, ("public.t", "public.u"))
        kept.take("public.t", "public.u")
        provide(monkeypatch, dsn)
        insert_bytes(dsn, NOT_UTF8["SQL_ASCII"], 2)
        lsn = str(kept.unsendable())

        def skip(**options: object) -> object:
            given = {"lsn": lsn, "unchanged_tables": "public.u", **options}
            operator = PgSkipTransactionOperator(task_id="skip", pipeline=kept.pipeline.to_json(), **given)
            return operator.execute(Said().context)

        with pytest.raises(AirflowFailException, match="lsn: is empty"):
            skip(lsn="")
        found = skip(report_only="true")
        assert kept.states() == {"public.t": "streaming", "public.u": "streaming"}
        assert skip() == found
        assert (found["lsn"], found["errored"], found["unchanged"]) == (lsn, ["public.t"], ["public.u"])
        assert kept.states() == {"public.t": "errored", "public.u": "streaming"}
