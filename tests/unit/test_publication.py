"""source/publication.py: messages about tables that stay in a publication."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest

from airflow_provider_pgrepl.errors import SourceConnectionError
from airflow_provider_pgrepl.replication.source import publication
from tests.support.announced import relation


def test_table_that_could_not_be_removed_from_publication_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> NoReturn:
        raise SourceConnectionError("cannot connect")

    monkeypatch.setattr(publication, "connect", refuse)
    publication._take_out("", "my-pub", [relation(16412, "id")], 1.0)
    (record,) = caplog.records
    assert 'tables that were not copied: "public"."t16412" (cannot connect' in record.getMessage()
    assert 'ALTER PUBLICATION "my-pub" DROP TABLE "public"."t16412"' in record.getMessage()
