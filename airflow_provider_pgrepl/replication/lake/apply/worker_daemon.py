"""Spark's daemon of Python workers. It loads the modules of this package's tasks before it forks the first
worker.

A worker that loads them itself uses 120 MB of its own and is ready after 2 s. A forked worker shares the
memory of the daemon and is ready immediately. Spark's `PythonWorkerFactory` runs the module that
`spark.python.daemon.module` names instead of `pyspark.daemon`, with the same arguments.

Executors receive only this file, in their working directory. On a host that lacks this package a worker still
has to start, so that the driver can ask it for the package versions.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from importlib import import_module

_REPLICATION = "airflow_provider_pgrepl.replication"
_APPLY = f"{_REPLICATION}.lake.apply"
_MODULES = (
    "pyspark.worker",
    f"{_APPLY}.merge_task",
)

_MOST_FRAMES = 30


def load() -> None:
    """Load the modules and run a merge. Then freeze the garbage collector.

    A collection in a worker would write to the objects and so copy the memory that it shares with the daemon.
    """
    try:
        for name in _MODULES:
            import_module(name)
        import_module(f"{_REPLICATION}.spark.executors").this_host()
        # If the functions still have to be compiled, Spark would wait for that. Each worker then compiles or
        # loads them itself.
        if import_module(f"{_REPLICATION}.runtime.compiled_loops").is_compiled():
            import_module(f"{_APPLY}.applier").merge_a_row()
    finally:
        if "numpy" in sys.modules:
            # NumPy's generator is seeded here, and each worker would draw the same numbers.
            os.register_at_fork(after_in_child=import_module("numpy.random").seed)
        gc.collect()
        gc.freeze()


def _load_or_say() -> None:
    """Load everything, or write the error to standard error. A task that needs what failed to load reports
    the error itself."""
    try:
        load()
    except Exception as error:  # noqa: BLE001 - without a daemon there is no task
        frames = traceback.extract_tb(error.__traceback__)[-_MOST_FRAMES:]
        said = [type(error).__name__, *(f"  {one.filename}:{one.lineno} in {one.name}" for one in frames)]
        sys.stderr.write(f"pgrepl: Python workers load all for themselves: {chr(10).join(said)}\n")


if __name__ == "__main__":
    _load_or_say()
    import_module("pyspark.daemon").manager()
