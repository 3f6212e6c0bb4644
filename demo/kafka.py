"""A private Kafka broker (KRaft, one node) from the jars in .kafka. It listens on 127.0.0.1 only."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

from demo.postgres import free_port
from demo.server_process import ServerProcess

JARS = Path(__file__).resolve().parents[1] / ".kafka"
_CLUSTER = "cGdyZXBsLWthZmthLXRlc3Q"
_LOG4J = """
Configuration:
  Appenders:
    Console: {name: out, PatternLayout: {pattern: "%d %p %c{1}: %m%n"}}
  Loggers:
    Root: {level: WARN, AppenderRef: {ref: out}}
"""


def is_there() -> bool:
    """Return True if `sh setup/kafka.sh` has downloaded Kafka, and Java is installed."""
    return any(JARS.glob("kafka_*.jar")) and shutil.which("java") is not None


class KafkaBroker(ServerProcess):
    """A broker with its own data, which is also its controller. `settings`: more lines of its properties."""

    name = "Kafka"
    java_options: tuple[str, ...] = ("-Xmx512m", "-XX:+UseSerialGC")

    def __init__(self, folder: Path, settings: str = "", protocol: str = "PLAINTEXT") -> None:
        super().__init__(folder)
        self.settings, self.protocol = settings, protocol
        self.advertised = ""
        """The address that the broker advertises to clients, if it is not its own."""
        self._controller = free_port()

    @property
    def uri(self) -> str:
        return f"kafka://{self.servers}"

    @property
    def servers(self) -> str:
        return f"127.0.0.1:{self.port}"

    def prepare(self) -> None:
        if not is_there():
            raise RuntimeError("Kafka is not there: sh setup/kafka.sh")
        properties = self._write_properties()
        if not (self.folder / "data" / "meta.properties").exists():
            self._run_java("kafka.tools.StorageTool", "format", "-t", _CLUSTER, "-c", str(properties))

    def command(self) -> list[str]:
        return self._java("kafka.Kafka", str(self.folder / "server.properties"))

    def answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1):
                return True
        except OSError:
            return False

    def _write_properties(self) -> Path:
        (self.folder / "log4j2.yaml").write_text(_LOG4J, encoding="utf-8")
        file = self.folder / "server.properties"
        address, controller = f"127.0.0.1:{self.port}", f"127.0.0.1:{self._controller}"
        lines = (
            "process.roles=broker,controller",
            "node.id=1",
            f"controller.quorum.voters=1@{controller}",
            f"listeners={self.protocol}://{address},CONTROLLER://{controller}",
            f"advertised.listeners={self.protocol}://{self.advertised or address}",
            f"inter.broker.listener.name={self.protocol}",
            "controller.listener.names=CONTROLLER",
            "listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT,"
            "SASL_SSL:SASL_SSL,SSL:SSL",
            f"log.dirs={self.folder / 'data'}",
            "offsets.topic.replication.factor=1",
            "transaction.state.log.replication.factor=1",
            "transaction.state.log.min.isr=1",
            "group.initial.rebalance.delay.ms=0",
            "auto.create.topics.enable=false",
            "offsets.topic.num.partitions=1",
            "transaction.state.log.num.partitions=1",
            self.settings,
        )
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return file

    def _java(self, *arguments: str) -> list[str]:
        log = f"-Dlog4j2.configurationFile={self.folder / 'log4j2.yaml'}"
        return [shutil.which("java") or "java", *self.java_options, log, "-cp", f"{JARS}/*", *arguments]

    def _run_java(self, *arguments: str) -> None:
        done = subprocess.run(self._java(*arguments), capture_output=True, text=True, check=False, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{arguments[0]} failed:\n{done.stdout}{done.stderr}")
