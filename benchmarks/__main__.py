"""Measure figures, each in its own process. Exits with 1 if a figure misses its limit or is not measured."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import curves, machine, measuring, report
from benchmarks.figure import Figure

FIGURES = (
    "receive",
    "receive_flush",
    "apply",
    "apply_toast",
    "apply_keys",
    "apply_keyless",
    "values",
    "both",
    "snapshot",
    "interrupted",
    "verify",
    "latency",
    "resnapshot",
    "memory",
    "large_transaction",
    "round_robin",
    "many_tables",
    "partition_ddl",
    "start",
    "idle",
    "idle_events",
    "receive_s3",
    "apply_s3",
    "snapshot_s3",
    "latency_s3",
    "publish_rabbitmq",
    "publish_nats",
    "publish_kafka",
    "publish_debezium",
)
LONG = (
    "scattered",
    "scattered_uuid",
    "recent",
    "neighbors",
    "verify_traffic",
    "catch_up",
    "by_hand",
    "cluster",
    "written",
    "written_hour",
    "publish_memory",
)
"""Figures that are measured only if they are named. Each takes from 10 minutes to more than an hour."""
RESULTS = Path(__file__).resolve().parents[1] / ".bench"


def main() -> int:
    """Measure the figures that the command line names, and return the exit code.

    Returns 1 if a figure misses its limit or is not measured. At full scale, also updates docs/benchmarks.md.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("figures", nargs="*", metavar="figure", help=f"some of: {', '.join(FIGURES + LONG)}")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="share of the full size or time; docs want 1"
    )
    parser.add_argument("--here", action="store_true", help="in this process, as under a profiler")
    parser.add_argument(
        "--metrics", action="store_true", help="serve and scrape metrics, and record samples, meanwhile"
    )
    arguments = parser.parse_args()
    if arguments.metrics:
        os.environ[measuring.VARIABLE] = "1"
    unknown = [name for name in arguments.figures if name not in FIGURES + LONG]
    if unknown:
        parser.error(f"no such figure: {', '.join(unknown)}")
    names = arguments.figures or list(FIGURES)
    if arguments.here:
        return max([_measure(name, arguments.scale) for name in names])
    codes = [_start(name, arguments.scale) for name in names]
    if arguments.scale == 1 and not arguments.metrics:
        about = machine.describe()
        report.update_page(report.read_results([_result(name) for name in FIGURES + LONG], about), about)
        curves.update_page(_result("scattered"))
    return int(any(codes))


def _result(name: str) -> Path:
    return RESULTS / f"{name}{'_with_metrics' if measuring.is_on() else ''}.json"


def _start(name: str, scale: float) -> int:
    command = [sys.executable, "-m", "benchmarks", "--here", name, "--scale", str(scale)]
    code = subprocess.run(command, check=False, cwd=RESULTS.parent).returncode
    if code not in (0, 1):
        print(f"{name}: not measured, it ended with {code}", flush=True)
    return code


def _measure(name: str, scale: float) -> int:
    busy = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="pgrepl-bench-") as folder:
        figure: Figure = importlib.import_module(f"benchmarks.{name}").run(Path(folder), scale)
    figure.numbers["load average before"] = round(busy, 1)
    figure.write(_result(name), machine.describe(), scale)
    beside = f" | {figure.peer} | ratio {figure.ratio}" if figure.peer else ""
    print(f"{figure.work}: {figure.measured}{beside} | wanted {figure.limit} | {figure.verdict}", flush=True)
    for what, number in figure.numbers.items():
        print(f"    {what}: {number}", flush=True)
    return 0 if figure.ok else 1


if __name__ == "__main__":
    sys.exit(main())
