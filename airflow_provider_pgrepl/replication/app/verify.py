"""The verification app: compares lake tables with the source at one LSN.

    verify --pipeline FILE.json                     all tables of the pipeline
    verify --pipeline FILE.json --tables a.b,c.d    these tables
    verify --pipeline FILE.json --sample 1%         a random sample of the source's pages
    verify --pipeline FILE.json --check text        by the text that the server writes for each value
    verify --pipeline FILE.json --repair            the lake's rows that differ are replaced

A temporary slot exports a snapshot and is dropped as soon as a keeper has imported it, so that the comparison
retains no WAL. The replication app has to run, so that the changelog reaches the snapshot.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from airflow_provider_pgrepl.errors import ConfigError, escaped
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.runtime.compiled_loops import begin_compiling
from airflow_provider_pgrepl.replication.runtime.process_io import leave_result
from airflow_provider_pgrepl.replication.runtime.start_queue import StartTurn
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.spark.session import LazySession, has_local_jvm
from airflow_provider_pgrepl.replication.state.tables import TableState

from . import process
from .access import Access
from .epoch import refuse_without_lake
from .evidence import check_followed, gather
from .ownership import check_ours
from .process import TEXT, of_verify
from .spark_start import start_spark
from .start_check import check_recorded
from .verification import Verification, VerifyReport
from .verify_repair import repair_tables, resume_interrupted

log = logging.getLogger(__name__)

DIFFERENT, NOT_COMPARED = 1, 2
"""Exit codes: a table differs; none differs, but a table could not be compared."""


@contextmanager
def opened(
    access: Access,
    timeout_s: float,
    *,
    shows_keys: bool = False,
    percent: float | None = None,
    by_text: bool = False,
) -> Iterator[Verification]:
    """Check that source, lake and state belong together, and open them. Raises what the checks raise.

    Raises BusyError, which names the holder, while another verification of the pipeline runs.
    """
    pipeline = access.pipeline
    refuse_without_lake(pipeline, "verify", "there is nothing to compare")
    with access.state_db("verify") as state_db, access.source("verify") as source:
        evidence = gather(pipeline, state_db, source)
        check_ours(evidence)
        check_followed(evidence)
        if evidence.epoch is None:
            raise ConfigError("this pipeline has no epoch yet", "run the snapshot app first")
        state_db.lock(pipeline.name, "verify")
        name = f"verify {pipeline.name}"
        turn = StartTurn(name)
        session = LazySession(lambda: start_spark(name, turn))
        try:
            if has_local_jvm():
                session.begin()
                # An exported snapshot would hold back VACUUM during the wait.
                turn.await_turn()
            records = state_db.read_tables(pipeline.name)
            yield Verification(
                access,
                source,
                state_db,
                evidence.epoch,
                records,
                session,
                timeout_s,
                shows_keys,
                percent,
                by_text,
            )
        finally:
            session.stop()


def verify(
    access: Access,
    tables: Collection[TableName] | None = None,
    *,
    timeout_s: float = process.VERIFY_TIMEOUT_S,
    shows_keys: bool = False,
    percent: float | None = None,
    by_text: bool = False,
    repairs: bool = False,
) -> VerifyReport:
    """Compare lake tables with the source. Raises PgReplError.

    :param tables: None or empty: all tables of the pipeline
    :param timeout_s: how long to wait until the changelog has reached the snapshot
    :param shows_keys: list the keys of up to 100 rows of each kind of difference
    :param percent: compare a random sample of the source's pages, None: all
    :param by_text: compare the server's text of each value with the text that is made from the lake
    :param repairs: repair the tables that differ; not with `percent` or `by_text`
    """
    if repairs and by_text:
        raise ConfigError(
            "--repair cannot be combined with --check text",
            "leave out --check: a repair compares values in the types of the lake",
        )
    if repairs and percent is not None:
        raise ConfigError(
            "--repair cannot be combined with --sample", "leave out --sample: a repair compares whole tables"
        )
    with opened(access, timeout_s, shows_keys=shows_keys, percent=percent, by_text=by_text) as run:
        check_recorded(tables or (), run.records)
        if repairs:
            resume_interrupted(run)
        known = (table for table, record in run.records.items() if record.state is not TableState.REMOVED)
        report = run.run(tables or set(known))
        if repairs:
            repair_tables(run, report)
        return report


def exit_code(report: VerifyReport) -> int:
    """Return 0 if all tables are equal, 1 if one differs, 2 if one could not be compared."""
    statuses = {table.status for table in report.tables.values()}
    if "different" in statuses:
        return DIFFERENT
    return NOT_COMPARED if "not_compared" in statuses else process.DONE


def main(argv: Sequence[str]) -> int:
    """Run the app and return its exit code."""
    return process.run("verify", argv, of_verify, _run)


def _run(pipeline: Pipeline, arguments: argparse.Namespace) -> int:
    begin_compiling()
    try:
        tables = [TableName.parse(name) for name in arguments.tables.split(",") if name.strip()]
    except ValueError as error:
        raise ConfigError(f"--tables: {error}") from None
    report = verify(
        Access.from_environment(pipeline),
        tables,
        timeout_s=arguments.timeout,
        shows_keys=arguments.show_keys,
        percent=arguments.sample,
        by_text=arguments.check == TEXT,
        repairs=arguments.repair,
    )
    found = report.to_json()
    leave_result(found)
    lines = json.dumps(found, indent=2) if arguments.json else escaped(report.to_text())
    sys.stdout.write(f"{lines}\n")
    return exit_code(report)
