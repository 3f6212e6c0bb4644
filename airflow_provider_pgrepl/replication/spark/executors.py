"""Spark's executors on other hosts: whether they can do this package's work, and how its tasks run there."""

from __future__ import annotations

import fcntl
import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl import errors as hints
from airflow_provider_pgrepl.errors import PgReplError, ToolError
from airflow_provider_pgrepl.replication.runtime.compiled_loops import ensure_compiled
from airflow_provider_pgrepl.replication.settings.store_variables import reaching_store
from airflow_provider_pgrepl.replication.storage.probe import SharedPlace

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

NEEDED = ("airflow_provider_pgrepl", "pyarrow", "deltalake", "numba", "obstore", "pyroaring", "psycopg2")
"""What a task imports."""
SAME = NEEDED[:3]
"""Of these every host has the driver's version: tasks and files are passed between them."""
_SPREAD_S = 0.5
_SETTLED_S, _OTHERS_COME_S, _POLL_S = 1.0, 15.0, 0.1

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Host = tuple[str, dict[str, str]]


@dataclass(frozen=True)
class UnfitHost:
    """What a task answers instead of its work, on a host that has other versions than the driver. `lacking`:
    in words. An error of a task's is tried again by Spark, and comes back in Spark's words."""

    lacking: str


def on_executor(work: Callable[Arguments, Result]) -> Callable[Arguments, Result | UnfitHost]:
    """The work as a task of Spark: it reaches the store as its driver does, and only on a host that has the
    driver's versions. An executor may come at any time, long after `check_executors`."""
    return _on_host(this_host()[1], reaching_store(work))


def _on_host(
    wanted: Mapping[str, str], task: Callable[Arguments, Result]
) -> Callable[Arguments, Result | UnfitHost]:
    def run(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result | UnfitHost:
        lacking = differences(wanted, *this_host())
        return UnfitHost(lacking) if lacking else task(*arguments, **named)

    return run


def result_of(answer: Result | UnfitHost) -> Result:
    """What a task has returned. Raises ToolError where its host was not fit."""
    if isinstance(answer, UnfitHost):
        raise ToolError(answer.lacking, hints.EXECUTORS)
    return answer


@cache
def this_host() -> Host:
    """What this process has of `SAME`."""
    return look(SAME)


def versions(names: Sequence[str]) -> dict[str, str]:
    """Those of this process."""
    return look(names)[1]


def look(names: Sequence[str], seconds: float = 0.0) -> Host:
    """The host's name, and its version of each package: empty without one, and ! where it cannot be loaded.

    Sent as it is, and not by its name: a host without this package answers, too. All that it needs is in it.
    `seconds`: how long it keeps its slot, so that as many of these as there are slots take one each.
    """
    import importlib.metadata
    import socket
    import sys
    import time
    import traceback

    time.sleep(seconds)
    found = {}
    for name in names:
        try:
            module = importlib.import_module(name)
            # Without a file it is but a folder of that name, which Python takes for a package.
            is_there = getattr(module, "__file__", None) is not None
            version = getattr(module, "__version__", None) or importlib.metadata.version(name)
            found[name] = str(version) if is_there else ""
        except ModuleNotFoundError as error:
            found[name] = "" if error.name == name else "!"
        except Exception as error:  # noqa: BLE001 - a library of another processor raises whatever it likes
            found[name] = "!"
            frames = traceback.extract_tb(error.__traceback__)[-30:]
            told = [type(error).__name__, *(f"  {one.filename}:{one.lineno} in {one.name}" for one in frames)]
            sys.stderr.write(f"pgrepl: {name} cannot be loaded: {chr(10).join(told)}\n")
    return socket.gethostname(), found


def differences(wanted: Mapping[str, str], host: str, found: Mapping[str, str]) -> str:
    """What a host lacks, in words; empty when it has all. `wanted`: no version where any will do."""
    lacking = [name for name in wanted if not found[name]]
    broken = [name for name in wanted if found[name] == "!"]
    others = [
        f"{name} {found[name]} (the driver has {version})"
        for name, version in wanted.items()
        if version and found[name] not in ("", "!", version)
    ]
    told = [
        f"lacks {', '.join(lacking)}" if lacking else "",
        f"cannot load {', '.join(broken)}" if broken else "",
        f"has {', '.join(others)}" if others else "",
    ]
    said = " and ".join(part for part in told if part)
    return f"the Python of Spark's executors on {host} {said}" if said else ""


def slots_of(context: SparkContext) -> int:
    """How many tasks run at once, as Spark counts it now; its default parallelism may be set to anything."""
    scala = context._jsc.sc()
    return int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))


def check_executors(
    spark: SparkSession, lake_root: str, reach_source: Callable[[], None] | None = None
) -> None:
    """Ask each executor that there is for the driver's versions; then have it compile the loops, and reach
    the lake, and the source by `reach_source`, which raises PgReplError.

    Waits, as all of Spark's jobs do, until there is one, and some seconds for others. Raises ToolError, which
    names each host that is not as it must be, and what an executor fails with at lake or source.
    """
    wanted = {**dict.fromkeys(NEEDED, ""), **this_host()[1]}
    sent = _by_value(look)
    # What was made here by ourselves.
    seen = _everywhere(spark, lambda: pickle.loads(sent)(NEEDED, _SPREAD_S))  # noqa: S301
    if told := sorted({fault for host in seen if (fault := differences(wanted, *host))}):
        raise ToolError("; ".join(told), hints.EXECUTORS)
    with SharedPlace(lake_root) as place:
        answers = _everywhere(spark, on_executor(lambda: _reach(place, reach_source)))
    for answer in answers:
        failure = result_of(answer)
        if failure is not None:
            raise failure.error


def await_executors(
    spark: SparkSession,
    lake_root: str,
    gives_up: Callable[[], bool],
    reach_source: Callable[[], None] | None = None,
) -> bool:
    """`check_executors`, which on a full cluster waits without end. False: it was time to give up.

    `gives_up` is asked several times a second. Raises what it does, and what `check_executors` does.
    """
    with ThreadPoolExecutor(1, "pgrepl-executors") as thread:
        checking = thread.submit(check_executors, spark, lake_root, reach_source)
        try:
            while not checking.done():
                if gives_up():
                    return False
                wait((checking,), _POLL_S)
        finally:
            while not checking.done():
                spark.sparkContext.cancelAllJobs()
                wait((checking,), _POLL_S)
        checking.result()
    return True


@dataclass(frozen=True)
class _Failure:
    """An error as data: a task that raises it would be tried again, and end in Spark's words."""

    kind: str
    message: str
    hint: str

    @property
    def error(self) -> PgReplError:
        kind: type[PgReplError] = getattr(errors, self.kind)
        return kind(self.message, self.hint)


def _by_value(function: Callable[..., Any]) -> bytes:
    """The function itself, for a process that has not its module."""
    from pyspark import cloudpickle

    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(function))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _reach(place: SharedPlace, reach_source: Callable[[], None] | None) -> _Failure | None:
    """In a task: what fails. Once in an executor, whose tasks have one folder: connections are few."""
    host = look(())[0]
    try:
        with Path(place.name).open("a+") as asked:
            fcntl.flock(asked, fcntl.LOCK_EX)
            # Not the place where it was opened, which another may have passed while this one waited.
            if os.fstat(asked.fileno()).st_size:
                return None
            ensure_compiled()
            place.check()
            if reach_source is not None:
                reach_source()
            asked.write("done")
            asked.flush()
    except PgReplError as error:
        return _Failure(type(error).__name__, f"Spark's executors on {host}: {error.message}", error.hint)
    except OSError as error:
        return _Failure("LakeError", f"Spark's executors on {host}: {error.strerror}: {error.filename}", "")
    return None


def _everywhere(spark: SparkSession, work: Callable[[], Result]) -> list[Result]:
    """What it returns in a task on each slot of the executors that there are."""
    from airflow_provider_pgrepl.replication.spark.failures import spark_errors

    context = spark.sparkContext
    with spark_errors("asking executors what they have"):
        context.range(1, numSlices=1).count()  # from here on there is one
        slots = _settled(lambda: slots_of(context))
        found: list[Result] = context.parallelize(range(slots), slots).map(lambda _number: work()).collect()
    return found


def _settled(count: Callable[[], int]) -> int:
    """A number that has not grown for a while: executors register one after the other."""
    deadline, known, since = time.monotonic() + _OTHERS_COME_S, count(), time.monotonic()
    while time.monotonic() < min(deadline, since + _SETTLED_S):
        time.sleep(_POLL_S)
        if (now := count()) != known:
            known, since = now, time.monotonic()
    return max(1, known)
