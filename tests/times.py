"""The tables of CONTRIBUTING.md on where tests spend their time, from the runs of `make test-times`."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tests.report import RINGS

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- test times -->", "<!-- /test times -->"
DEAREST = 30


def main() -> None:
    """Write the tables of the last measured runs into CONTRIBUTING.md."""
    runs = {
        tier: json.loads((ROOT / f".pytest_cache/times-{tier}.json").read_text()) for tier in ("test", "rest")
    }
    page = ROOT / "CONTRIBUTING.md"
    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n{tables(runs)}\n{END}{after}")


def tables(runs: dict[str, Any]) -> str:
    """Return the tables of rings, tests, fixtures and programs."""
    return "\n\n".join((_rings(runs), _tests(runs), _fixtures(runs), _programs(runs)))


def _rings(runs: dict[str, Any]) -> str:
    lines = []
    for name in RINGS:
        cells = [f"`tests/{name}`"]
        for run in runs.values():
            tests = [test for node, test in run["tests"].items() if node.split("/")[1] == name]
            cells += [str(len(tests)), f"{sum(map(_seconds, tests)):.0f}", f"{_sum(tests, 'cpu'):.0f}"]
        lines.append(cells)
    ends = ["all, and minutes from start to end"]
    for run in runs.values():
        tests = list(run["tests"].values())
        ends += [str(len(tests)), f"{sum(map(_seconds, tests)):.0f} ({run['wall'] / 60:.1f} min)"]
        ends += [f"{_sum(tests, 'cpu'):.0f}"]
    head = ["ring", *(f"{tier}: {what}" for tier in runs for what in ("tests", "seconds", "CPU s"))]
    return _table(head, [*lines, ends])


def _tests(runs: dict[str, Any]) -> str:
    tests = [
        (tier, node.removeprefix("tests/"), test)
        for tier, run in runs.items()
        for node, test in run["tests"].items()
    ]
    tests.sort(key=lambda entry: -_seconds(entry[2]))
    return _table(
        ["the dearest tests", "tier", "set-up s", "call s", "teardown s", "CPU s"],
        [
            [
                f"`{node}`",
                tier,
                *(f"{test.get(when, 0):.0f}" for when in ("setup", "call", "teardown", "cpu")),
            ]
            for tier, node, test in tests[:DEAREST]
        ],
    )


def _fixtures(runs: dict[str, Any]) -> str:
    seconds: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for tier, run in runs.items():
        for test in run["tests"].values():
            for name, took in test.get("fixtures", {}).items():
                seconds[name][tier] += took
    dearest = sorted(seconds.items(), key=lambda entry: -entry[1].total())[:10]
    return _table(
        ["the dearest fixtures", *(f"{tier}: seconds" for tier in runs)],
        [[f"`{name}`", *(f"{took[tier]:.0f}" for tier in runs)] for name, took in dearest],
    )


def _programs(runs: dict[str, Any]) -> str:
    names: Counter[str] = Counter()
    for run in runs.values():
        names.update(run["programs"])
    return _table(
        ["program", *(f"{tier}: CPU s" for tier in runs)],
        [
            [name, *(f"{run['programs'].get(name, 0):.0f}" for run in runs.values())]
            for name, _ in names.most_common(10)
        ],
    )


def _seconds(test: dict[str, Any]) -> float:
    return sum(test.get(when, 0) for when in ("setup", "call", "teardown"))


def _sum(tests: list[dict[str, Any]], what: str) -> float:
    return sum(test.get(what, 0) for test in tests)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *("---:" for _ in head[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
