"""RabbitMQ: events as persistent messages of a topic exchange, each confirmed by the broker."""

from __future__ import annotations

import pika

from airflow_provider_pgrepl.errors import TargetError
from airflow_provider_pgrepl.replication.events.targets.base import Linked
from airflow_provider_pgrepl.replication.events.targets.rabbitmq_link import RabbitMQLink
from airflow_provider_pgrepl.replication.events.targets.rabbitmq_reasons import RabbitMQReasons
from airflow_provider_pgrepl.replication.settings.publisher_settings import PublisherSettings

_HEARTBEAT_S = 20
_SCHEMES = ("amqp://", "amqps://")


class RabbitMQ(Linked[RabbitMQLink]):
    """A connection with one channel, served by a thread of its own, so that heartbeats are answered however
    long nothing is sent. `uri`: `amqp(s)://user:password@host:port/vhost`, never shown.

    A message that the broker does not take, as one that is too large, ends the channel, with all that is on
    the way: those are then sent one at a time, so that it is known which was meant.
    """

    def __init__(self, uri: str, settings: PublisherSettings) -> None:
        self._parameters = _parameters(uri)
        super().__init__(RabbitMQReasons(self._parameters).where)
        self._settings = settings
        self._refused: dict[str, str] = {}
        self._suspects: set[str] = set()

    def connect(self) -> None:
        """Raises TargetUnavailableError; TargetError when login, virtual host or exchange is refused."""
        self.close()
        link = RabbitMQLink(self._parameters, self._settings, self._refused, self._suspects)
        link.start()
        self._link = link


def _parameters(uri: str) -> pika.URLParameters:
    try:
        parameters = pika.URLParameters(uri) if uri.startswith(_SCHEMES) else None
    except Exception:  # noqa: BLE001 - pika raises many, and their texts may hold the password
        parameters = None
    if parameters is None:
        raise TargetError(
            "the URI of RabbitMQ cannot be read",
            "give it as amqp://user:password@host:5672/vhost, with what is special in a name percent-encoded;"
            " a virtual host / is %2F",
        )
    parameters.heartbeat = _HEARTBEAT_S
    parameters.connection_attempts = 1
    return parameters
