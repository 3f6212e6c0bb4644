"""The program of `make demo`: Airflow replicates a busy database into a lake, which is regularly checked."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import FrameType

import psycopg2

from airflow_provider_pgrepl.errors import PgReplError
from demo.errors import DemoError
from demo.folder import Folder
from demo.options import read_options
from demo.show import Show

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """The user pressed Ctrl-C, or another signal asked the demo to end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit code.

    0: the lake equals the source. 1: it does not, the demo failed, or it was ended before the comparison.
    """
    options = read_options(arguments)
    show = Show(options, Folder(options.folder))
    for number in _ENDING_SIGNALS:
        signal.signal(number, _stop)
    try:
        show.run()
    except (DemoError, PgReplError) as error:
        return _failed(str(error))
    except psycopg2.Error as error:
        return _failed(f"PostgreSQL: {error}")
    except OSError as error:
        return _failed(": ".join(map(str, filter(None, (error.strerror or error, error.filename)))))
    except Stopped:
        if show.equal is None:
            return _failed("ended before the comparison")
    return 0 if show.equal else 1


def _stop(*_: int | FrameType | None) -> None:
    # Ignore further signals: a second Ctrl-C must not interrupt the shutdown.
    for number in _ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise Stopped


def _failed(sentence: str) -> int:
    print(f"\ndemo: {sentence}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
