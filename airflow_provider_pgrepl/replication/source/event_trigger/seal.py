"""The seal on a message of the event trigger, which says that nobody else has made it. Pure.

Anybody who is connected may emit logical messages. The trigger's function seals its own with a key that only
its owner and the role that replicates can read (`event_trigger.py`), and with the transaction, so that a
message says nothing in another one. The first line of a message holds pipeline, transaction and seal; what it
says follows.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
from dataclasses import dataclass

from airflow_provider_pgrepl.trace import log_unexpected

log = logging.getLogger(__name__)

_MOST_HEAD_BYTES = 512
_XID_BITS = 32

SEALED_SQL = """
pg_logical_emit_message(true, <prefix>, convert_to(jsonb_build_object('pipeline', <pipeline>,
            'xid', pg_current_xact_id()::text,
            'seal', encode(sha256(_key || sha256(_key || convert_to(pg_current_xact_id()::text, 'UTF8')
                || decode('0a', 'hex') || _said)), 'hex'))::text || chr(10), 'UTF8') || _said)
""".strip()
"""How the trigger's function emits what is in `_said`, with the key that is in `_key`."""


@dataclass(frozen=True)
class SealedMessage:
    """A message as it came; `said` is not to be believed unless the seal is genuine."""

    pipeline: str
    said: bytes
    xid: int = -1
    seal: str = ""

    def is_genuine(self, key: bytes, xid: int) -> bool:
        """Whether who has the key has made it in the transaction that the stream calls `xid`."""
        if self.xid < 0 or self.xid % (1 << _XID_BITS) != xid:
            return False
        # Of other characters there may be halves, with which nothing can be done.
        return self.seal.isascii() and hmac.compare_digest(self.seal, seal_of(key, self.xid, self.said))


def seal_of(key: bytes, xid: int, said: bytes) -> str:
    """The seal of a message of a transaction, which only who knows the key can make; hexadecimal."""
    inner = hashlib.sha256(b"%s%d\n%s" % (key, xid, said)).digest()
    return hashlib.sha256(key + inner).hexdigest()


def read_sealed(content: bytes) -> SealedMessage | None:
    """Take a message apart; None when it is none of any pipeline's event trigger."""
    head, _, said = content.partition(b"\n")
    if len(head) > _MOST_HEAD_BYTES:
        return None
    try:
        fields = json.loads(head.decode("ascii"))
        pipeline, xid, seal = fields["pipeline"], fields.get("xid", "-1"), fields.get("seal", "")
        if not (isinstance(pipeline, str) and isinstance(xid, str) and isinstance(seal, str)):
            return None
        return SealedMessage(pipeline, said, int(xid), seal)
    except Exception as error:  # noqa: BLE001 - it may be anybody's, and hold anything
        log_unexpected(log, "reading a message", error, logging.DEBUG)
        return None
