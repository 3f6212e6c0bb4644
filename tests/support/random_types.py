"""The types that random tables are made of: one line each, with what makes a random value's text.

A type is added by a line in TYPES (and by a statement in SETUP when it has to be created first).
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

Chance = random.Random
Make = Callable[[Chance], str]

SETUP = (
    "create type public.mood as enum ('sad', 'so so', 'it''s \"fine\"')",
    "create domain public.percent as numeric(5, 2) check (value between 0 and 100)",
    "create domain public.half as public.percent check (value <= 50)",
)


@dataclass(frozen=True)
class Type:
    """A type in SQL; `make` gives texts that it can be read from. `is_key`: fit for a key."""

    sql: str
    make: Make
    is_key: bool = False
    is_large: bool = False

    def pool(self, chance: Chance, size: int) -> list[str]:
        """A few values, so that rows meet each other."""
        return [self.make(chance) for _ in range(size)]


def one_of(*makes: Make | str) -> Make:
    def make(chance: Chance) -> str:
        chosen = chance.choice(makes)
        return chosen if isinstance(chosen, str) else chosen(chance)

    return make


def whole(bits: int) -> Make:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return one_of(str(low), str(high), "0", "-1", lambda chance: str(chance.randint(low, high)))


def decimal(precision: int, scale: int) -> Make:
    def make(chance: Chance) -> str:
        digits = chance.randint(1, precision)
        number = chance.randrange(10**digits) * chance.choice((1, -1))
        return f"{Decimal(number).scaleb(-scale):f}"

    return make


def floating(bits: int) -> Make:
    largest, least = ("3.4028235e38", "1e-45") if bits == 32 else ("1.7976931348623157e308", "5e-324")
    edges = ("NaN", "Infinity", "-Infinity", "-0", "0", "0.1", largest, least)
    scale = 30 if bits == 32 else 300
    return one_of(*edges, lambda chance: f"{chance.uniform(-10, 10)!r}e{chance.randint(-scale, scale)}")


def unconstrained(chance: Chance) -> str:
    if chance.random() < 0.3:
        return chance.choice(("NaN", "1", "1.0", "1.00", "-0", "1e-60", "0.000", "1e100"))
    return f"{chance.randrange(-(10**40), 10**40)}e{chance.randint(-45, 20)}"


_LETTERS = "abc äöß \t\n\\'\",{}()%_\u00a0\u2028é😀~NULL null x"


def text(longest: int) -> Make:
    def make(chance: Chance) -> str:
        if chance.random() < 0.2:
            return chance.choice(("", " ", "NULL", "\\N", '""', "a ", "\\x", "{}"))[:longest]
        return "".join(chance.choices(_LETTERS, k=chance.randint(0, longest)))

    return make


def large(make: Make) -> Make:
    """Return a maker whose texts are sometimes so long that they are stored out of line."""
    return one_of(make, make, make, lambda chance: "".join(chance.choices("abcdefghij", k=6000)))


def binary(chance: Chance) -> str:
    size = 5000 if chance.random() < 0.2 else chance.randint(0, 8)
    return "\\x" + chance.randbytes(size).hex()


def day(chance: Chance) -> str:
    year = chance.choice((1, 1582, 1900, 1970, 2024, 9999, 20000, chance.randint(1, 9999)))
    era = " BC" if year < 4000 and chance.random() < 0.1 else ""
    return f"{year:04}-{chance.randint(1, 12):02}-{chance.randint(1, 28):02}{era}"


def clock(chance: Chance) -> str:
    fraction = chance.choice(("", ".5", ".000001", ".999999", f".{chance.randrange(10**6):06}"))
    return f"{chance.randrange(24):02}:{chance.randrange(60):02}:{chance.randrange(60):02}{fraction}"


def moment(chance: Chance) -> str:
    date, *era = day(chance).split(" ")
    return " ".join([date, clock(chance), *era])


def zoned(chance: Chance) -> str:
    date, *era = day(chance).split(" ")
    zone = chance.choice(("+00", "+05:30", "-08", "+14", "-12:45"))
    return " ".join([date, clock(chance) + zone, *era])


def interval(chance: Chance) -> str:
    parts = (chance.randint(-99, 99), chance.randint(-40, 40), chance.randint(-99999, 99999))
    return "{} mons {} days {}.5 seconds".format(*parts)


def document(chance: Chance) -> str:
    leaves = (None, True, 1, 1.5, "", "ü\n\"'", {}, [])
    tree = {chance.choice("abc"): [chance.choice(leaves) for _ in range(chance.randrange(4))] for _ in "xyz"}
    if chance.random() < 0.2:
        tree["big"] = ["".join(chance.choices("abcdefghij", k=6000))]
    return json.dumps(tree, ensure_ascii=chance.random() < 0.5)


def span(chance: Chance) -> str:
    low = chance.randint(-1000, 1000)
    return chance.choice(("empty", "(,)", f"[{low},{low + 7}]", f"({low},)"))


def bits(least: int, most: int) -> Make:
    return lambda chance: "".join(chance.choices("01", k=chance.randint(least, most)))


def array(element: Make) -> Make:
    def make(chance: Chance) -> str:
        if chance.random() < 0.1:
            return "{}"
        size = 900 if chance.random() < 0.1 else chance.randint(1, 4)
        items = ("NULL" if chance.random() < 0.2 else quoted(element(chance)) for _ in range(size))
        return "{" + ",".join(items) + "}"

    return make


def quoted(item: str) -> str:
    return '"' + item.replace("\\", "\\\\").replace('"', '\\"') + '"'


TYPES = (
    Type("boolean", one_of("t", "f")),
    Type("smallint", whole(16), is_key=True),
    Type("integer", whole(32), is_key=True),
    Type("bigint", whole(64), is_key=True),
    Type("real", floating(32)),
    Type("double precision", floating(64), is_key=True),
    Type("numeric(12,2)", decimal(12, 2), is_key=True),
    Type("numeric(38,10)", decimal(38, 10)),
    Type("numeric(50,5)", decimal(50, 5)),
    Type("numeric", unconstrained, is_key=True),
    Type("text", large(text(30)), is_key=True, is_large=True),
    Type("varchar(20)", text(20), is_key=True),
    Type("char(7)", text(7), is_key=True),
    Type("name", text(30)),
    Type('"char"', one_of("a", "", " ", "~")),
    Type("bytea", binary, is_key=True, is_large=True),
    Type("date", day, is_key=True),
    Type("timestamp", moment, is_key=True),
    Type("timestamp(3)", moment),
    Type("timestamptz", zoned, is_key=True),
    Type("time", one_of("24:00", clock), is_key=True),
    Type("timetz", lambda chance: clock(chance) + chance.choice(("+00", "-07:30"))),
    Type("interval", interval, is_key=True),
    Type("uuid", lambda chance: str(uuid.UUID(int=chance.getrandbits(128))), is_key=True),
    Type("json", document, is_large=True),
    Type("jsonb", document, is_large=True),
    Type("money", decimal(12, 2)),
    Type("inet", one_of("::1", "10.0.0.0/8", "192.168.1.5", "2001:db8::/32"), is_key=True),
    Type("cidr", one_of("10.0.0.0/8", "2001:db8::/32")),
    Type("macaddr", one_of("08:00:2b:01:02:03", "ff:ff:ff:ff:ff:ff")),
    Type("bit(5)", bits(5, 5)),
    Type("varbit", bits(0, 12)),
    Type("point", one_of("(1.5,-2)", "(0,1e300)", "(NaN,Infinity)")),
    Type("oid", lambda chance: str(chance.randrange(2**32))),
    Type("pg_lsn", one_of("0/0", "16/B374D848", "FFFFFFFF/FFFFFFFF")),
    Type("tsvector", one_of("a:1 b:2A", "'it''s' 'x y':3", "")),
    Type("public.mood", one_of("sad", "so so", 'it\'s "fine"'), is_key=True),
    Type("public.half", one_of("0", "49.99", "50")),
    Type("int4range", span),
    Type("integer[]", array(whole(32)), is_large=True),
    Type("text[]", array(text(10)), is_large=True),
)
KEY_TYPES = tuple(type_ for type_ in TYPES if type_.is_key)
