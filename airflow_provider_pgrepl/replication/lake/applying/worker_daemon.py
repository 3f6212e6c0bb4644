"""Spark's daemon of Python workers, which has loaded what our tasks need before it forks the first one.

A worker that loads for itself has 120 MB of its own and is ready after two seconds; one that finds all there
shares it with the others, and is ready at once. Spark's `PythonWorkerFactory` runs the module that
`spark.python.daemon.module` names in place of `pyspark.daemon`, with the same arguments.
"""

from __future__ import annotations

import gc
from importlib import import_module

from pyspark.daemon import manager

from airflow_provider_pgrepl.replication.compiled import is_compiled
from airflow_provider_pgrepl.replication.lake.applying import warm_up

_OF_SPARK = ("pyspark.worker", "pyspark.sql.streaming.python_streaming_source_runner")
_OURS = tuple(
    f"airflow_provider_pgrepl.replication.lake.applying.{name}" for name in ("changelog_source", "merge_job")
)


def load() -> None:
    """Load all of it. Python's collector leaves it alone then: what that looks at each worker copies."""
    for name in (*_OF_SPARK, *_OURS):
        import_module(name)
    # Where loops have to be compiled first, Spark would wait for that; then each worker loads them itself.
    if is_compiled():
        warm_up.merge_a_row()
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    load()
    manager()
