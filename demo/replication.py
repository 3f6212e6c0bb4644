"""The DAGs of the demo, run by API calls: trigger the snapshot, unpause the others, pause them at the end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from demo import processes
from demo.airflow import Airflow
from demo.errors import DemoError

SNAPSHOT_DAG = "pgrepl_snapshot"
REPLICATE_DAG = "pgrepl_replicate"
PUBLISH_DAG = "pgrepl_publish"

_APPS = ("spark_apps/replicate.py", "spark_apps/publish.py")
_POLL_S = 1.0
_END_WAIT_S = 25.0


class Replication:
    """Snapshot, replication and publishing, controlled only by Airflow's API."""

    def __init__(self, airflow: Airflow, say: Callable[[str], None]) -> None:
        self._airflow = airflow
        self._say = say
        self._begun: list[str] = []
        self._failed_tries: dict[tuple[str, str], int] = {}

    def snapshot(self) -> None:
        """Trigger the snapshot DAG and wait until it has succeeded. Raises DemoError with its log."""
        self._airflow.wait_until_ready(SNAPSHOT_DAG, REPLICATE_DAG, PUBLISH_DAG)
        api = self._airflow.api
        api.set_paused(SNAPSHOT_DAG, False)
        run_id = api.trigger(SNAPSHOT_DAG)
        self._say(f"Airflow is ready; triggered {SNAPSHOT_DAG}")
        began = time.monotonic()
        while api.run_state(SNAPSHOT_DAG, run_id) != "success":
            self._airflow.check_alive()
            self._check(SNAPSHOT_DAG, run_id)
            time.sleep(_POLL_S)
        self._say(f"{SNAPSHOT_DAG} succeeded after {time.monotonic() - began:.0f} s")

    def begin(self, dag_id: str) -> None:
        """Unpause a continuous DAG."""
        self._begun.append(dag_id)
        self._airflow.api.set_paused(dag_id, False)
        self._say(f"switched {dag_id} on (@continuous)")

    def check(self) -> None:
        """Raise DemoError with the log if one of the DAGs that `begin` started has failed."""
        for dag_id in self._begun:
            run = self._airflow.api.last_run(dag_id)
            if run is not None:
                self._check(dag_id, run[0])

    def _check(self, dag_id: str, run_id: str) -> None:
        """Raise DemoError if the run or its second try has failed. One try may fail on a busy host."""
        failed = self._airflow.api.failed_tries(dag_id, run_id)
        if failed <= self._failed_tries.get((dag_id, run_id), 0):
            return
        self._failed_tries[dag_id, run_id] = failed
        log = self._airflow.api.task_logs(dag_id, run_id)
        if failed > 1:
            raise DemoError(f"{dag_id} failed. Its log ends with\n{log}")
        self._say(f"a try of {dag_id} failed, and Airflow tries again. Its log ends with\n{log}")

    def end(self) -> None:
        """Pause the DAGs, and wait up to 25 s for their apps to end between two batches.

        Errors of Airflow are ignored.
        """
        begun, self._begun = self._begun, []
        with contextlib.suppress(DemoError, OSError):
            were_running = [self._switch_off(dag_id) for dag_id in begun]
            if any(were_running):
                deadline = time.monotonic() + _END_WAIT_S
                while any(map(processes.has_descendant, _APPS)) and time.monotonic() < deadline:
                    time.sleep(0.2)

    def _switch_off(self, dag_id: str) -> bool:
        """Pause a DAG and end its run. Returns True if there was a running one."""
        api = self._airflow.api
        api.set_paused(dag_id, True)
        run = api.last_run(dag_id)
        if run is None or run[1] != "running":
            return False
        api.fail_run(dag_id, run[0])
        return True
