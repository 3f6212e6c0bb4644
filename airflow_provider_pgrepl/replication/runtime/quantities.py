"""Numbers with their units, as short text for people."""

from __future__ import annotations

from collections.abc import Sequence

_LISTED = 10


def show_number(number: float) -> str:
    """Return a number in at most three digits, as `999`, `1.2 k`, `250 k` or `5 M`."""
    size, unit = float(number), ""
    for larger in ("k", "M", "G", "T"):
        if round(size) < 1000:
            break
        size, unit = size / 1000, f" {larger}"
    text = f"{size:.1f}".removesuffix(".0") if unit and size < 9.95 else f"{size:.0f}"
    return text + unit


def show_count(number: int, what: str) -> str:
    """Return a number with its noun, as `1 file` or `2 files`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def show_list(items: Sequence[str]) -> str:
    """Return up to 10 items with commas between them, and the number of the others."""
    more = len(items) - _LISTED
    return ", ".join(items[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def show_bytes(count: int | None) -> str:
    """Return a size as `0 B` or `12.3 MiB`; `-` if it is not known."""
    if count is None:
        return "-"
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def show_duration(seconds: float) -> str:
    """Return a duration in one unit, as `0.4 s`, `2 min`, `3 h` or `5 days`: that suffices to see what is
    wrong."""
    for limit, unit, divisor in ((60, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / divisor:.1f} s" if unit == "s" else f"{seconds / divisor:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"
