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
    if not packets or len(packets[0]) < _FIRST.size:
        raise ValueError("not a packet")
    _, length = _FIRST.unpack_from(packets[0])
    payload = packets[0][_FIRST.size :]
    for expected, packet in enumerate(packets[1:], 1):
        (number,) = _LATER.unpack_from(packet)
        if number != expected:
            raise ValueError("a packet is missing")
        payload += packet[_LATER.size :]
    if len(payload) != length:
        raise ValueError("packets of another length")
    return payload
