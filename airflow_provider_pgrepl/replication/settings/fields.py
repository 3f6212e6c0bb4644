"""Types of settings in a pipeline file: checks of values, and names of types for error messages."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin


def is_of(value: object, hint: Any) -> bool:
    """Return True if a value has a setting's type. Unlike in Python, true and false are not numbers."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is dict:
        return isinstance(value, dict)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple | list) and all(isinstance(item, str) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def describe(hint: Any) -> str:
    """Return the name of a setting's type for the author of a pipeline file."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, get_args(hint)))
    if get_origin(hint) is tuple:
        return "a list of strings"
    if get_origin(hint) is dict:
        return "an object"
    names = {str: "a string", bool: "true or false", int: "a whole number", float: "a number"}
    return names.get(hint, "a string or null")
