"""source/publication.py: messages about tables that stay in a publication."""

from __future__ import annotations

import pytest

from airflow_provider_pgrepl.replication.source import publication
from demo.postgres import free_port
from tests.support.announced import relation


def test_table_that_could_not_be_removed_from_publication_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    no_server = f"host=127.0.0.1 port={free_port()} dbname=shop user=nobody"
    publication._take_out(no_server, "my-pub", [relation(16412, "id")], 1.0)
    (record,) = caplog.records
    assert 'tables that were not copied: "public"."t16412" (cannot connect' in record.getMessage()
    assert 'ALTER PUBLICATION "my-pub" DROP TABLE "public"."t16412"' in record.getMessage()
