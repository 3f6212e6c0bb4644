"""The contents of the package: apps that a command runs, DAGs that a command copies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from airflow_provider_pgrepl.__main__ import main
from airflow_provider_pgrepl.cli.apps import _value, split

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pipeline_file(tmp_path: Path) -> Path:
    file = tmp_path / "shop.json"
    file.write_text(json.dumps({"name": "shop", "lake": "/lake", "tables": ["public.*"]}), encoding="utf-8")
    return file


def environment(folder: Path, exit_code: int = 0) -> dict[str, str]:
    """Return variables for a command whose spark-submit records its arguments and environment."""
    submit = folder / "spark-submit"
    submit.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" >"{folder}/argv"\nenv >"{folder}/env"\nexit {exit_code}\n', "utf-8"
    )
    submit.chmod(0o755)
    return {"PGREPL_DSN": "host=/nowhere", "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def got(folder: Path) -> tuple[list[str], list[str]]:
    """Return the arguments and the variables that spark-submit got."""
    argv, env = (os.fsdecode((folder / name).read_bytes()).splitlines() for name in ("argv", "env"))
    return argv, env


def run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str, exit_code: int = 0
) -> tuple[int, list[str], list[str]]:
    """Run `pgrepl` in this process, and spark-submit in one of its own: exit code, arguments, variables."""

    def become(program: str, command: list[str], variables: dict[str, str]) -> NoReturn:
        raise SystemExit(subprocess.run(command, executable=program, env=variables, check=False).returncode)

    with monkeypatch.context() as patched:
        for name, value in environment(folder, exit_code).items():
            patched.setenv(name, value)
        patched.setattr(os, "execve", become)
        with pytest.raises(SystemExit) as ended:
            main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code, *got(folder)


def test_command_becomes_spark_submit_in_its_own_process(tmp_path: Path, pipeline_file: Path) -> None:
    variables = {**os.environ, **environment(tmp_path, exit_code=75)}
    command = [sys.executable, "-m", "airflow_provider_pgrepl", "snapshot", str(pipeline_file)]
    with subprocess.Popen([*command, "--", "--master", "local[2]"], cwd=ROOT, env=variables) as started:
        assert started.wait() == 75
    argv, env = got(tmp_path)
    assert argv[:2] == ["--master", "local[2]"]
    assert argv[3:] == ["--pipeline", str(pipeline_file)]
    assert f"PYSPARK_PYTHON={sys.executable}" in env


def started(folder: Path, file: Path, prefix: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `pgrepl snapshot` in a folder, behind statements of a shell."""
    command = f'{prefix} exec "{sys.executable}" -m airflow_provider_pgrepl snapshot "{file}"'
    return subprocess.run(
        ["sh", "-c", command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment(file.parent), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_too_few_open_files_are_said_before_spark_is_started(tmp_path: Path, pipeline_file: Path) -> None:
    """The JVM would end with a trace. A soft limit alone is raised."""
    ended = started(tmp_path, pipeline_file, "ulimit -n 256;")
    assert ended.returncode == 78
    assert "a process may have 256 files open here, and Spark needs 512\n" in ended.stderr
    assert "hint: raise the hard limit: ulimit -n 1024" in ended.stderr
    assert not (tmp_path / "argv").exists()
    assert started(tmp_path, pipeline_file, "ulimit -S -n 256;").returncode == 0
    assert (tmp_path / "argv").exists()


@pytest.mark.parametrize("name", ["b\u00e4d", "b\udcffd"], ids=["of UTF-8", "of no encoding"])
@pytest.mark.thorough("the same test, of no encoding", "of UTF-8")
def test_spark_can_name_a_folder_that_the_locale_cannot_encode(
    tmp_path: Path, pipeline_file: Path, name: str
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    for where, locale in ((tmp_path, "C"), (folder, "C.UTF-8"), (folder, "C")):
        ended = started(where, pipeline_file, LC_ALL=locale)
        assert ended.returncode == 0, ended.stderr
        _, env = got(tmp_path)
        assert f"LC_ALL={'C' if where == tmp_path else 'C.UTF-8'}" in env


@pytest.mark.parametrize(
    ("app", "options", "handed_on"),
    [
        ("snapshot", ("--tables", "a.b,c.d"), ["--tables=a.b,c.d"]),
        ("snapshot", ("--add",), ["--add="]),
        ("snapshot", ("--new-epoch",), ["--new-epoch"]),
        ("snapshot", (), []),
        ("resync", ("--give-up", "7/shop"), ["--resync", "--give-up=7/shop"]),
        ("resync", ("--tables", "a.b,c.d"), ["--resync=a.b,c.d"]),
        # As of an unset variable in a script: no new epoch begins.
        ("resync", ("--tables", ""), ["--resync="]),
        ("replicate", ("--until", "0/1f"), ["--until=0/1F"]),
        (
            "publish",
            ("--publisher", "events", "--until=caught-up"),
            ["--publisher=events", "--until=caught-up"],
        ),
    ],
)
def test_an_application_is_run_by_spark_submit_with_its_options_and_those_of_spark(
    tmp_path: Path,
    pipeline_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    app: str,
    options: tuple[str, ...],
    handed_on: list[str],
) -> None:
    options = (*options, "--", "--master", "local[2]")
    code, argv, env = run(tmp_path, monkeypatch, app, str(pipeline_file), *options, exit_code=75)
    assert code == 75
    assert argv[:2] == ["--master", "local[2]"]
    assert Path(argv[2]).name == f"{'snapshot' if app == 'resync' else app}.py"
    assert argv[3:] == ["--pipeline", str(pipeline_file), *handed_on]
    assert f"PYSPARK_PYTHON={sys.executable}" in env


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["replicate", "FILE", "--until", "caughtup"], "'caughtup' is neither caught-up nor an LSN"),
        (["snapshot", "FILE", "--tables", "a.b", "--new-epoch"], "not allowed with argument"),
        (["resync", "FILE", "--tables", "a.b", "--give-up", "7/shop"], "not allowed with argument"),
        (["publish", "FILE"], "--publisher"),
        (["replicate", "FILE", "--untill", "caught-up"], "unrecognized arguments"),
        (["status", "FILE", "--", "--master", "x"], "status takes no options of spark-submit"),
    ],
)
def test_wrong_options_are_said_before_spark_is_started(pipeline_file: Path, capsys, given, says) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(pipeline_file) if one == "FILE" else one for one in given])
    assert ended.value.code == 78
    assert says in capsys.readouterr().err


def test_tables_may_follow_options(pipeline_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(pipeline_file)
    given = ["changes", file, "--after", "0/1", "public.t"]
    assert main(given) == main(["changes", file, "public.t", "--after", "0/1"]) != 0
    assert "unrecognized" not in capsys.readouterr().err


def test_help_names_the_options_of_an_application(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["publish", "--help"])
    said = capsys.readouterr().out
    assert all(option in said for option in ("--publisher", "--until", "--after", "spark-submit"))


def test_a_wrong_pipeline_file_is_said_before_spark_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["snapshot", str(tmp_path / "nowhere.json")]) == 78
    assert "nowhere.json" in capsys.readouterr().err


def test_a_missing_connection_string_is_said_before_spark_is_started(
    pipeline_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PGREPL_DSN", raising=False)
    assert main(["snapshot", str(pipeline_file)]) == 78
    assert "PGREPL_DSN is not set" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "own", "spark"),
    [
        ([], [], []),
        (["--tables", "a.b"], ["--tables", "a.b"], []),
        (["--", "--conf", "x=y"], [], ["--conf", "x=y"]),
        (["--add=", "--", "--name", "--"], ["--add="], ["--name", "--"]),
    ],
)
def test_arguments_after_two_dashes_go_to_spark(given: list[str], own: list[str], spark: list[str]) -> None:
    assert split(given) == (own, spark)


def test_the_example_dags_are_copied_and_nothing_is_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "dags" / "pgrepl"
    assert main(["dags", "--copy-to", str(folder)]) == 0
    copied = {path.name: path.read_text("utf-8") for path in folder.iterdir()}
    assert copied == {
        path.name: path.read_text("utf-8") for path in (ROOT / "dags").iterdir() if path.is_file()
    }
    (folder / "tables.py").write_text("mine", "utf-8")
    (folder / "drift.py").unlink()
    assert main(["dags", "--copy-to", str(folder)]) == 78
    assert "tables.py" in capsys.readouterr().err
    assert (folder / "tables.py").read_text("utf-8") == "mine"
    assert not (folder / "drift.py").exists()


def test_example_dags_are_not_written_through_a_dangling_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dags").mkdir()
    (tmp_path / "dags" / "tables.py").symlink_to(tmp_path / "elsewhere.py")
    assert main(["dags", "--copy-to", str(tmp_path / "dags")]) == 78
    assert "tables.py" in capsys.readouterr().err
    assert not (tmp_path / "elsewhere.py").exists()


@pytest.mark.parametrize("is_dangling", [False, True])
def test_example_dags_are_not_written_through_a_linked_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, is_dangling: bool
) -> None:
    folder, elsewhere = tmp_path / "dags", tmp_path / "elsewhere"
    if not is_dangling:
        elsewhere.mkdir()
    folder.symlink_to(elsewhere)
    for link in (folder, tmp_path / "nested" / ".." / "dags"):
        (tmp_path / "nested").mkdir(exist_ok=True)
        assert main(["dags", "--copy-to", str(link)]) == 78
        assert f"{link} is a symbolic link: nothing was copied" in capsys.readouterr().err
    assert is_dangling or list(elsewhere.iterdir()) == []


def test_folder_of_example_dags_that_cannot_be_made_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    assert main(["dags", "--copy-to", str(tmp_path / "file" / "dags")]) == 78
    assert "cannot be made: Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("form", [["--conf", "{}"], ["--conf={}"], ["-c", "{}"]])
def test_a_driver_keeps_its_python_where_executors_have_another(
    tmp_path: Path, pipeline_file: Path, monkeypatch: pytest.MonkeyPatch, form: list[str]
) -> None:
    """Spark uses the executors' Python for the driver, too, unless the driver's is set."""

    def given(setting: str) -> list[str]:
        return [part.format(setting) for part in form]

    driver = f"spark.pyspark.driver.python={sys.executable}"
    cluster = [*given("spark.master=spark://host:7077"), *given("spark.pyspark.python=/opt/python")]
    _, argv, _ = run(tmp_path, monkeypatch, "replicate", str(pipeline_file), "--", *cluster)
    assert argv[: len(cluster) + 2] == ["--conf", driver, *cluster]
    for others in (
        [*cluster, *given("spark.pyspark.driver.python=/usr/bin/python3")],
        [*cluster, "--deploy-mode", "cluster"],
        [*cluster, "--deploy-mode=cluster"],
        given("spark.pyspark.python=/opt/python"),
    ):
        _, argv, _ = run(tmp_path, monkeypatch, "replicate", str(pipeline_file), "--", *others)
        assert argv[: len(others)] == others
        assert driver not in argv


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--publish", "events"], 75, "cannot connect"),
        (
            ["--", "--master", "local"],
            78,
            "replicate takes no options of spark-submit for a pipeline without lake tables",
        ),
    ],
)
def test_without_lake_tables_an_application_needs_no_java(tmp_path, more, code, said):
    file = tmp_path / "pipeline.json"
    publishers = {"events": {"target": "nats", "database": "shop"}}
    fields = {
        "name": "shop",
        "lake": str(tmp_path / "lake"),
        "tables": ["public.*"],
        "publishers": publishers,
    }
    file.write_text(json.dumps({**fields, "lake_tables": "none"}))
    dsn = "host=127.0.0.1 port=1 dbname=shop user=nobody"
    ended = subprocess.run(
        [sys.executable, "-m", "airflow_provider_pgrepl", "replicate", str(file), *more],
        env={"PGREPL_DSN": dsn, "PATH": str(tmp_path), "HOME": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, said in ended.stderr) == (code, True), ended.stderr


def test_last_value_of_an_option_counts_however_it_is_written() -> None:
    given = ["--master", "local[2]", "--master=spark://a:7077"]
    assert _value(given, "--master") == "spark://a:7077"
    assert _value([*given[2:], *given[:2]], "--master") == "local[2]"
    assert _value(["--master"], "--master") is None
