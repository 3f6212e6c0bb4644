"""The text of a pipeline file, JSON or YAML, as an object. Ambiguous values of YAML are rejected."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import ConfigError

if TYPE_CHECKING:
    from yaml import Node, SafeLoader

YAML_ENDINGS = (".yaml", ".yml")
_JSON_HINT = (
    "correct it there: names and texts are in double quotes, and neither a comment nor a comma before ] or }"
    " is JSON"
)
_YAML_HINT = "correct it there: indent with blanks, and put a text with : or # in quotes"
_JSON_VALUE = re.compile(r"null|~|true|false|-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?|", re.ASCII)


def read_json(text: str) -> dict[str, Any]:
    """Return the object of a JSON text. Raises ConfigError, naming the line of a syntax error."""
    try:
        found = json.loads(text, object_pairs_hook=_object)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # also if digits or nesting exceed Python's limits
        raise ConfigError(f"the pipeline file is not JSON that can be read: {error}", _JSON_HINT) from None
    return _settings(found, "JSON")


def read_yaml(text: str) -> dict[str, Any]:
    """Return the object of a YAML text. Raises ConfigError, naming the line of a mistake.

    Rejects duplicate keys, aliases, and plain values that are no text in YAML 1.1 and no value in JSON, such
    as `no`, `010` or `2026-01-31`: YAML 1.2 and people read them as text.
    """
    import yaml

    try:
        found = yaml.load(text, Loader=_strict_loader())  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the pipeline file is not YAML that can be read: {_problem_with_place(error)}", _YAML_HINT
        ) from None
    return _settings(found, "YAML")


def _strict_loader() -> type[SafeLoader]:
    from yaml import AliasEvent, MappingNode, SafeLoader, ScalarNode
    from yaml.constructor import ConstructorError

    class StrictLoader(SafeLoader):
        def compose_node(self, parent: Node | None, index: int) -> Node | None:
            if self.check_event(AliasEvent):
                event = self.peek_event()
                raise ConstructorError(None, None, "aliases (*name) are not supported", event.start_mark)
            return super().compose_node(parent, index)

        def construct_object(self, node: Node, deep: bool = False) -> Any:
            is_plain = isinstance(node, ScalarNode) and node.style is None
            if is_plain and node.tag != "tag:yaml.org,2002:str" and not _JSON_VALUE.fullmatch(node.value):
                problem = f"{node.value} is text or not, by YAML's version: quote it, or write it as JSON"
                raise ConstructorError(None, None, problem, node.start_mark)
            return super().construct_object(node, deep=deep)

        def construct_mapping(self, node: MappingNode, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value:
                if key.tag != "tag:yaml.org,2002:str":
                    raise ConstructorError(None, None, "a key must be a text: quote it", key.start_mark)
                if key.value in seen:
                    raise ConstructorError(None, None, f"has key {key.value!r} twice", key.start_mark)
                seen.add(key.value)
            return super().construct_mapping(node, deep=deep)

    return StrictLoader


def _problem_with_place(error: Exception) -> str:
    """Return the problem and its line, without the quoted text that YAML's messages contain."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error) or type(error).__name__
    return problem if mark is None else f"line {mark.line + 1} column {mark.column + 1}: {problem}"


def _settings(found: object, kind: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ConfigError(f"the pipeline file must hold one {kind} object", errors.reference("pipeline"))
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Raises ConfigError for a duplicate key.

    Python's parser would silently use the last value of a duplicate key.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        doubled = sorted({key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1})
        raise ConfigError(f"the pipeline file has key {', '.join(map(repr, doubled))} twice in one object")
    return found
