"""Spark's daemon of Python workers, which has loaded what our tasks need before it forks the first one.

A worker that loads for itself has 120 MB of its own and is ready after two seconds; one that finds all there
shares it with the others, and is ready at once. Spark's `PythonWorkerFactory` runs the module that
`spark.python.daemon.module` names in place of `pyspark.daemon`, with the same arguments.

Executors get this file alone, into the folder where they run: on a host that lacks the package somebody has
to be there who can be asked for it.
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
    "pyspark.sql.worker.plan_data_source_read",
    f"{_APPLY}.changelog_source",
    f"{_APPLY}.merge_task",
)

_MOST_FRAMES = 30


def load() -> None:
    """Load all of it. Python's collector leaves it alone then: what that looks at each worker copies."""
    try:
        for name in _MODULES:
            import_module(name)
        import_module(f"{_REPLICATION}.spark.executors").this_host()
        # Where loops have to be compiled first Spark would wait for that: each worker loads them itself then.
        if import_module(f"{_REPLICATION}.runtime.compiled_loops").is_compiled():
            import_module(f"{_APPLY}.applier").merge_a_row()
    finally:
        if "numpy" in sys.modules:
            # It has been seeded by now, and each worker would draw the same numbers.
            os.register_at_fork(after_in_child=import_module("numpy.random").seed)
        gc.collect()
        gc.freeze()


def _load_or_say() -> None:
    """What fails here fails again in the task that needs it, which says so in words of its own."""
    try:
        load()
    except Exception as error:  # noqa: BLE001 - without a daemon there is no task
        frames = traceback.extract_tb(error.__traceback__)[-_MOST_FRAMES:]
        said = [type(error).__name__, *(f"  {one.filename}:{one.lineno} in {one.name}" for one in frames)]
        sys.stderr.write(f"pgrepl: Python workers load all for themselves: {chr(10).join(said)}\n")


if __name__ == "__main__":
    _load_or_say()
    import_module("pyspark.daemon").manager()
