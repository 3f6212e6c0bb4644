"""Apps that tests start: the stand-in, as real processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.spark_driver.claim import AppReservation, RunDirectory
from airflow_provider_pgrepl.spark_driver.process import AppState, LocalApp
from tests.airflow.conftest import Journal, eventually

STAND_IN = str(Path(__file__).parent / "stand_in.py")
SHOP = Pipeline(name="shop", lake=f"/lake-{os.getpid()}", tables=("public.*",))
"""A pipeline of this process alone: apps of one pipeline find each other on the whole host."""


class Launcher:
    """Starts the stand-in with some arguments."""

    def __init__(
        self, journal: Journal, *arguments: str, stop_timeout_s: float = 20, unfollowed_s: float = 900
    ) -> None:
        self._journal = journal
        self._arguments = arguments
        self._timeouts = stop_timeout_s, unfollowed_s

    def __call__(self, claim: AppReservation) -> LocalApp:
        file = claim.folder / "pipeline.json"
        file.write_text('{"name": "shop"}', encoding="utf-8")
        command = [sys.executable, STAND_IN, "--pipeline", str(file), "--journal", str(self._journal.path)]
        environment = {**os.environ, "PGREPL_DSN": "host=nowhere"}
        return claim.launch([*command, *self._arguments], STAND_IN, environment, *self._timeouts)


def launch(place: RunDirectory, journal: Journal, *arguments: str, stop_timeout_s: float = 20) -> LocalApp:
    with place.claim() as claim:
        return Launcher(journal, *arguments, stop_timeout_s=stop_timeout_s)(claim)


def ended(app: LocalApp) -> AppState:
    eventually(lambda: app.status() is not AppState.RUNNING, "the end of the app")
    return app.status()


def texts(app: LocalApp, **how: bool) -> list[str]:
    return [line.text for line in app.log().new_lines(**how)]
