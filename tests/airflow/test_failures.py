"""Errors and exit codes as Airflow's exceptions; arguments as templates leave them."""

from __future__ import annotations

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.hooks.pipeline import read_flag, read_pipeline, read_tables
from airflow_provider_pgrepl.operators.failures import failure_of, translated


@pytest.mark.parametrize(
    ("error", "failure"),
    [(errors.PrivilegeError, AirflowFailException), (errors.BusyError, AirflowException)],
)
def test_an_error_becomes_the_failure_its_class_asks_for(
    error: type[errors.PgReplError], failure: type[AirflowException]
) -> None:
    with pytest.raises(AirflowException) as caught, translated():
        raise error("what happened", "what to do")
    assert type(caught.value) is failure
    assert "what happened" in str(caught.value)
    assert "what to do" in str(caught.value)


def test_an_error_is_shown_once_and_with_its_cause() -> None:
    cause = OSError("what the system said")
    with pytest.raises(AirflowException) as plain, translated():
        raise errors.PrivilegeError("what happened", "what to do")
    assert plain.value.__cause__ is None
    assert plain.value.__suppress_context__
    with pytest.raises(AirflowException) as caused, translated():
        raise errors.PrivilegeError("what happened", "what to do") from cause
    assert caused.value.__cause__ is cause


@pytest.mark.parametrize(
    ("code", "failure"), [(78, AirflowFailException), (75, AirflowException), (137, AirflowException)]
)
def test_an_exit_code_becomes_a_failure_with_the_application_s_own_words(
    code: int, failure: type[AirflowException]
) -> None:
    raised = failure_of(code, "slot pgrepl_shop is lost")
    assert type(raised) is failure
    assert str(code) in str(raised)
    assert "slot pgrepl_shop is lost" in str(raised)


@pytest.mark.parametrize(
    ("given", "tables"),
    [
        (None, []),
        ("", []),
        ("None", []),
        ([], []),
        ("[]", []),
        (["public.a", "public.b"], ["public.a", "public.b"]),
        ("public.a, public.b", ["public.a", "public.b"]),
        ("['public.a', 'public.b']", ["public.a", "public.b"]),
    ],
)
def test_tables_may_be_given_in_the_forms_that_templates_leave(given: object, tables: list[str]) -> None:
    assert read_tables(given) == tables  # type: ignore[arg-type]


@pytest.mark.parametrize(("given", "flag"), [(True, True), ("True", True), ("false", False), (False, False)])
def test_a_flag_may_come_from_a_template(given: bool | str, flag: bool) -> None:
    assert read_flag("new_epoch", given) is flag


@pytest.mark.parametrize("given", ["", "yes", "{{ params.x }}"])
def test_a_flag_is_never_guessed(given: str) -> None:
    with pytest.raises(errors.ConfigError, match="new_epoch"):
        read_flag("new_epoch", given)


def test_a_pipeline_may_be_given_in_any_of_its_forms(tmp_path: object) -> None:
    fields = {"name": "shop", "lake": "/lake", "tables": ["public.a"]}
    pipeline = read_pipeline(fields)
    assert read_pipeline(pipeline) == pipeline
    assert read_pipeline(pipeline.to_json()) == pipeline
