"""The operator that compares lake tables with their source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.sdk.exceptions import AirflowFailException

from airflow_provider_pgrepl.hooks.pipeline import parse_tables, read_flag, read_tables
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.start_check import check_verification
from airflow_provider_pgrepl.spark_driver.follow import AppEnd

from .spark_app import SparkAppOperator

_DIFFERENT = 1


class PgVerifyOperator(SparkAppOperator):
    """Compare lake tables with the source at one LSN. Changes neither, except lake tables with `repair`.

    The replication app has to run, so that the changelog reaches the LSN at which the source is read.
    A table that differs fails the task without retries. A table that cannot be compared fails the try.

    :param tables: compare these tables; None or empty: all (templated)
    :param check: compare `values` in the types of the lake, or the `text` that the source's server writes for
        each value (templated)
    :param sample: compare a random sample of the source's pages, as `1%`; None or empty: all rows (templated)
    :param show_keys: name the keys of up to 100 rows of each kind of difference in the log and in XCom
        (templated)
    :param repair: replace the rows of the lake that differ by the source's; not with `sample`, or `check`
        `text` (templated)
    :param timeout_s: seconds to wait until the changelog has reached the source's snapshot

    Other parameters: see SparkAppOperator. XCom: the report of `pgrepl verify --json`, also if tables differ.
    """

    app = "verify"
    template_fields: Sequence[str] = (
        *SparkAppOperator.template_fields,
        "tables",
        "check",
        "sample",
        "show_keys",
        "repair",
    )

    def __init__(
        self,
        *,
        tables: Sequence[str] | str | None = None,
        check: str = "values",
        sample: str | float | None = None,
        show_keys: bool | str = False,
        repair: bool | str = False,
        timeout_s: float = 600.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.tables = tables
        self.check = check
        self.sample = sample
        self.show_keys = show_keys
        self.repair = repair
        self.timeout_s = timeout_s

    def app_arguments(self) -> list[str]:
        arguments = [f"--timeout={self.timeout_s:g}"]
        if tables := read_tables(self.tables):
            arguments += ["--tables", ",".join(tables)]
        if self.check != "values":
            arguments.append(f"--check={self.check}")
        if self.sample:
            arguments.append(f"--sample={self.sample}")
        if read_flag("show_keys", self.show_keys):
            arguments.append("--show-keys")
        if read_flag("repair", self.repair):
            arguments.append("--repair")
        return arguments

    def check_start(self, access: Access) -> None:
        check_verification(access, parse_tables(read_tables(self.tables)))

    def execute(self, context: Any) -> Any:
        self._context = context
        return super().execute(context)

    def _conclude(self, end: AppEnd) -> Any:
        if end.exit_code and end.result:
            self._context["ti"].xcom_push(key="return_value", value=end.result)
            # Spark ends with the same code when it crashes, but leaves no result then.
            differing = [table["table"] for table in end.result["tables"] if table["status"] == "different"]
            if end.exit_code == _DIFFERENT and differing:
                raise AirflowFailException(f"different from the source: {', '.join(differing)}")
        return super()._conclude(end)
