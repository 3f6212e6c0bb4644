import pytest

from airflow_provider_pgrepl.replication.source.server import names_standby

OURS = "pgrepl receive pgrepl_shop"


@pytest.mark.parametrize(
    ("setting", "covers"),
    [
        ("", False),
        ("*", True),
        ('"*"', True),
        ("standby1, standby2", False),
        ("FIRST 1 (standby1, *)", True),
        ("any 2 (standby1, standby2)", False),
        ("1 (standby1)", False),
        (f'ANY 1 ("{OURS}", standby1)', True),
        (f'"{OURS.upper()}"', True),
        ('"pgrepl receive pgrepl_other"', False),
    ],
)
def test_walsender_is_covered_as_the_server_covers_it(setting: str, covers: bool) -> None:
    assert names_standby(setting, OURS) is covers
