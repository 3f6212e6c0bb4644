"""podman and Docker Compose with images, containers and networks of their own below `.rehearsal/`.

They need neither systemd nor an image registry.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import yaml

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
FOLDER = ROOT / ".rehearsal"
COMPOSE = ROOT / "docker-compose.yaml"
SERVICES: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
BASE_IMAGES = {"PYTHON": "python", "MAVEN": "maven"}
"""Arguments of the Dockerfile, and the stages of this folder's Dockerfile that stand in for their values."""

_CERTIFICATES = Path("/usr/local/share/ca-certificates")
"""Where a host has the certificates of authorities of its own."""
_SOCKET = FOLDER / "podman.sock"
_BUILD_S = 3600.0
_COMMAND_S = 120.0
_CHECKS_EVERY_S = 10.0
"""No more often than any service asks for: podman counts `retries` in runs, not in time."""


class Engine:
    """Inside its block, Docker Compose speaks to podman; at the end of it nothing runs any more."""

    def __init__(self, secrets: dict[str, str]) -> None:
        """`secrets`: the variables of docker-compose.yaml."""
        self._environment = {
            **os.environ,
            **secrets,
            "CONTAINERS_CONF": str(FOLDER / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(FOLDER / "storage.conf"),
            "DISABLE_HC_SYSTEMD": "true",
            "DOCKER_HOST": f"unix://{_SOCKET}",
            "DOCKER_BUILDKIT": "0",
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
        }
        self._log = FOLDER / "engine.log"
        self._blocks = ExitStack()

    def __enter__(self) -> Self:
        with self._blocks:
            blocks = self._blocks
            lock = blocks.enter_context((FOLDER / "lock").open("w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SystemExit(
                    f"another rehearsal holds {FOLDER / 'lock'}; wait until it has ended"
                ) from None
            blocks.callback(_unmount)
            _write_settings()
            self._serve(blocks)
            # Also what a rehearsal that was killed has left.
            self.compose("down", "--volumes", "--timeout", "10", timeout=300)
            blocks.callback(self.compose, "down", "--volumes", "--timeout", "10", timeout=300)
            self.repeat(_CHECKS_EVERY_S, self._check_health)
            self._blocks = blocks.pop_all()
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        for service in SERVICES if failure else ():
            with suppress(SystemExit):  # it has no container
                (FOLDER / f"{service}.log").write_text(self.logs(service))
        self._blocks.close()

    def podman(self, *arguments: str, timeout: float = _COMMAND_S) -> str:
        """Return the standard output. Raises SystemExit with the standard error."""
        return self._run("podman", *arguments, timeout=timeout)

    def compose(self, *arguments: str, timeout: float = _COMMAND_S) -> str:
        files = (COMPOSE, HERE / "rehearsal.yaml", FOLDER / "checks.json")
        chosen = [word for file in files for word in ("--file", str(file))]
        return self._run(str(FOLDER / "docker-compose"), *chosen, *arguments, timeout=timeout)

    def build(self, image: str, *arguments: str) -> None:
        """Build from the repository, or from the context that `arguments` name, by the host's network."""
        # By podman itself: a build by its API shares no layers with others, and builds unused stages, too.
        self.podman("build", "--network", "host", "--tag", image, *arguments, timeout=_BUILD_S)

    def build_base_image(self, stage: str) -> str:
        """Build a stand-in by a stage of this folder's Dockerfile; return its name."""
        context = FOLDER / "context"
        certificates = context / "certificates"
        shutil.rmtree(certificates, ignore_errors=True)
        certificates.mkdir()
        for file in _CERTIFICATES.glob("**/*.crt"):
            shutil.copy(file, certificates)
        shutil.copy(HERE / "postgres.sh", context)
        image = f"localhost/rehearsal-{stage}"
        self.build(image, "--file", str(HERE / "Dockerfile"), "--target", stage, str(context))
        return image

    def container(self, service: str) -> dict[str, Any]:
        """Return what `podman inspect` says of a service's container."""
        return dict(json.loads(self.podman("inspect", f"pgrepl-{service}-1"))[0])

    def address(self, service: str) -> str:
        (network,) = self.container(service)["NetworkSettings"]["Networks"].values()
        return str(network["IPAddress"])

    def logs(self, service: str) -> str:
        """All that a service's container has written to both of its streams."""
        command = 'exec podman logs "$0" 2>&1'
        return self._run("sh", "-c", command, f"pgrepl-{service}-1", timeout=_COMMAND_S)

    def repeat(self, seconds: float, work: Callable[[], None]) -> None:
        """Do this in a thread, with pauses, until the end of the engine's block."""
        over = threading.Event()

        def run() -> None:
            while not over.wait(seconds):
                work()

        thread = threading.Thread(target=run)
        thread.start()
        self._blocks.callback(thread.join)
        self._blocks.callback(over.set)

    def _run(self, *command: str, timeout: float) -> str:
        try:
            ended = subprocess.run(
                command,
                env=self._environment,
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{shlex.join(command)} did not end within {timeout:.0f} s") from None
        with self._log.open("a") as log:
            log.write(f"$ {shlex.join(command)}\n{ended.stdout[-2000:]}{ended.stderr[-20_000:]}\n")
        if ended.returncode:
            said = (ended.stdout + ended.stderr)[-4000:]
            raise SystemExit(f"{shlex.join(command)} ended with {ended.returncode}:\n{said}")
        return ended.stdout

    def _serve(self, blocks: ExitStack) -> None:
        _SOCKET.unlink(missing_ok=True)
        with self._log.open("w") as log:
            command = ["podman", "system", "service", "--time", "0", f"unix://{_SOCKET}"]
            # A session of its own: Ctrl-C is for the rehearsal, which needs the service to take all down.
            service = subprocess.Popen(
                command, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        blocks.callback(service.wait, 60)
        blocks.callback(service.terminate)
        deadline = time.monotonic() + _COMMAND_S
        while not _SOCKET.exists():
            if service.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"podman's service does not start; see {self._log}")
            time.sleep(0.2)

    def _check_health(self) -> None:
        """Run the health checks, which podman leaves to systemd's timers."""
        running = ["timeout", "60", "podman", "ps", "--quiet", "--filter", "status=running"]
        found = subprocess.run(running, env=self._environment, capture_output=True, text=True, check=False)
        for container in found.stdout.split():
            check = ["timeout", "60", "podman", "healthcheck", "run", container]
            subprocess.run(check, env=self._environment, capture_output=True, check=False)


def _unmount() -> None:
    """Unmount all below the folder, also what a killed build left: it can be removed then."""
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        place = line.split()[1]
        if place.startswith(f"{FOLDER}/"):
            subprocess.run(["umount", place], check=False)


def _write_settings() -> None:
    """Write how podman is to work, and the health checks as it understands them."""
    # Without CAP_SYS_RESOURCE no limit may be raised. Podman 4.3 lowers that of processes to that of files,
    # and exchanges soft and hard ones.
    hard = (resource.getrlimit(limit)[1] for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    most = min((limit for limit in hard if limit != resource.RLIM_INFINITY), default=1 << 20)
    # crun fails where both versions of cgroups are mounted.
    containers = f"""
[containers]
default_ulimits = ["nofile={most}:{most}", "nproc={most}:{most}"]
init_path = "/usr/bin/catatonit"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
tmp_dir = "{FOLDER}/run/libpod"
[network]
network_config_dir = "{FOLDER}/networks"
"""
    storage = f"""
[storage]
driver = "overlay"
graphroot = "{FOLDER}/images"
runroot = "{FOLDER}/run/storage"
"""
    (FOLDER / "containers.conf").write_text(containers)
    (FOLDER / "storage.conf").write_text(storage)
    # The API of podman 4.3 splits the words of a check at blanks: one text for a shell.
    checks = {
        name: {"healthcheck": {"test": ["CMD-SHELL", shlex.join(service["healthcheck"]["test"][1:])]}}
        for name, service in SERVICES.items()
        if "healthcheck" in service
    }
    (FOLDER / "checks.json").write_text(json.dumps({"services": checks}))
