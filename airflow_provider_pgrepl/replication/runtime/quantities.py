"""Numbers, sizes, lists and tables as text for people."""

from __future__ import annotations

from collections.abc import Collection, Sequence


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


def show_list(items: Sequence[str], most: int = 10) -> str:
    """Return up to `most` items with commas between them, and the number of the others."""
    more = len(items) - most
    return ", ".join(items[:most]) + (f" and {more} more" if more > 0 else "")


def show_table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return the rows as lines with aligned columns. `right`: the columns that are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


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
