"""Fixtures of the tests that need a server."""

import pytest


@pytest.fixture
def run(pg):
    """Runs statements in the test's database and returns the rows of the last one; None when it has none."""

    def execute(*statements):
        with pg.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return cursor.fetchall() if cursor.description else None

    return execute
