"""`make rehearsal`: docker-compose.yaml from the build to the end, with failures, and every row compared."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psycopg2
import yaml

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.store_variables import use_store
from demo.airflow_api import AirflowApi
from demo.comparison import compare
from demo.errors import DemoError
from demo.lake import Lake
from demo.replication import REPLICATE_DAG, SNAPSHOT_DAG
from demo.status import Status
from tests.rehearsal.engine import BASE_IMAGES, COMPOSE, FOLDER, SERVICES, Engine

_STATE_S = 900.0
"""How long any state is waited for."""
_PASSING = (DemoError, PgReplError, psycopg2.Error, OSError)
"""What asking gives while containers come back."""
PIPELINE = Pipeline.from_json(yaml.safe_load(COMPOSE.read_text())["configs"]["pipeline"]["content"])
OURS = SERVICES["airflow"]["image"]
STORE = SERVICES["store"]["image"]


class Rehearsal:
    """The containers, and what is expected of them."""

    def __init__(self, engine: Engine, given: dict[str, str]) -> None:
        self._engine = engine
        self._secrets = given
        self._in_arguments: set[str] = set()
        engine.repeat(1, self._look_at_arguments)

    def build(self) -> None:
        """Build the stand-ins for the base images, then the images of docker-compose.yaml on them."""
        self._engine.build_base_image("postgres")
        bases = [
            word
            for argument, stage in BASE_IMAGES.items()
            for word in ("--build-arg", f"{argument}={self._engine.build_base_image(stage)}")
        ]
        self._engine.build(OURS, *bases, ".")
        self._engine.build(STORE, *bases, "--target", "store", ".")

    def check_image(self) -> None:
        """The package comes from the virtual environment wherever a process starts, and is compiled."""
        ask = "import airflow_provider_pgrepl as package; print(package.__file__)"
        for folder in ("/", "/opt", "/opt/pgrepl", "/tmp"):
            found = self._in_image("--workdir", folder, OURS, "python", "-c", ask)
            assert found.startswith("/opt/pgrepl/.venv/"), f"in {folder} the package is imported from {found}"
        log = self._in_image(OURS, "sh", "-c", "pgrepl warm-up 2>&1")
        assert "all functions are compiled" in log, log
        assert "compiling" not in log, f"the image has to compile again: {log}"

    def _in_image(self, *arguments: str) -> str:
        return self._engine.podman("run", "--rm", "--network", "none", *arguments, timeout=300)

    def up(self) -> None:
        """Start all services; every one becomes healthy, and every DAG is there."""
        self._engine.compose("up", "--detach", "--no-build", "--wait", timeout=_STATE_S)
        self._wait("the DAGs", lambda: self._airflow().has_dags([SNAPSHOT_DAG, REPLICATE_DAG]))

    def snapshot(self) -> None:
        api = self._airflow()
        api.set_paused(SNAPSHOT_DAG, False)
        run = api.trigger(SNAPSHOT_DAG)
        state = self._wait("the snapshot", lambda: _ended(api.run_state(SNAPSHOT_DAG, run)))
        assert state == "success", api.task_logs(SNAPSHOT_DAG, run)
        api.set_paused(REPLICATE_DAG, False)

    def traffic(self) -> None:
        """Write to the source; then each row of each table is the same in the lake."""
        load = ["pgbench", "-n", "-U", "bench", "-c", "2", "-t", "200", "bench"]
        self._engine.podman("exec", "pgrepl-postgres-1", *load)
        self._use_store()
        dsn = self._dsn()
        lake = Lake(PIPELINE)
        end = Status(dsn, PIPELINE, lake).mark_end()
        self._wait(f"the lake at {end}", lambda: lake.has_reached(end))
        for table in ("accounts", "branches", "history", "tellers"):
            result = compare(dsn, lake, f"public.pgbench_{table}")
            assert result.rows, f"{table} is empty"
            assert not result.differences, str(result)

    def kill_first_process(self, service: str) -> None:
        """Kill as a crash does: podman then starts the container again, unlike after `podman kill`."""
        pid = self._engine.container(service)["State"]["Pid"]
        os.kill(pid, signal.SIGKILL)
        self._wait(f"{service} again", lambda: self._is_healthy_as_another(service, pid))
        self._wait("Airflow", lambda: self._airflow().is_healthy())

    def _is_healthy_as_another(self, service: str, pid: int) -> bool:
        state = self._engine.container(service)["State"]
        return state["Pid"] not in (0, pid) and state["Health"]["Status"] == "healthy"

    def down_and_up(self) -> None:
        """Rows and switches outlive the containers."""
        self._engine.compose("down", "--timeout", "60", timeout=300)
        self.up()
        assert [dag for dag in (SNAPSHOT_DAG, REPLICATE_DAG) if self._airflow().is_paused(dag)] == []

    def command(self) -> None:
        """The command that docker-compose.yaml names works, as what it starts has variables of its own."""
        run = ("run", "--rm", "--no-deps", "pgrepl", "status", "/opt/pgrepl/pipeline.json")
        status = self._engine.compose(*run, timeout=300)
        assert status.count("streaming") >= 4, status

    def check_secrets(self) -> None:
        """No password, key or token is where others than the container's processes read."""
        places: dict[str, str] = {}
        environments = ""
        for service in (name for name, one in SERVICES.items() if "profiles" not in one):
            container = self._engine.container(service)
            environments += str(container["Config"].pop("Env"))
            places[f"podman inspect {service}"] = json.dumps(container)
            places[f"podman logs {service}"] = self._engine.logs(service)
        for image in (OURS, STORE):
            places[f"podman history {image}"] = self._engine.podman("history", "--no-trunc", image)
        logs = "find /airflow/logs -name '*.log' | xargs cat"
        places["Airflow's task logs"] = self._engine.podman("exec", "pgrepl-airflow-1", "sh", "-c", logs)
        assert all(places.values()), f"empty: {[place for place, text in places.items() if not text]}"
        assert set(self._secrets_in(environments)) == set(self._secrets), "the search finds no secrets at all"
        found = {f"{name} in {place}" for place, text in places.items() for name in self._secrets_in(text)}
        assert found | self._in_arguments == set()

    def _secrets_in(self, text: str) -> list[str]:
        return [name for name, value in self._secrets.items() if value in text]

    def _look_at_arguments(self) -> None:
        """Look at all processes of this host, and so of the containers."""
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # it has ended
                words = file.read_text(errors="replace")
                self._in_arguments |= {
                    f"{name} in arguments of {words.split(chr(0))[0]}" for name in self._secrets_in(words)
                }

    def _airflow(self) -> AirflowApi:
        return AirflowApi(f"http://{self._engine.address('airflow')}:8080")

    def _dsn(self) -> str:
        address, password = self._engine.address("postgres"), self._secrets["REPLICATOR_PASSWORD"]
        return f"host={address} dbname=bench user=replicator password={password} connect_timeout=10"

    def _use_store(self) -> None:
        given = {
            "AWS_ENDPOINT_URL_S3": f"http://{self._engine.address('store')}:7070",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "lake",
            "AWS_SECRET_ACCESS_KEY": self._secrets["LAKE_SECRET"],
        }
        use_store(given)

    def _wait(self, what: str, state: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + _STATE_S
        last: Exception | None = None
        while time.monotonic() < deadline:
            try:
                if found := state():
                    return found
            except _PASSING as error:
                last = error
            time.sleep(2)
        raise AssertionError(f"waited {_STATE_S:.0f} s for {what}: {last or 'nothing failed'}")


def _ended(state: str) -> str | None:
    return state if state in ("success", "failed") else None


@contextmanager
def _timed(what: str) -> Iterator[None]:
    began = time.monotonic()
    print(f"{what} …", flush=True)
    yield
    print(f"    {time.monotonic() - began:.0f} s", flush=True)


def main() -> int:
    given = {name: secrets.token_hex(32) for name in set(re.findall(r"\$\{(\w+):\?", COMPOSE.read_text()))}
    began = time.monotonic()
    with Engine(given) as engine:
        rehearsal = Rehearsal(engine, given)
        steps: list[tuple[str, Callable[[], None]]] = [
            ("images", rehearsal.build),
            ("what the image holds", rehearsal.check_image),
            ("up", rehearsal.up),
            ("snapshot", rehearsal.snapshot),
            ("traffic, and equal tables", rehearsal.traffic),
            ("a command", rehearsal.command),
            ("kill of Airflow's first process", lambda: rehearsal.kill_first_process("airflow")),
            ("traffic, and equal tables", rehearsal.traffic),
            ("kill of PostgreSQL's first process", lambda: rehearsal.kill_first_process("postgres")),
            ("traffic, and equal tables", rehearsal.traffic),
            ("secrets", rehearsal.check_secrets),
            ("down and up", rehearsal.down_and_up),
            ("traffic, and equal tables", rehearsal.traffic),
        ]
        for what, step in steps:
            with _timed(what):
                step()
    print(f"rehearsal done in {time.monotonic() - began:.0f} s; images and caches stay in {FOLDER}")
    return 0


def _stop(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    sys.exit(main())
