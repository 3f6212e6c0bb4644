"""A client of Airflow's public API with the calls that the demo needs."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable
from typing import Any

from demo.errors import DemoError

# Ignore proxies of the environment: a proxy cannot reach a server on this host.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


NO_MORE_TRIES = 1_000_000
_READS = 3
"""On an overloaded host Airflow leaves a request without an answer for minutes, and answers the next one."""


class AirflowApi:
    """A client that logs in as an administrator. In this mode, Airflow requires no password.

    :param answer_s: the seconds to wait for an answer; a request that only reads is made again
    """

    def __init__(self, url: str, answer_s: float = 180) -> None:
        self._url = url
        self._answer_s = answer_s
        self._token = ""

    def is_healthy(self) -> bool:
        """Return True if every component reports that it is healthy, False while the server is silent."""
        try:
            parts = self._call("GET", "/api/v2/monitor/health", signed=False)
        except OSError:
            return False
        return all(
            (parts.get(name) or {}).get("status") == "healthy"
            for name in ("metadatabase", "scheduler", "dag_processor", "triggerer")
        )

    def has_dags(self, dag_ids: Iterable[str]) -> bool:
        """Return True if Airflow has read these DAGs. If not, raise DemoError for import errors."""
        known = {dag["dag_id"] for dag in self._call("GET", "/api/v2/dags?limit=100")["dags"]}
        missing = set(dag_ids) - known
        if missing and (errors := self.import_errors()):
            raise DemoError("Airflow cannot import a DAG:\n" + "\n".join(errors))
        return not missing

    def import_errors(self) -> list[str]:
        try:
            found = self._call("GET", "/api/v2/importErrors")["import_errors"]
        except OSError:
            return []
        return [f"{error['filename']}:\n{error['stack_trace']}" for error in found]

    def set_paused(self, dag_id: str, paused: bool) -> None:
        self._call("PATCH", f"/api/v2/dags/{dag_id}", {"is_paused": paused})

    def is_paused(self, dag_id: str) -> bool:
        return bool(self._call("GET", f"/api/v2/dags/{dag_id}")["is_paused"])

    def trigger(self, dag_id: str) -> str:
        """Start a run of a DAG and return its id."""
        return str(self._call("POST", f"/api/v2/dags/{dag_id}/dagRuns", {"logical_date": None})["dag_run_id"])

    def run_state(self, dag_id: str, run_id: str) -> str:
        return str(self._call("GET", f"/api/v2/dags/{dag_id}/dagRuns/{run_id}")["state"])

    def last_run(self, dag_id: str) -> tuple[str, str] | None:
        """Return id and state of the newest run, or None if there is none yet."""
        runs = self._call("GET", f"/api/v2/dags/{dag_id}/dagRuns?order_by=-id&limit=1")["dag_runs"]
        return (str(runs[0]["dag_run_id"]), str(runs[0]["state"])) if runs else None

    def fail_run(self, dag_id: str, run_id: str) -> None:
        """Mark the run as failed, which ends its tasks."""
        self._call("PATCH", f"/api/v2/dags/{dag_id}/dagRuns/{run_id}", {"state": "failed"})

    def failed_tries(self, dag_id: str, run_id: str) -> int:
        """Return the number of failed tries of a run's task. `NO_MORE_TRIES` if no further try follows."""
        tasks = self._call("GET", f"/api/v2/dags/{dag_id}/dagRuns/{run_id}/taskInstances")["task_instances"]
        if any(task["state"] in ("failed", "upstream_failed") for task in tasks):
            return NO_MORE_TRIES
        return max((int(task["try_number"]) for task in tasks if task["state"] == "up_for_retry"), default=0)

    def task_logs(self, dag_id: str, run_id: str, lines: int = 30) -> str:
        """Return the last `lines` log lines of each task of the run."""
        path = f"/api/v2/dags/{dag_id}/dagRuns/{run_id}/taskInstances"
        found = []
        for task in self._call("GET", path)["task_instances"]:
            number = max(1, task.get("try_number") or 1)
            content = self._call("GET", f"{path}/{task['task_id']}/logs/{number}?full_content=true")[
                "content"
            ]
            texts = [_log_line(entry) for entry in content]
            found.append(f"  {task['task_id']}: {task['state']}\n" + "\n".join(texts[-lines:]))
        return "\n".join(found)

    def _call(self, method: str, path: str, body: object = None, *, signed: bool = True) -> Any:
        headers = {"Accept": "application/json"}
        if signed:
            headers["Authorization"] = f"Bearer {self._signed_in()}"
        data = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            data = json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        for _ in range(_READS if method == "GET" else 1):
            try:
                with _opener.open(request, timeout=self._answer_s) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                said = error.read(2000).decode(errors="replace")
                raise DemoError(f"Airflow refused {method} {path}: {error.code} {said}") from None
            except TimeoutError:
                continue
        raise TimeoutError(
            f"Airflow does not answer {method} {path} within {self._answer_s:g} s: end other programs on this"
            " host, and run the demo again"
        )

    def _signed_in(self) -> str:
        if not self._token:
            self._token = str(self._call("GET", "/auth/token", signed=False)["access_token"])
        return self._token


def _log_line(entry: Any) -> str:
    if isinstance(entry, str):
        return f"    {entry}"
    return f"    {entry.get('event', entry)}"
