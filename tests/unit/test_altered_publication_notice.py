"""The releases of the server whose walsenders notice an altered publication."""

from __future__ import annotations

import pytest

from airflow_provider_pgrepl.replication.source import slot


@pytest.mark.parametrize(
    ("version", "told"),
    [
        (140017, False),
        (140018, True),
        (150012, False),
        (150013, True),
        (160008, False),
        (160009, True),
        (170004, False),
        (170005, True),
        (180000, True),
    ],
)
def test_walsenders_notice_altered_publication_since_fixed_minor_releases(
    version: int, *, told: bool
) -> None:
    assert slot.notices_altered_publications(version) is told
