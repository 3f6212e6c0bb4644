"""The demo's checks before it starts, and its cleanup of the processes that it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from demo import preconditions, processes
from demo.airflow_api import AirflowApi
from demo.errors import DemoError
from demo.folder import Folder
from demo.options import read_options

ROOT = Path(__file__).resolve().parents[2]

# A child that ends at once and leaves a grandchild, in a session of its own, that ignores requests to end.
ORPHAN = """
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
"""

# A child that starts another one, and whose first thread ends before its second.
HEADLESS = """
import subprocess, threading
print(subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL).pid, flush=True)
threading.Thread(target=threading.Event().wait, args=[600]).start()
import ctypes
ctypes.CDLL(None).pthread_exit(None)
"""

PARENT_OF_HEADLESS = f"""
import subprocess, sys, time
from pathlib import Path
from demo import processes
processes.adopt_orphans(Path(sys.argv[1]))
child = subprocess.Popen([sys.executable, "-c", {HEADLESS!r}])
while ") Z " not in Path(f"/proc/{{child.pid}}/stat").read_text():
    time.sleep(0.05)
processes.end_descendants()
"""

PARENT = f"""
import subprocess, sys, time
from pathlib import Path
from demo import processes
processes._GRACE_S = 0.1
processes.adopt_orphans(Path(sys.argv[1]))
subprocess.run([sys.executable, "-c", {ORPHAN!r}], check=True)
# A process that has just been started has no environment yet.
while not (orphans := processes._marked(Path(sys.argv[1]))):
    time.sleep(0.05)
print(*orphans, flush=True)
if sys.argv[2] == "end":
    processes.end_descendants()
else:
    time.sleep(600)
"""


def parent(folder: Path, then: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PARENT, str(folder), then]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def orphan_of(process: subprocess.Popen[str]) -> int:
    return int(process.stdout.readline().split()[-1])


def test_an_orphan_that_ignores_the_request_to_end_is_ended(tmp_path):
    with parent(tmp_path, "end") as process:
        orphan = orphan_of(process)
        assert process.wait(timeout=120) == 0
    assert not is_running(orphan)


def test_a_process_whose_first_thread_has_ended_is_ended_and_so_is_what_it_started(tmp_path):
    command = [sys.executable, "-c", PARENT_OF_HEADLESS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        grandchild = orphan_of(process)
        assert process.wait(timeout=120) == 0
    assert not is_running(grandchild)


def test_process_left_by_killed_demo_is_found_and_ended(tmp_path):
    with parent(tmp_path, "stay") as process:
        orphan = orphan_of(process)
        process.kill()
        process.wait()
    assert is_running(orphan)
    assert processes.end_leftovers(tmp_path) == 1
    assert not is_running(orphan)


def test_cleanup_leaves_processes_from_other_demo_folders_running(tmp_path):
    with parent(tmp_path / "one", "stay") as process:
        orphan = orphan_of(process)
        try:
            assert processes.end_leftovers(tmp_path / "two") == 0
            assert is_running(orphan)
        finally:
            process.kill()
            os.kill(orphan, signal.SIGKILL)


def test_a_second_demo_in_the_same_folder_is_refused_by_the_first_ones_process(tmp_path):
    first = Folder(tmp_path / "demo")
    first.claim()
    with pytest.raises(DemoError, match=f"already running here \\(process {os.getpid()}\\)"):
        Folder(tmp_path / "demo").claim()


def test_a_new_demo_finds_nothing_of_the_last_one_but_airflows_empty_database(tmp_path):
    folder = Folder(tmp_path / "demo")
    folder.claim()
    folder.clear()
    (folder.lake / "old").touch()
    (folder.root / "airflow-3.db").touch()
    folder.clear()
    assert not any(folder.lake.iterdir())
    assert (folder.root / "airflow-3.db").exists()


def test_a_port_in_use_is_named_with_the_option_that_mends_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            DemoError, match=f"Port {port}, meant for Airflow, .* make demo AIRFLOW_PORT={port + 1}"
        ):
            preconditions.check_port("Airflow", port, "AIRFLOW_PORT")
    preconditions.check_port("Airflow", port, "AIRFLOW_PORT")


def test_too_little_disk_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(preconditions, "NEEDED_GIB", 1e9)
    with pytest.raises(DemoError, match=r"needs .* GiB of disk"):
        preconditions.check(read_options([]), tmp_path)


@pytest.mark.parametrize("arguments", [["--rate", "0"], ["--pg-port", "80"], ["--scale", "many"]])
def test_an_option_out_of_range_is_refused(arguments):
    with pytest.raises(SystemExit):
        read_options(arguments)


@contextmanager
def silent_for(requests: int) -> Iterator[str]:
    """The address of a server that does not answer its first `requests` requests."""
    asked, ended = [], threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if len(asked) <= requests:
                ended.wait(60)
                return
            body = b'{"access_token": "t", "is_paused": true}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


def test_request_that_airflow_leaves_without_an_answer_is_made_again():
    with silent_for(1) as address:
        assert AirflowApi(address, answer_s=1).is_paused("pgrepl_snapshot") is True


def test_silent_airflow_is_named_with_the_request():
    with (
        silent_for(100) as address,
        pytest.raises(TimeoutError, match=r"Airflow does not answer GET /auth/token within 0\.1 s"),
    ):
        AirflowApi(address, answer_s=0.1).is_paused("pgrepl_snapshot")
