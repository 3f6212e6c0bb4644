"""Checks of a file's values against the types of its settings. Every mistake is found, with its path.

The types are those of dataclass fields. `Annotated` adds rules (Rule), or describes an object (Fields). Types
with rules that several settings have are at the end: quantities, names of tables and columns, texts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from inspect import get_annotations
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.postgres.names import ColumnName, TableName

Path = tuple[str | int, ...]
_PLAIN_KEY = re.compile(r"\$?[A-Za-z_]\w*", re.ASCII)
# JSON can represent these characters, but neither PostgreSQL nor a file system accepts them.
_UNUSABLE = re.compile("[\0\ud800-\udfff]")
_MOST_SHOWN = 200
_QUOTED = re.compile(r'"[^"]*"')
_TABLE_HINT = 'schema.table, or "Quoted"."Names"'
COLUMN_HINT = "name a column as schema.table.column"


@dataclass(frozen=True)
class Mistake:
    """An invalid value: its path in the file, the problem, and the next step."""

    path: Path
    problem: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{shown_path(self.path)}: {self.problem}" if self.path else self.problem

    def below(self, *path: str | int) -> Mistake:
        """Return the mistake with `path` before its own."""
        return dataclasses.replace(self, path=(*path, *self.path))


@dataclass(frozen=True, eq=False)
class Rule:
    """A condition of a setting that its type does not express.

    `check` raises ValueError, or ConfigError to give its own hint. `hint`: for a value that is invalid, also
    by its type. `keywords`: the condition in JSON Schema.
    """

    check: Callable[[Any], object] = bool
    hint: str = ""
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def mistakes(self, value: Any, path: Path) -> Iterator[Mistake]:
        """Yield the mistake of a value that has the right type."""
        try:
            self.check(value)
        except ConfigError as error:
            yield Mistake(path, error.message, error.hint or self.hint)
        except ValueError as error:
            yield Mistake(path, str(error), self.hint)


@dataclass(frozen=True, eq=False)
class Fields:
    """An object whose keys are the fields of a dataclass, in the order of its base classes.

    `page`: the page of the reference. `may_be_empty`: an empty object is valid without the required keys.
    `misplaced`: the hints for keys that belong elsewhere.
    """

    kind: type
    page: str
    may_be_empty: bool = False
    misplaced: Mapping[str, str] = field(default_factory=dict)

    @property
    def hint(self) -> str:
        return errors.reference(self.page)

    @cached_property
    def fields(self) -> dict[str, dataclasses.Field[Any]]:
        """The fields by name."""
        found = {one.name: one for one in dataclasses.fields(self.kind)}
        return {name: found[name] for section in self.sections for name in get_annotations(section)}

    @cached_property
    def sections(self) -> list[type]:
        """The classes that declare fields: the base classes, then the class itself."""
        return list(_sections(self.kind))

    @cached_property
    def hints(self) -> dict[str, Any]:
        """The types of the fields, with their rules."""
        hints = get_type_hints(self.kind, include_extras=True)
        return {name: hints[name] for name in self.fields}

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the fields that have one."""
        return {
            name: one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
            for name, one in self.fields.items()
            if one.default is not one.default_factory
        }

    def mistakes(self, given: Mapping[str, Any], path: Path = ()) -> Iterator[Mistake]:
        """Yield every mistake in an object: unknown and missing keys, and invalid values."""
        for key, value in given.items():
            if key in self.fields:
                yield from check(value, self.hints[key], (*path, key))
            else:
                hint = self.misplaced.get(key) or errors.known_keys([key], self.fields)
                yield Mistake((*path, key), "unknown key", hint)
        for key in self.fields if given or not self.may_be_empty else ():
            if key not in given and key not in self.defaults:
                yield Mistake((*path, key), "is missing", self.hint)


def _sections(kind: type) -> Iterator[type]:
    for base in kind.__bases__:
        yield from _sections(base)
    if get_annotations(kind):
        yield kind


class MistakenError(AttributeError):
    """A check reads a setting that has a mistake."""


class SoundSettings:
    """The settings of an object without the mistaken ones. Reading one of these raises MistakenError."""

    def __init__(self, values: Mapping[str, Any], found: Iterable[Mistake]) -> None:
        mistaken = {mistake.path[0] for mistake in found}
        self._sound = {name: value for name, value in values.items() if name not in mistaken}

    def __getattr__(self, name: str) -> Any:
        try:
            return self._sound[name]
        except KeyError:
            raise MistakenError from None


Check = Callable[[Any], Iterator[Mistake]]


def check_together(values: Mapping[str, Any], found: list[Mistake], checks: Iterable[Check]) -> list[Mistake]:
    """Return `found` and the mistakes of checks that compare settings; only correct ones are compared."""
    sound = SoundSettings(values, found)
    for one in checks:
        with suppress(MistakenError):
            found = [*found, *one(sound)]
    return found


def refuse(found: Iterable[Mistake]) -> None:
    """Raise ConfigError if there are mistakes. With several, each is one line of the message."""
    mistakes = list(dict.fromkeys(found))
    if len(mistakes) == 1:
        raise ConfigError(str(mistakes[0]), mistakes[0].hint)
    if mistakes:
        lines = (f"{mistake}; {mistake.hint}" if mistake.hint else str(mistake) for mistake in mistakes)
        raise ConfigError("\n  ".join((f"there are {len(mistakes)} mistakes:", *lines)))


def check(value: object, hint: Any, path: Path) -> Iterator[Mistake]:
    """Yield every mistake in a value of the type `hint`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return
    if origin is Annotated:
        yield from _check_annotated(value, hint, path)
    elif origin in (Union, UnionType) and (fitting := [one for one in arguments if is_of(value, one)]):
        yield from check(value, fitting[0], path)
    elif not is_of(value, hint):
        shown = list(value) if isinstance(value, tuple) else value
        meant = errors.similar([value], arguments) if origin is Literal and isinstance(value, str) else ()
        yield Mistake(
            path, f"{_short(shown)} must be {describe(hint)}", f"did you mean {meant[0]!r}?" if meant else ""
        )
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from check(item, (*arguments, Any)[0], (*path, index))
    elif isinstance(value, dict):
        of_key, of_value = arguments or (str, Any)
        for key, item in value.items():
            yield from check(key, of_key, path)
            yield from check(item, of_value, (*path, key))
    elif isinstance(value, str) and _UNUSABLE.search(value):
        yield Mistake(path, "a text in it holds a NUL or half a character")


def _check_annotated(value: object, hint: Any, path: Path) -> Iterator[Mistake]:
    base, *rules = get_args(hint)
    help_of_type = next((rule.hint for rule in rules if rule.hint), "")
    found = [
        mistake if mistake.hint else dataclasses.replace(mistake, hint=help_of_type)
        for mistake in check(value, base, path)
    ]
    for rule in rules:
        # The rules of an object are independent of its values.
        if not found or (isinstance(value, dict) and is_of(value, base)):
            found += rule.mistakes(value, path)
    yield from found


def is_of(value: object, hint: Any) -> bool:
    """Return True if a value has a setting's type; of a list or an object, its content is not compared.

    Unlike in Python, true and false are not numbers.
    """
    origin = get_origin(hint) or hint
    if origin is Annotated:
        return is_of(value, get_args(hint)[0])
    if origin in (Union, UnionType):
        return any(is_of(value, one) for one in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin is Any:
        return True
    if isinstance(value, bool):
        return origin is bool
    if hasattr(origin, "parse"):  # a TableName, which a file writes as text
        origin = str
    return isinstance(value, {float: (int, float), tuple: (tuple, list)}.get(origin, origin))


def describe(hint: Any) -> str:
    """Return the name of a setting's type for the author of a pipeline file."""
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        return describe(arguments[0])
    if origin in (Union, UnionType):
        *most, last = map(describe, arguments)
        return f"{', '.join(most)} or {last}"
    if origin is Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if hasattr(origin, "parse"):
        origin = str
    return {
        str: "a string",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        type(None): "null",
        tuple: "a list of strings" if arguments[:1] == (str,) else "a list",
        dict: "an object",
    }[origin]


@lru_cache(maxsize=1024)
def shown_path(path: Path) -> str:
    """Return a path as `publishers.orders.hash_columns[2]`; other keys are quoted: `per_table["a.b"]`."""
    shown = ""
    for part in path:
        if isinstance(part, str) and _PLAIN_KEY.fullmatch(part):
            shown += f".{part}"
        else:
            shown += f"[{json.dumps(part, ensure_ascii=False)}]"
    return shown.removeprefix(".")


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}…"


def frozen(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object with tuples instead of the lists among its values."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}


def between(*, above: float | None = None, least: float | None = None, most: float | None = None) -> Rule:
    """Return the rule of a number's limits. NaN and infinities are always invalid."""
    limits = {"exclusiveMinimum": above, "minimum": least, "maximum": most}

    def refuse_value(value: float) -> None:
        if most is not None and value > most:
            raise ValueError(f"must not be more than {most}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{value} is not a finite number")
        if above is not None and value <= above:
            raise ValueError(f"{value} must be greater than {above}")
        if least is not None and value < least:
            raise ValueError(f"{value} must not be negative")

    return Rule(refuse_value, keywords={name: limit for name, limit in limits.items() if limit is not None})


def matching(pattern: str, problem: str, hint: str = "") -> Rule:
    """Return the rule of a text that a regular expression matches as a whole."""
    expression = re.compile(pattern)

    def refuse_value(text: str) -> None:
        if not expression.fullmatch(text):
            raise ValueError(f"{text!r} {problem}")

    return Rule(refuse_value, hint, {"pattern": f"^(?:{pattern})$"})


def filled(hint: str, problem: str = "is empty") -> Rule:
    """Return the rule that a text, a list or an object is not empty."""

    def refuse_value(value: Any) -> None:
        if not value:
            raise ValueError(problem)

    return Rule(refuse_value, hint)


def distinct(parse: Callable[[str], Hashable]) -> Rule:
    """Return the rule that no two keys of an object are spellings of one name."""

    def refuse_value(given: Mapping[str, Any]) -> None:
        first: dict[Hashable, str] = {}
        for name in given:
            try:
                parsed = parse(name)
            except ValueError:  # reported for the key itself
                continue
            if (other := first.setdefault(parsed, name)) != name:
                raise ConfigError(f"{other} and {name} are the same", "take one out")

    return Rule(refuse_value)


def _check_table(text: str) -> None:
    if "*" in _QUOTED.sub("", text):
        raise ValueError(f"{text!r} has a * where none may be")
    TableName.parse(text)


def _check_pattern(text: str) -> None:
    _check_table(f"{text[:-1]}any" if text.endswith(".*") else text)


# A hundred years, and other limits below which dates and floats are exact.
Hours = Annotated[float, between(above=0, most=876_000)]
Seconds = Annotated[float, between(above=0, most=1_000_000_000)]
SecondsOrZero = Annotated[float, between(least=0, most=1_000_000_000)]
Amount = Annotated[float, between(above=0, most=2**53)]
Size = Annotated[int, between(above=0, most=2**53)]

TABLE = Rule(_check_table, _TABLE_HINT)
TableText = Annotated[str, TABLE]
TablePattern = Annotated[str, Rule(_check_pattern, f"{_TABLE_HINT}, or schema.* for all tables of a schema")]
ColumnText = Annotated[str, Rule(ColumnName.parse, COLUMN_HINT)]
