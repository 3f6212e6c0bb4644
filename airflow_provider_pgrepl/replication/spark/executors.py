"""Checks of Spark's executors on other hosts, and the wrapper for tasks that run there."""

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
from airflow_provider_pgrepl.replication.storage.probe import SharedDirectory

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

NEEDED = ("airflow_provider_pgrepl", "pyarrow", "deltalake", "numba", "obstore", "pyroaring", "psycopg2")
"""The packages that a task imports."""
SAME = NEEDED[:3]
"""The packages of which every host must have the driver's version: tasks and files are passed between
hosts."""
_SPREAD_S = 0.5
_SETTLED_S, _OTHERS_COME_S, _POLL_S = 1.0, 15.0, 0.1

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Host = tuple[str, dict[str, str]]


@dataclass(frozen=True)
class IncompatibleHost:
    """The result of a task that did not run, because packages on its host are missing or have another version
    than on the driver. `lacking`: the differences, as a sentence. Returned and not raised: Spark would retry
    a task that raises, and report the error in its own words."""

    lacking: str


def on_executor(work: Callable[Arguments, Result]) -> Callable[Arguments, Result | IncompatibleHost]:
    """Return the work as a Spark task: it reaches the store as the driver does, and runs only on a host that
    has the driver's versions. The host is checked in each task, because an executor may be added at any time
    after `check_executors`."""
    return _on_host(this_host()[1], reaching_store(work))


def _on_host(
    wanted: Mapping[str, str], task: Callable[Arguments, Result]
) -> Callable[Arguments, Result | IncompatibleHost]:
    def run(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result | IncompatibleHost:
        lacking = differences(wanted, *this_host())
        return IncompatibleHost(lacking) if lacking else task(*arguments, **named)

    return run


def result_of(answer: Result | IncompatibleHost) -> Result:
    """Return the result of a task. Raises ToolError if the task did not run because its host is
    incompatible."""
    if isinstance(answer, IncompatibleHost):
        raise ToolError(answer.lacking, hints.EXECUTORS)
    return answer


@cache
def this_host() -> Host:
    """Return this host's name and this process's versions of `SAME`."""
    return look(SAME)


def versions(names: Sequence[str]) -> dict[str, str]:
    """Return this process's version of each package."""
    return look(names)[1]


def look(names: Sequence[str], seconds: float = 0.0) -> Host:
    """Return the host's name, and its version of each package: empty if it is missing, "!" if it fails to
    load.

    The function is pickled by value, so that a host without this package can run it. Therefore it imports all
    that it needs. `seconds`: how long it sleeps first. While it sleeps it occupies its slot, so that as many
    tasks as there are slots run one on each.
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
            # Without a file, the module is only a folder of that name, which Python imports as a namespace
            # package.
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
    """Return a sentence about the packages that a host lacks, cannot load, or has in another version; empty
    if it has them all. `wanted`: the required version of each package; empty if any version will do."""
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
    """Return how many tasks Spark can run at the same time now. Its default parallelism is not used, because
    the session's settings may set it to anything."""
    scala = context._jsc.sc()
    return int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))


def check_executors(
    spark: SparkSession, lake_root: str, reach_source: Callable[[], None] | None = None
) -> None:
    """Check that each present executor has the driver's versions. Then make each one compile the functions of
    numba, access the lake, and access the source with `reach_source`, which raises PgReplError.

    Waits until there is an executor, as every Spark job does, and up to 15 s for others to register. Raises
    ToolError, which names each incompatible host, or the error of an executor that cannot access the lake or
    the source.
    """
    wanted = {**dict.fromkeys(NEEDED, ""), **this_host()[1]}
    sent = _by_value(look)
    # The bytes were pickled by this process.
    seen = _everywhere(spark, lambda: pickle.loads(sent)(NEEDED, _SPREAD_S))  # noqa: S301
    if told := sorted({fault for host in seen if (fault := differences(wanted, *host))}):
        raise ToolError("; ".join(told), hints.EXECUTORS)
    with SharedDirectory(lake_root) as place:
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
    """Run `check_executors`, which on a full cluster waits without a limit. Returns False if `gives_up`
    returned True first.

    `gives_up` is called ten times a second. Raises what `gives_up` and `check_executors` raise.
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
    """An error as data: Spark would retry a task that raises it, and report it in its own words."""

    kind: str
    message: str
    hint: str

    @property
    def error(self) -> PgReplError:
        kind: type[PgReplError] = getattr(errors, self.kind)
        return kind(self.message, self.hint)


def _by_value(function: Callable[..., Any]) -> bytes:
    """Pickle the function by value, for a process that lacks its module."""
    from pyspark import cloudpickle

    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(function))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _reach(place: SharedDirectory, reach_source: Callable[[], None] | None) -> _Failure | None:
    """Compile, and access the lake and the source, in a task. Returns the failure, or None. Runs once in each
    executor, whose tasks share a folder, to save connections."""
    host = look(())[0]
    try:
        with Path(place.name).open("a+") as asked:
            fcntl.flock(asked, fcntl.LOCK_EX)
            # Use the size, and not the file's position: that was set when the file was opened, and another
            # task may have written to the file while this one waited for the lock.
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
    """Return the results of `work` in one task for each slot of the present executors."""
    from .failures import spark_errors

    context = spark.sparkContext
    with spark_errors("asking executors what they have"):
        context.range(1, numSlices=1).count()  # returns when there is an executor
        slots = _settled(lambda: slots_of(context))
        found: list[Result] = context.parallelize(range(slots), slots).map(lambda _number: work()).collect()
    return found


def _settled(count: Callable[[], int]) -> int:
    """Return the count once it has not changed for 1 s, or after 15 s, but at least 1: executors register one
    after the other."""
    deadline, known, since = time.monotonic() + _OTHERS_COME_S, count(), time.monotonic()
    while time.monotonic() < min(deadline, since + _SETTLED_S):
        time.sleep(_POLL_S)
        if (now := count()) != known:
            known, since = now, time.monotonic()
    return max(1, known)
