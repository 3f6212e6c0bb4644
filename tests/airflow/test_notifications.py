"""Notifiers of PgReplicationOperator: each problem that the app reports is notified once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from airflow.sdk import BaseNotifier

from airflow_provider_pgrepl.operators.replication import PROBLEM, PgReplicationOperator
from tests.airflow.conftest import LAKE

SHOP = {"name": "shop", "lake": LAKE, "tables": ["public.orders"]}


class Pager(BaseNotifier):
    """A notifier that keeps its messages, which are templates."""

    template_fields = ("text",)

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.sent: list[str] = []

    def notify(self, context: Any) -> None:
        self.sent.append(self.text)


def looked(operator: PgReplicationOperator, **status: Any) -> None:
    operator.on_status({}, {"errored": [], "lag_s": 0.0, **status})


def test_errored_table_is_notified_once_until_it_was_repaired() -> None:
    found: list[str] = []
    operator = PgReplicationOperator(
        task_id="t", pipeline=SHOP, on_table_errored=lambda context: found.append(context[PROBLEM]["object"])
    )
    for errored in (["public.a"], ["public.a"], ["public.a", "public.b"], ["public.b"], ["public.a"]):
        looked(operator, errored=errored)
    assert found == ["public.a", "public.b", "public.a"]


def test_lag_is_notified_once_until_it_was_below_half_of_limit() -> None:
    found: list[str] = []
    operator = PgReplicationOperator(
        task_id="t",
        pipeline=SHOP,
        lag_s=60,
        on_lag=[lambda context: found.append(context[PROBLEM]["reason"])],
    )
    for lag_s in (59.0, 60.0, 90.0, 40.0, 61.0, None, 20.0, 70.0):
        looked(operator, lag_s=lag_s)
    assert found == [
        "the lake is 60 s behind the source, above the limit of 60 s",
        "the lake is 70 s behind the source, above the limit of 60 s",
    ]


def test_notifier_of_airflow_renders_problem() -> None:
    pager = Pager("{{ pgrepl_problem.kind }}: {{ pgrepl_problem.reason }}")
    operator = PgReplicationOperator(task_id="t", pipeline=SHOP, on_table_errored=pager)
    looked(operator, errored=["public.a"])
    assert pager.sent == ["table_errored: table public.a is errored"]


def test_notification_has_error_and_hint_of_the_table() -> None:
    found: list[dict[str, str]] = []
    operator = PgReplicationOperator(
        task_id="t", pipeline=SHOP, on_table_errored=lambda context: found.append(context[PROBLEM])
    )
    error = {"error": "DriftError", "reason": "column vat was renamed", "hint": "resnapshot the table"}
    looked(operator, errored=["public.a"], errors={"public.a": error})
    assert found == [
        {
            "kind": "table_errored",
            "object": "public.a",
            "reason": "table public.a is errored: DriftError: column vat was renamed",
            "hint": "resnapshot the table",
        }
    ]


def test_failing_callback_is_logged_without_its_text_and_others_are_called(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found: list[str] = []

    def fail(_: Any) -> None:
        raise ValueError("a token")

    operator = PgReplicationOperator(
        task_id="t", pipeline=SHOP, on_table_errored=[fail, lambda context: found.append("called")]
    )
    with caplog.at_level(logging.ERROR):
        looked(operator, errored=["public.a"])
    assert found == ["called"]
    assert "the notification of table_errored failed: " in caplog.text
    assert "a token" not in caplog.text
