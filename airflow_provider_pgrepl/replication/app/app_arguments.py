"""The options of the applications: known without Spark and Arrow, so that a command can tell of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from airflow_provider_pgrepl.replication.postgres.lsn import LSN

CAUGHT_UP = "caught-up"

MAINTENANCE_LIMIT_S = 600.0
"""How long maintenance joins files, unless told otherwise; what is begun then is finished."""

AddArguments = Callable[[argparse.ArgumentParser], None]


def of_snapshot(parser: argparse.ArgumentParser) -> None:
    """Which tables are copied, and into which epoch."""
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--tables", metavar="a.b,c.d", help="copy these tables (again), and no others")
    ways.add_argument(
        "--add",
        metavar="a.b,c.d",
        nargs="?",
        const="",
        help="take tables that the pipeline file does not hold; without names: those that match a pattern",
    )
    ways.add_argument(
        "--new-epoch", action="store_true", help="begin a new history: new slot, all tables copied again"
    )
    parser.add_argument(
        "--give-up",
        metavar="NAME,NAME",
        help="with --new-epoch: the source or lake that is given up, where it is another one than now",
    )
    ways.add_argument(
        "--take-over",
        metavar="SLOT",
        help="begin with the changes that the reader of that slot, of another program, has not confirmed",
    )


def of_replicate(parser: argparse.ArgumentParser) -> None:
    """How far it goes."""
    parser.add_argument(
        "--until",
        type=_until,
        metavar=f"{CAUGHT_UP}|X/X",
        help="end when all that was committed at the start, or up to an LSN, is in the lake",
    )
    parser.add_argument(
        "--publish",
        metavar="NAME",
        help="without lake tables: run this publisher in the same process, with its target's variables",
    )


def of_publish(parser: argparse.ArgumentParser) -> None:
    """Which publisher, and from where to where it goes."""
    parser.add_argument("--publisher", required=True, metavar="NAME", help="of the file's publishers")
    parser.add_argument(
        "--until",
        type=_until,
        metavar=f"{CAUGHT_UP}|X/X",
        help="end when all that the changelog held at the start, or all up to an LSN, is published",
    )
    parser.add_argument(
        "--after",
        metavar="PLACE",
        help="begin again after a change's id or an LSN, whatever was published and whatever had stopped",
    )


def of_publish_snapshot(parser: argparse.ArgumentParser) -> None:
    """Which table of which publisher, and where it goes."""
    parser.add_argument(
        "--publisher", required=True, metavar="NAME", help="of the file's publishers, to NATS"
    )
    parser.add_argument("--table", required=True, metavar="TABLE", help="one of the publisher's")
    parser.add_argument("--subject", default="", metavar="SUBJECT", help="of the snapshot; else a new one")


def of_try_events(parser: argparse.ArgumentParser) -> None:
    """Which publisher's events, and of which changes."""
    parser.add_argument("--publisher", required=True, metavar="NAME", help="of the file's publishers")
    parser.add_argument(
        "--lsn",
        metavar="X/X",
        help="of the transaction that committed there; else of the oldest changes that are kept",
    )
    parser.add_argument(
        "--limit", type=_count, metavar="N", help="so many events at most; 20 unless --lsn is given"
    )


def of_consume(parser: argparse.ArgumentParser) -> None:
    """Which tables are kept where, and how far."""
    parser.add_argument("file", metavar="FILE.json", help="which tables are kept where")
    parser.add_argument("--until", choices=(CAUGHT_UP,), help="end when the streams are read to their end")
    parser.add_argument(
        "--resnapshot",
        nargs="+",
        default=[],
        metavar="TABLE",
        help="take these tables of the copy whole again, or all",
    )


def as_given(options: Mapping[str, object]) -> list[str]:
    """Parsed options as an application is given them again."""
    given = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            given.append(option)
        elif value is not None and value is not False:
            given.append(f"{option}={value}")
    return given


def _until(text: str) -> LSN | str:
    if text == CAUGHT_UP:
        return text
    try:
        return LSN.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither {CAUGHT_UP} nor an LSN (expected like 16/B374D848)"
        ) from None


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)
