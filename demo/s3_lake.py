"""The demo with `LAKE=s3`: the lake in an S3-compatible store, which an Airflow connection names."""

from __future__ import annotations

from airflow_provider_pgrepl.replication.settings.store_variables import use_store
from demo.airflow import connection
from demo.errors import DemoError
from demo.folder import Folder
from demo.versitygw import PROGRAM, REGION, Gateway

CONN_ID = "demo_lake"
_BUCKET = "demo"


class S3Lake:
    """A server with one bucket. `start` also makes this process use it for reads of the lake."""

    uri = f"s3://{_BUCKET}/lake"

    def __init__(self, folder: Folder) -> None:
        self._gateway = Gateway(folder.store)

    @property
    def variables(self) -> dict[str, str]:
        """The variable with the Airflow connection of the pipeline's `lake_conn_id`."""
        keys = self._gateway.client_environment
        given = connection(
            "aws",
            login=keys["AWS_ACCESS_KEY_ID"],
            password=keys["AWS_SECRET_ACCESS_KEY"],
            extra={"region_name": REGION, "endpoint_url": keys["AWS_ENDPOINT_URL_S3"]},
        )
        return {f"AIRFLOW_CONN_{CONN_ID.upper()}": given}

    def start(self) -> str:
        """Start the server, and return a line that describes it. Raises DemoError."""
        try:
            self._gateway.start()
        except (RuntimeError, OSError) as error:
            raise DemoError(f"The store did not start: {error}") from None
        self._gateway.make_bucket(_BUCKET)
        use_store(self._gateway.client_environment)
        return f"versitygw, a server that speaks S3, on port {self._gateway.port}; the lake is {self.uri}"

    def stop(self) -> None:
        self._gateway.stop()


def is_there() -> bool:
    """Return True if the server program is built."""
    return PROGRAM.exists()
