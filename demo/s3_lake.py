"""`LAKE=s3`: the lake in a store that speaks S3, reached as an Airflow connection says."""

from __future__ import annotations

from airflow_provider_pgrepl.replication.settings.store_variables import use_store
from demo.airflow import connection
from demo.errors import DemoError
from demo.folder import Folder
from demo.versitygw import PROGRAM, REGION, Gateway

CONN_ID = "demo_lake"
_BUCKET = "demo"


class S3Lake:
    """A server with one bucket; what reads the lake in this process reaches it, too."""

    uri = f"s3://{_BUCKET}/lake"

    def __init__(self, folder: Folder) -> None:
        self._gateway = Gateway(folder.store)

    @property
    def variables(self) -> dict[str, str]:
        """The Airflow connection that the pipeline names."""
        keys = self._gateway.client_environment
        given = connection(
            "aws",
            login=keys["AWS_ACCESS_KEY_ID"],
            password=keys["AWS_SECRET_ACCESS_KEY"],
            extra={"region_name": REGION, "endpoint_url": keys["AWS_ENDPOINT_URL_S3"]},
        )
        return {f"AIRFLOW_CONN_{CONN_ID.upper()}": given}

    def start(self) -> str:
        """Returns what to say of it. Raises DemoError."""
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
    """Whether the server is built."""
    return PROGRAM.exists()
