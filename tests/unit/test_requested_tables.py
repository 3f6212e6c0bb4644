"""Which tables a run of the snapshot app is to take."""

from __future__ import annotations

import pytest

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.app.requested_tables import left_out
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.names import TableName


def test_the_hint_names_new_tables_as_the_command_takes_them() -> None:
    pipeline = Pipeline(name="p", lake="/lake", tables=("public.*",), new_tables="error")
    new = [TableName("public", "z"), TableName("public", "Order lines")]
    with pytest.raises(ConfigError) as caught:
        left_out(pipeline, new)
    assert """--add 'public."Order lines",public.z'""" in caught.value.hint
