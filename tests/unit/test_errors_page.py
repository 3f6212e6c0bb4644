"""The table of docs/reference/errors.md is generated from the error classes."""

from __future__ import annotations

import pytest

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import PgReplError
from tests.support.errors_page import PAGE, text

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PgReplError)]


def test_page_matches_the_error_classes() -> None:
    assert PAGE.read_text(encoding="utf-8") == text(), "run .venv/bin/python -m tests.support.errors_page"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not PgReplError])
def test_each_class_documents_itself_and_does_not_inherit_its_advice(kind: type[PgReplError]) -> None:
    assert vars(kind).get("advice"), "set advice: what to do, as an instruction"
    assert kind.__doc__, "say what happened"
    assert "|" not in kind.__doc__ + kind.advice, "it would end the cell of the Markdown table"
