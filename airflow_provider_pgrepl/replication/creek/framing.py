"""How creek puts a payload into messages of NATS: in packets, each with its number.

The first is `uint16 0`, `uint32` the payload's length, and bytes; a later one its number, and bytes; all
big-endian. creek's newer client cannot read a second packet, so a payload that needs one is not sent.
"""

from __future__ import annotations

import struct

_FIRST, _LATER = struct.Struct(">HI"), struct.Struct(">H")


def largest_payload(max_payload: int) -> int:
    """Bytes that one packet holds. `max_payload`: what the server takes."""
    return max_payload - _FIRST.size - 2


def framed(payload: bytes) -> bytes:
    """A payload as the only packet."""
    return _FIRST.pack(0, len(payload)) + payload


def unframed(packets: list[bytes]) -> bytes:
    """The payload of all packets, in their order. Raises ValueError when they do not belong together."""
    unframing, found = Unframing(), None
    for packet in packets:
        if found is not None:
            raise ValueError("packets of another length")
        found = unframing.add(packet)
    if found is None:
        raise ValueError("a packet is missing")
    return found


class Unframing:
    """Payloads of packets that come one after the other."""

    def __init__(self) -> None:
        self._length, self._next, self._payload = 0, 0, b""

    def add(self, packet: bytes) -> bytes | None:
        """The payload that the packet is the end of, if it is. Raises ValueError for one that does not belong
        to those before it."""
        if len(packet) < _LATER.size:
            raise ValueError("not a packet")
        (number,) = _LATER.unpack_from(packet)
        if number == 0:
            # Whoever sent the one before may have been interrupted.
            if len(packet) < _FIRST.size:
                raise ValueError("not a packet")
            _, self._length = _FIRST.unpack_from(packet)
            self._payload = packet[_FIRST.size :]
        elif number == self._next:
            self._payload += packet[_LATER.size :]
        else:
            raise ValueError("a packet is missing")
        self._next = number + 1
        if len(self._payload) > self._length:
            raise ValueError("packets of another length")
        if len(self._payload) < self._length:
            return None
        self._next, found, self._payload = -1, self._payload, b""
        return found
