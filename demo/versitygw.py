"""A private S3-compatible server, which `setup/versitygw.sh` builds. It listens on 127.0.0.1 only."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from demo.server_process import ServerProcess

PROGRAM = Path(__file__).parents[1] / ".versitygw" / "versitygw"
REGION = "us-east-1"


def environment_of(port: int) -> dict[str, str]:
    """Return the environment variables of a client for the store at a port of this host."""
    return {
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "pgrepl",
        "AWS_SECRET_ACCESS_KEY": "pgrepl-secret",
        "AWS_REGION": REGION,
    }


class Gateway(ServerProcess):
    """A versitygw server. Its buckets are folders below `folder`/data, and its objects are files."""

    name = "versitygw"

    @property
    def client_environment(self) -> dict[str, str]:
        return environment_of(self.port)

    @property
    def data(self) -> Path:
        """The folder that has a folder for each bucket."""
        return self.folder / "data"

    def prepare(self) -> None:
        if not PROGRAM.exists():
            raise RuntimeError("versitygw is not there: sh setup/versitygw.sh")
        self.data.mkdir(exist_ok=True)

    def make_bucket(self, name: str) -> None:
        (self.data / name).mkdir(exist_ok=True)

    def command(self) -> list[str]:
        listening = ["--port", f"127.0.0.1:{self.port}", "--quiet"]
        return [str(PROGRAM), *listening, "posix", *self._sidecar(), str(self.data)]

    def _sidecar(self) -> list[str]:
        """Return the options for a metadata folder, if the file system has no extended attributes.

        Otherwise versitygw stores the metadata of objects in extended attributes of their files.
        """
        try:
            os.setxattr(self.data, "user.pgrepl", b"")
        except OSError:
            beside = self.folder / "sidecar"
            beside.mkdir(exist_ok=True)
            return ["--sidecar", str(beside)]
        return []

    def environment(self) -> Mapping[str, str]:
        keys = self.client_environment
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "ROOT_ACCESS_KEY": keys["AWS_ACCESS_KEY_ID"],
            "ROOT_SECRET_KEY": keys["AWS_SECRET_ACCESS_KEY"],
            "VGW_REGION": REGION,
        }

    def answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1):
                return True
        except OSError:
            return False
