"""Runs an app where neither Spark nor what comes with it can be imported.

python without_spark.py --pipeline FILE.json snapshot|replicate|publish [...]
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from typing import Any

BLOCKED = ("pyspark", "py4j", "delta", "pandas", "airflow", "coverage")


class _Blocked(MetaPathFinder):
    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked here", name=name)


if __name__ == "__main__":
    sys.meta_path.insert(0, _Blocked())
    pipeline, app, *more = sys.argv[1:3], *sys.argv[3:]
    sys.exit(import_module(f"airflow_provider_pgrepl.replication.app.{app}").main([*pipeline, *more]))
