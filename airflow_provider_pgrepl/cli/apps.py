"""The `pgrepl` commands that run the packaged apps and copy the packaged files."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NoReturn

from airflow_provider_pgrepl.errors import ConfigError, ToolError
from airflow_provider_pgrepl.replication.app.process import (
    AddArguments,
    as_given,
    of_publish,
    of_replicate,
    of_resync,
    of_snapshot,
    of_verify,
    source_dsn,
)
from airflow_provider_pgrepl.replication.runtime import spark_submit
from airflow_provider_pgrepl.replication.runtime.terminal import terminal_columns
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.spark_driver import supervisor

from .command import Command, Option

DASHBOARDS = Path(__file__).resolve().parents[1] / "dashboards"
GRAFANA, RULES = "pgrepl_grafana.json", "pgrepl_rules.yaml"
_EPILOG = "Options after `--` are passed to spark-submit, as in: -- --master spark://host:7077"


def _run(_: object, arguments: argparse.Namespace) -> NoReturn:
    run_app(arguments.command.name, arguments.pipeline, _own(arguments), arguments.spark)


def _resync(_: object, arguments: argparse.Namespace) -> NoReturn:
    resync = True if arguments.tables is None else arguments.tables
    options = as_given({"resync": resync, "give_up": arguments.give_up})
    run_app("snapshot", arguments.pipeline, options, arguments.spark)


def _own(arguments: argparse.Namespace) -> list[str]:
    ours = ("command", "pipeline", "spark")
    return as_given({name: value for name, value in vars(arguments).items() if name not in ours})


def _copy(arguments: argparse.Namespace) -> int:
    copied = copy_dags(arguments.copy_to)
    sys.stdout.write("".join(f"{file}\n" for file in copied))
    sys.stdout.write(
        "their pipeline is in pipeline.json there, or in the file that PGREPL_PIPELINE_FILE names\n"
    )
    return 0


def _copy_dashboards(arguments: argparse.Namespace) -> int:
    copied = copy_dashboards(arguments.copy_to)
    sys.stdout.write("".join(f"{file}\n" for file in copied))
    sys.stdout.write("import the dashboard into Grafana, and name the rules in rule_files of Prometheus\n")
    return 0


def run_app(name: str, pipeline_file: str, own: Sequence[str], spark: Sequence[str]) -> NoReturn:
    """Replace this process with the supervisor of spark-submit, which runs the app.

    The supervisor forwards SIGTERM to the driver only, because spark-submit is a JVM that would end at once.
    In cluster mode the driver runs on another host, and this process becomes spark-submit itself. Without
    lake tables it becomes the app itself.

    :param own: options of the app
    :param spark: options of spark-submit
    :raises ToolError: if Spark or Java is missing
    :raises ConfigError: if the driver runs on this host and its DSN is missing
    :raises LakeError: if the driver runs on this host, which cannot write the lake
    """
    pipeline = Pipeline.read(pipeline_file)
    if not pipeline.has_lake_tables:
        _run_without_spark(name, pipeline_file, own, spark)
    is_here = _value(spark, "--deploy-mode") != "cluster"
    if is_here:
        source_dsn()
        # Imported here: parsing arguments needs no library. The app checks this only after Spark has
        # started.
        from airflow_provider_pgrepl.replication.app.start_check import check_storage

        check_storage(pipeline)
    spark_submit.java()
    spark_submit.allow_open_files()
    submit = spark_submit.spark_submit()
    more = _driver_python(spark) if is_here else []
    # The user's options come after this package's, so that they take effect.
    application = spark_submit.application(name)
    command = [submit, *more, *spark, application, "--pipeline", pipeline_file, *own]
    if is_here:
        parent = [sys.executable, "-P", supervisor.__file__, "--application", application, "--"]
        command = [*parent, *command]
    python = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    environment = {**python, **spark_submit.quiet_logging(), **terminal_columns(), **os.environ}
    sys.stdout.flush()
    environment |= spark_submit.small_jvm(environment) | spark_submit.readable_names(command)
    os.execve(command[0], command, environment)  # noqa: S606 - the app itself, in our place


def _run_without_spark(name: str, pipeline_file: str, own: Sequence[str], spark: Sequence[str]) -> NoReturn:
    """Replace this process with the app. Raises ConfigError if there are options for Spark."""
    if spark:
        raise ConfigError(
            f"pgrepl {name} takes no options of spark-submit for a pipeline without lake tables",
            "remove -- and everything after it",
        )
    source_dsn()
    command = spark_submit.without_spark(spark_submit.application(name), pipeline_file, own)
    sys.stdout.flush()
    os.execve(command[0], command, spark_submit.small_process(os.environ))  # noqa: S606 - the app itself, in our place


def _driver_python(spark: Sequence[str]) -> list[str]:
    """Return options that run the driver with this Python. Returns none if the master is local.

    On a cluster, the executors have another Python.
    """
    given = [*_values(spark, "--conf"), *_values(spark, "-c")]
    conf = dict(part.split("=", 1) for part in given if "=" in part)
    if (_value(spark, "--master") or conf.get("spark.master") or "local").startswith("local"):
        return []
    settings = spark_submit.driver_python(conf, os.environ.get("PYSPARK_DRIVER_PYTHON"))
    return [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]


def _value(arguments: Sequence[str], option: str) -> str | None:
    """Return the last value of an option, which is the one that spark-submit takes, or None."""
    return next(reversed(_values(arguments, option)), None)


def _values(arguments: Sequence[str], option: str) -> list[str]:
    """Return the values of an option. spark-submit accepts `--option VALUE` and `--option=VALUE`."""
    found = []
    for part, following in zip_longest(arguments, arguments[1:]):
        if part.startswith(f"{option}="):
            found.append(part.removeprefix(f"{option}="))
        elif part == option and following is not None:
            found.append(following)
    return found


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments at the first `--` into those of the command and those of spark-submit."""
    given = list(arguments)
    if "--" not in given:
        return given, []
    at = given.index("--")
    return given[:at], given[at + 1 :]


def copy_dags(folder: Path) -> list[Path]:
    """Copy the example DAGs and their pipeline file to `folder`, and return the paths of the copies.

    Raises what `copy_files` does, and ToolError if the package lacks the examples.
    """
    examples = spark_submit.shipped_folder("example_dags", "pipeline.json", "dags")
    if examples is None:
        raise ToolError(
            "the installed package lacks its example DAGs",
            "uninstall airflow-provider-pgrepl with pip, and install it again",
        )
    sources = [*sorted(examples.glob("*.py")), examples / "pipeline.json"]
    return copy_files(sources, folder, "dags/pgrepl")


def copy_dashboards(folder: Path) -> list[Path]:
    """Copy the Grafana dashboard and the alert rules for Prometheus to `folder`, and return the paths of the
    copies.

    Raises what `copy_files` does.
    """
    return copy_files([DASHBOARDS / GRAFANA, DASHBOARDS / RULES], folder, "monitoring/pgrepl")


def copy_files(sources: Sequence[Path], folder: Path, example: str) -> list[Path]:
    """Copy files to `folder`, and return the paths of the copies. Existing files are never overwritten.

    :param example: the name of a folder, for hints
    :raises ConfigError: if one of the files or a link of that name exists, if the folder is a link, or if it
        cannot be created. Nothing is copied then.
    """
    targets = [folder / source.name for source in sources]
    if taken := [str(target) for target in targets if os.path.lexists(target)]:
        raise ConfigError(
            f"already there: {', '.join(taken)}",
            f"name a folder of their own, as {example}, or move these away",
        )
    if folder.is_symlink():
        raise ConfigError(
            f"{folder} is a symbolic link: nothing was copied", f"name {folder.resolve()} itself"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the folder {folder} cannot be made: {error.strerror}", "name another folder"
        ) from None
    for source, target in zip(sources, targets, strict=True):
        with target.open("xb") as copy:  # fail for a link or file that was created after the check
            copy.write(source.read_bytes())
    return targets


def _app(name: str, purpose: str, add: AddArguments, work: Callable[..., NoReturn] = _run) -> Command:
    return Command(name, purpose, work, add=add, is_app=True, epilog=_EPILOG)


APPS = (
    _app(
        "snapshot",
        "begin a pipeline, or copy its tables that are not in the lake yet or are errored; --tables and --add"
        " choose others",
        of_snapshot,
    ),
    _app(
        "resync",
        "begin a new epoch: drop the slot, create a new one, compare each table with the source and replace"
        " the rows that differ; with --tables, do that for these tables only, in the present epoch",
        of_resync,
        _resync,
    ),
    _app("replicate", "keep the lake current, until stopped or caught up", of_replicate),
    _app(
        "verify",
        "compare lake tables with the source at one LSN, while the replication app runs",
        of_verify,
    ),
    _app("publish", "supply a broker with change events, until stopped or caught up", of_publish),
    Command(
        "dags",
        "copy the example DAGs of this version to where Airflow finds them",
        _copy,
        (
            Option(
                "--copy-to", {"type": Path, "required": True, "metavar": "DIR", "help": "a folder of DAGs"}
            ),
        ),
        has_pipeline=False,
    ),
    Command(
        "dashboards",
        "copy the Grafana dashboard and the alert rules for Prometheus of this version",
        _copy_dashboards,
        (Option("--copy-to", {"type": Path, "required": True, "metavar": "DIR", "help": "a folder"}),),
        has_pipeline=False,
    ),
)
