"""Mutation runner: put faults into a copy of the package, and require that named tests find them.

    python -m tests.mutate            every mutation of tests/mutations.toml
    python -m tests.mutate NAME…      some of them
    python -m tests.mutate --write    write the table into CONTRIBUTING.md

A mutation is killed if its test passes without it and fails with it. Errors during collection or in fixtures
do not count. Tests are selected as `make test` does, so that tests of `make test-all` alone cannot kill.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import Phase, settings

ROOT = Path(__file__).parents[1]
PACKAGE = "airflow_provider_pgrepl"
COPIED = (PACKAGE, "tests", "demo", "spark_apps", "pyproject.toml")
BEGIN, END = "<!-- mutations -->", "<!-- /mutations -->"

_KINDS = ("failure", "error", "skipped")
_LIMIT_S = 900.0
_COMPILED = "@loop("
_LIBRARIES = (
    "hypothesis.strategies",
    "numba",
    "pyarrow.parquet",
    "deltalake",
    "psycopg2",
    "pyspark.sql",
    "xdist",
)
_NOT_LINKED = {".git", ".hypothesis", ".pytest_cache", "dist", "spark-warehouse"}


@dataclass(frozen=True)
class Mutation:
    """A fault: `old` text of a file below the package, which occurs once, becomes `new`.

    `killed_by`: arguments of pytest, a node id or a file with `-k`.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    killed_by: str

    @property
    def path(self) -> Path:
        return Path(PACKAGE) / self.file

    def apply(self, text: str) -> str:
        """Return the mutated text.

        :raises ValueError: if the old text does not occur exactly once
        """
        count = text.count(self.old)
        if count != 1 or self.old == self.new:
            raise ValueError(f"{self.name}: the old text occurs {count} times in {self.path}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test run."""

    passed: int
    failed: int
    errors: int
    skipped: int
    seconds: float
    output: str

    @property
    def is_good(self) -> bool:
        return self.passed > 0 and not self.failed and not self.errors

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.errors} errors, {self.skipped} skipped"


def read_mutations(path: Path = ROOT / "tests" / "mutations.toml") -> list[Mutation]:
    """Return the mutations of a file in its order."""
    return [Mutation(name, **table) for name, table in tomllib.loads(path.read_text("utf-8")).items()]


class Copy:
    """A copy of the work tree in a temporary folder; what tests only read is linked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        ignored = shutil.ignore_patterns("__pycache__")
        for entry in ROOT.iterdir():
            target = folder / entry.name
            if entry.name not in COPIED:
                if entry.name not in _NOT_LINKED:
                    target.symlink_to(entry)
            elif entry.is_dir():
                shutil.copytree(entry, target, ignore=ignored, symlinks=True)
            else:
                shutil.copy2(entry, target)

    @contextlib.contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[dict[str, str]]:
        """Apply a mutation within the block; gives the environment in which tests are to run."""
        path, source = self._folder / mutation.path, ROOT / mutation.path
        text = mutation.apply(source.read_text(encoding="utf-8"))
        _forget_bytecode(path)
        path.write_text(text, encoding="utf-8")
        try:
            with self._own_compiled(needed=_COMPILED in text) as environment:
                yield environment
        finally:
            # With its times, by which numba knows that what it compiled is of this text.
            shutil.copy2(source, path)
            _forget_bytecode(path)

    def run(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Outcome:
        """Run tests of tier `test`, in a process forked from this one, which has imported the libraries."""
        report, output = self._folder / "report.xml", self._folder / "output.txt"
        report.unlink(missing_ok=True)
        options = ["--tier", "test", "-p", "no:cacheprovider", "-p", "no:randomly", "-q", "--no-header"]
        # hypothesis is imported already, and has no assertions that pytest would have to rewrite.
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        command = [*options, "-rf", "--hypothesis-seed", "1", f"--junitxml={report}", *arguments]
        began = time.monotonic()
        child = os.fork()
        if not child:
            _run_pytest(self._folder, output, {"PYTHONPATH": str(self._folder), **environment}, command)
        _wait(child, began + _LIMIT_S)
        return _read_report(report, time.monotonic() - began, output.read_text(errors="replace"))

    @contextlib.contextmanager
    def _own_compiled(self, *, needed: bool) -> Iterator[dict[str, str]]:
        """A numba cache for mutated loops, with those of all other files."""
        if not needed:
            yield {}
            return
        shared = self._folder / PACKAGE / "replication" / "__pycache__" / "compiled"
        with tempfile.TemporaryDirectory(prefix="pgrepl-compiled-") as own:
            if shared.is_dir():
                shutil.copytree(shared, own, dirs_exist_ok=True)
            yield {"NUMBA_CACHE_DIR": own}


def _run_pytest(folder: Path, output: Path, environment: Mapping[str, str], command: list[str]) -> NoReturn:
    """Run pytest in this process, on the modules below a folder, and end."""
    code = 3
    try:
        os.setsid()
        with output.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(folder)
        os.environ.update(environment)
        for name in [name for name in sys.modules if name.partition(".")[0] in COPIED]:
            del sys.modules[name]
        sys.path[:] = [str(folder), *(path for path in sys.path if path not in ("", str(ROOT)))]
        # Failing examples are not reduced: only the outcome counts here.
        settings.register_profile("mutations", phases=(Phase.explicit, Phase.generate), database=None)
        settings.load_profile("mutations")
        code = int(pytest.main(command))
    except BaseException:  # the parent's code must not run here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _forget_bytecode(path: Path) -> None:
    for file in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        file.unlink()


def _wait(child: int, deadline: float) -> None:
    """Wait for a process; kill it, and what it started in its session, after the deadline."""
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return
        time.sleep(0.05)


def _read_report(report: Path, seconds: float, output: str) -> Outcome:
    if not report.exists():
        return Outcome(0, 0, 1, 0, seconds, output)
    cases = list(ET.parse(report).getroot().iter("testcase"))
    failed, errors, skipped = (sum(case.find(kind) is not None for case in cases) for kind in _KINDS)
    clean = sum(all(case.find(kind) is None for kind in _KINDS) for case in cases)
    return Outcome(clean, failed, errors, skipped, seconds, output)


def _check_unmutated(copy: Copy, mutations: Sequence[Mutation]) -> list[str]:
    """Return the tests that do not pass without a mutation. Tests by node id run together."""
    tests = list(dict.fromkeys(mutation.killed_by for mutation in mutations))
    by_id = [test for test in tests if " " not in test]
    groups = [[test] for test in tests if " " in test]
    if by_id and not copy.run(by_id, {}).is_good:
        groups += [[test] for test in by_id]
    bad = []
    for (test,) in groups:
        outcome = copy.run(shlex.split(test), {})
        if not outcome.is_good:
            bad.append(test)
            print(f"{test}: {outcome} without a mutation\n{outcome.output}", file=sys.stderr)
    return bad


def _try(copy: Copy, mutation: Mutation) -> tuple[bool, Outcome]:
    with copy.mutated(mutation) as environment:
        outcome = copy.run(shlex.split(mutation.killed_by), environment)
    return outcome.failed > 0 and not outcome.errors, outcome


def _row(mutation: Mutation, seconds: float) -> str:
    return f"| {mutation.name} | {mutation.breaks} | `{mutation.killed_by}` | {seconds:.0f} |"


def write_table(table: str, path: Path = ROOT / "CONTRIBUTING.md") -> None:
    """Put a table between the markers of a document.

    :raises ValueError: if the document has no markers
    """
    text = path.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"{path} has no {BEGIN} … {END}")
    path.write_text(pattern.sub(lambda _: f"{BEGIN}\n{table}\n{END}", text), encoding="utf-8")


def _chosen(names: Sequence[str]) -> list[Mutation]:
    mutations = read_mutations()
    unknown = sorted(set(names) - {mutation.name for mutation in mutations})
    if unknown:
        raise SystemExit(f"unknown mutations: {', '.join(unknown)}")
    return [mutation for mutation in mutations if not names or mutation.name in names]


def main(argv: Sequence[str]) -> int:
    """Run mutations, print the table, and return 1 if a mutation survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description="Run mutations.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="which mutations; by default all")
    parser.add_argument("--write", action="store_true", help="write the table into CONTRIBUTING.md")
    options = parser.parse_args(argv)
    if options.write and options.names:
        parser.error("--write needs all mutations")
    mutations = _chosen(options.names)
    for name in _LIBRARIES:
        import_module(name)
    for mutation in mutations:
        mutation.apply((ROOT / mutation.path).read_text(encoding="utf-8"))
    rows, survivors = ["| mutation | what it breaks | killed by | seconds |", "|---|---|---|---|"], []
    with tempfile.TemporaryDirectory(prefix="pgrepl-mutations-") as folder:
        # PostgreSQL's own user enters it in some tests.
        Path(folder).chmod(0o755)
        copy = Copy(Path(folder))
        if _check_unmutated(copy, mutations):
            return 1
        for mutation in mutations:
            is_killed, outcome = _try(copy, mutation)
            print(f"{mutation.name}: {'killed' if is_killed else 'SURVIVED'}: {outcome}", file=sys.stderr)
            if not is_killed:
                print(outcome.output, file=sys.stderr)
                survivors.append(mutation.name)
            rows.append(_row(mutation, outcome.seconds))
    table = "\n".join(rows)
    print(table)
    if survivors:
        print(f"{len(survivors)} of {len(mutations)} survived: {', '.join(survivors)}", file=sys.stderr)
        return 1
    if options.write:
        write_table(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
