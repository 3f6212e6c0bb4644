"""`pgrepl events try` where a library is missing."""

from __future__ import annotations

import sys

import pytest

from airflow_provider_pgrepl.errors import ToolError
from airflow_provider_pgrepl.replication.app import try_events
from airflow_provider_pgrepl.replication.creek import messages


def test_event_in_avro_without_fastavro_raises_tool_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "fastavro", None)
    monkeypatch.delitem(sys.modules, messages.__name__)
    with pytest.raises(ToolError, match="fastavro"):
        try_events._of_avro(b"", "{}")
