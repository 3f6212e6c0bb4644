"""RunResult: what an app leaves for whoever started it, where the environment says."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

RESULT_VARIABLE = "PGREPL_RESULT_FILE"


def leave_result(result: Mapping[str, Any]) -> None:
    """Write it, whole or not at all; nothing, when nobody asked for it."""
    named = os.environ.get(RESULT_VARIABLE)
    if not named:
        return
    unfinished = Path(f"{named}.{os.getpid()}")
    with suppress(OSError):
        unfinished.write_text(json.dumps(dict(result)), encoding="utf-8")
        unfinished.replace(named)
