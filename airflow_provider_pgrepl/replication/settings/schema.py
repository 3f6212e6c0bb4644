"""The JSON Schema of pipeline files, made from the sections: types, rules, defaults and descriptions.

The description of a field is the text below it, which only the source of its class has.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from .mistakes import Fields, Rule
from .pipeline import PIPELINE_FIELDS

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")


def pipeline_schema() -> dict[str, Any]:
    """Return the JSON Schema, draft 2020-12, of pipeline files."""
    found = _of_fields(PIPELINE_FIELDS)
    found["properties"] = {"$schema": {"type": "string"}, **found["properties"]}
    return {"$schema": _DIALECT, "title": "Pipeline file", **found}


def descriptions(fields: Fields) -> dict[str, str]:
    """Return the description of each field, as Markdown whose links begin in docs/reference."""
    return {name: text for section in fields.sections for name, text in _below_fields(section)}


def _below_fields(section: type) -> Iterator[tuple[str, str]]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(definition, ast.ClassDef)
    for one, below in zip(definition.body, definition.body[1:], strict=False):
        match one, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split())


def _of_fields(fields: Fields) -> dict[str, Any]:
    descriptions_by_name = descriptions(fields)
    properties = {
        name: {
            **_of(hint),
            "description": _LINK.sub(r"\1", descriptions_by_name[name]),
            **({"default": _plain(fields.defaults[name])} if name in fields.defaults else {}),
        }
        for name, hint in fields.hints.items()
    }
    required = [name for name in properties if name not in fields.defaults]
    found = {"type": "object", "properties": properties, "additionalProperties": False}
    if fields.may_be_empty:
        return found | {"dependentRequired": dict.fromkeys(sorted({*properties} - {*required}), required)}
    return found | ({"required": required} if required else {})


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _of(hint: Any) -> dict[str, Any]:
    """Return the JSON Schema of a setting's type."""
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        base, *rules = arguments
        objects = [rule for rule in rules if isinstance(rule, Fields)]
        found = _of_fields(objects[0]) if objects else _of(base)
        return found | {
            key: word for rule in rules if isinstance(rule, Rule) for key, word in rule.keywords.items()
        }
    if origin in (Union, UnionType):
        return {"anyOf": [_of(one) for one in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": _of(arguments[0])}
    if origin is dict:
        names = _of(arguments[0])
        return {"type": "object", "additionalProperties": _of(arguments[1])} | (
            {} if names == {"type": "string"} else {"propertyNames": names}
        )
    names_of_types = {bool: "boolean", int: "integer", float: "number", type(None): "null"}
    return {"type": names_of_types.get(origin, "string")}
