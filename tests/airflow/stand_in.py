"""A stand-in for a Spark app: reports what it got, then exits as configured, or waits for SIGTERM."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--pipeline", type=Path, required=True)
parser.add_argument("--until")
parser.add_argument("--tables")
parser.add_argument("--new-epoch", action="store_true")
parser.add_argument("--resync", nargs="?", const=True)
parser.add_argument("--take-over")
parser.add_argument("--journal", type=Path, required=True)
parser.add_argument("--exit", type=int)
parser.add_argument("--ignore-term", action="store_true")
parser.add_argument("--end-gate", type=Path, help="a stop waits until this file is there")
parser.add_argument("--lines", type=Path)
parser.add_argument("--timeout")
parser.add_argument("--check")
parser.add_argument("--sample")
parser.add_argument("--show-keys", action="store_true")
parser.add_argument("--repair", action="store_true")
parser.add_argument("--result", help="JSON of the result, or nothing")
options = parser.parse_args()


def journal(event: str) -> None:
    with options.journal.open("a", encoding="utf-8") as file:
        entry = {"event": event, "pid": os.getpid(), "argv": sys.argv[1:], "pipeline": pipeline}
        file.write(json.dumps(entry) + "\n")


def stop(*_: object) -> None:
    if options.ignore_term:
        return
    # Linux sends the parent's end once for each of its threads whose end was noticed before the next.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while options.end_gate is not None and not options.end_gate.exists():
        time.sleep(0.01)
    journal("stopped")
    print("stopped gracefully", flush=True)
    sys.exit(0)


pipeline = json.loads(options.pipeline.read_text(encoding="utf-8"))
signal.signal(signal.SIGTERM, stop)
print(f"pipeline {pipeline['name']}, DSN of {len(os.environ['PGREPL_DSN'])} characters", flush=True)
journal("started")
if options.lines is not None:
    sys.stderr.write(options.lines.read_text(encoding="utf-8"))
result = json.dumps({"tables": 3, "rows": 7, "lsn": "0/A"}) if options.result is None else options.result
if "PGREPL_RESULT_FILE" in os.environ and result:
    unfinished = Path(os.environ["PGREPL_RESULT_FILE"] + ".part")
    unfinished.write_text(result, encoding="utf-8")
    unfinished.replace(os.environ["PGREPL_RESULT_FILE"])
if options.exit is not None:
    sys.stderr.write("the last words\n")
    sys.exit(options.exit)
if options.until is None:
    while True:
        time.sleep(0.1)
