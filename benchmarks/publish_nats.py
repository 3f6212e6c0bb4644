"""The publish rate in creek's wire format to JetStream on the same cores, with each event acknowledged."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

import nats

from airflow_provider_pgrepl.replication.creek.stream_lake import StreamLake
from airflow_provider_pgrepl.replication.creek.streams import write_as_creek
from airflow_provider_pgrepl.replication.events.targets.jetstream import JetStream
from benchmarks import creek_producer, published
from benchmarks.figure import Figure, thousands
from benchmarks.source import running_source
from demo.nats import NatsServer

_REPEAT = 3
_LIMIT = 20_000
_PEER_EVENTS = 10_000


def run(folder: Path, scale: float) -> Figure:
    """Measure this package from the changelog, and a peer that waits for the acknowledgment of each event."""
    server = NatsServer(folder / "nats")
    rates: dict[str, list[float]] = {"ours": [], "peer": []}
    with running_source() as source:
        pipeline, events = published.received(source, folder, scale)
        server.start()
        try:
            for number in range(_REPEAT):
                rates["peer"].append(_PEER_EVENTS / asyncio.run(_one_by_one(server.uri, f"peer{number}")))
                name = f"run{number}"
                given = {"target": "nats", "database": name}
                target = JetStream(server.uri, published.settings(pipeline, name, given))
                write_as_creek(
                    target, published.settings(pipeline, name, given), StreamLake(pipeline.lake_root)
                )
                rates["ours"].append(events / published.publish(pipeline, name, given, target))
                asyncio.run(_check(server.uri, f"CREEK_wal_{name}", events))
            creek = creek_producer.rate(source, server.uri, folder)
        finally:
            server.stop()
    own, peer = (statistics.median(rates[kind]) for kind in ("ours", "peer"))
    return Figure(
        f"publish: changelog → JetStream with acks, {thousands(events)} events on creek's wire",
        f"{thousands(own)} events/s",
        f"nats-py, one acknowledged after the other: {thousands(peer)} events/s"
        + (f"; creek's producer, from its slot: {thousands(creek)} changes/s" if creek else ""),
        f"{own / peer:.1f}",
        f"≥ {thousands(_LIMIT)} events/s",
        own >= _LIMIT,
        {kind: [round(rate) for rate in found] for kind, found in rates.items()},
    )


async def _one_by_one(uri: str, stream: str) -> float:
    client = await nats.connect(uri)
    jetstream = client.jetstream()
    await jetstream.add_stream(name=stream, subjects=[f"{stream}.>"])
    started = time.perf_counter()
    for number in range(_PEER_EVENTS):
        await jetstream.publish(f"{stream}.a", b"x" * 200, headers={"Nats-Msg-Id": str(number)})
    taken = time.perf_counter() - started
    await client.close()
    return taken


async def _check(uri: str, stream: str, events: int) -> None:
    client = await nats.connect(uri)
    found = (await client.jetstream().stream_info(stream)).state.messages
    await client.jetstream().delete_stream(stream)
    await client.close()
    if found != events:
        raise RuntimeError(f"{found} events arrived of {events}")
