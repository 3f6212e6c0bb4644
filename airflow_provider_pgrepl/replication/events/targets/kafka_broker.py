"""Kafka's transactions: each holds whole transactions of the source; consumers see all of it, or nothing."""

from __future__ import annotations

import time

from confluent_kafka import KafkaError, KafkaException, Producer

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.events.targets.base import Sending
from airflow_provider_pgrepl.replication.events.targets.kafka_properties import (
    LONGEST_TRANSACTION_MS,
    TRANSACTION_TIMEOUT,
)
from airflow_provider_pgrepl.replication.events.targets.kafka_reasons import KafkaReasons

_CONNECT_S, _COMMIT_S, _ABORT_S, _PAUSE_S = 20.0, 60.0, 5.0, 0.2
_FENCED = frozenset(
    {KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED}
    | {KafkaError.INVALID_TXN_STATE, KafkaError.INVALID_PRODUCER_ID_MAPPING}
)
"""Also when the brokers have ended a transaction that took too long."""


class KafkaTransactions:
    """Of one producer. Called by the publisher's thread alone; another hears of messages meanwhile.

    `is_whole`: whether the open one may be committed.
    """

    def __init__(self, producer: Producer, timeout_ms: int, reasons: KafkaReasons) -> None:
        self._producer, self._timeout_s, self._reasons = producer, timeout_ms / 1_000, reasons
        self._open: list[Sending] = []
        self.is_whole = True
        self._began_at = 0.0

    def begin(self) -> None:
        """Once, before all else: a producer of the same name is shut out, and what it left open is undone.

        Raises what KafkaReasons makes of errors; TargetError when the cluster is against it for good.
        """
        try:
            self._producer.init_transactions(_CONNECT_S)
        except KafkaException as error:
            raise self._error_of(error.args[0]) from None

    def take(self, sending: Sending) -> None:
        """Events that are sent next are part of the open transaction, or of a new one."""
        self.is_whole = sending.ends_transaction
        if not sending.count:
            return
        if not self._open:
            try:
                self._producer.begin_transaction()
            except KafkaException as error:
                raise self.reason_of(error.args[0]) from None
            self._began_at = time.monotonic()
        sending.waits_for_commit = True
        self._open.append(sending)

    def commit(self) -> None:
        """Raises what KafkaReasons makes of errors: then nobody knows whether it is committed."""
        deadline = time.monotonic() + _COMMIT_S
        while True:
            try:
                self._producer.commit_transaction(_COMMIT_S)
                break
            except KafkaException as error:
                cause = error.args[0]
                if not cause.retriable() or time.monotonic() > deadline:
                    raise self.reason_of(cause) from None
                time.sleep(_PAUSE_S)
        for sending in self._open:
            sending.commit()
        self._open = []

    @property
    def is_open(self) -> bool:
        """Whether anything was sent since the last one was committed."""
        return bool(self._open)

    def abort(self) -> None:
        """Whoever reads what is committed waits for the end of a transaction that is left open."""
        if self._open:
            self._open = []
            try:
                self._producer.abort_transaction(_ABORT_S)
            except KafkaException:
                # The next producer of this name does it.
                return

    def reason_of(self, error: KafkaError) -> PgReplError:
        """What ends a connection."""
        took_s = time.monotonic() - self._began_at if self._open else 0.0
        if error.code() in _FENCED and took_s >= self._timeout_s:
            return self._reasons.refused(
                f"a transaction of the source was not sent within {self._timeout_s:.0f} s"
                f" ({TRANSACTION_TIMEOUT})",
                "set that in the URI, and transaction.max.timeout.ms of the brokers, to more",
            )
        return self._error_of(error)

    def _error_of(self, error: KafkaError) -> PgReplError:
        if error.code() == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
            return self._reasons.refused(
                "the user may not use the publisher's transactional.id",
                "allow Write and Describe on it: pgrepl.<source>.<publisher>",
            )
        if error.code() == KafkaError.INVALID_TRANSACTION_TIMEOUT:
            return self._reasons.refused(
                f"the brokers allow no {TRANSACTION_TIMEOUT} of {LONGEST_TRANSACTION_MS}, or of what the URI"
                " says",
                "set it in the URI to at most their transaction.max.timeout.ms",
            )
        return self._reasons.error_of(error)
