"""A chart with lines over a logarithmic x axis, as an SVG picture for light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

ConsistentPoints = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 604, 84, 308
"""The edges of the area with the lines."""
_MOST_TICKS = 5
_LEGEND_GAP, _LETTER = 42, 9
_STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif }
.title { font-size: 16px; font-weight: 600 }
.line { fill: none; stroke-width: 2.5; stroke-linejoin: round; stroke-linecap: round }
.dot { stroke-width: 2 }
"""
_LIGHT = ("#fcfcfb", "#1a1a19", "#5f5e5a", "#e4e3de", "#2a78d6", "#d9541f")
_DARK = ("#1a1a19", "#f4f3ee", "#b4b3aa", "#383835", "#5a9bec", "#f0824f")
"""The colors of the page, the text, the secondary text, the grid and the two lines."""
_COLORS = """.page {{ fill: {0} }} .dot {{ stroke: {0} }}
.title, .value {{ fill: {1} }} .quiet {{ fill: {2} }} .grid {{ stroke: {3} }}
.line.first {{ stroke: {4} }} .dot.first {{ fill: {4} }}
.line.second {{ stroke: {5} }} .dot.second {{ fill: {5} }}
"""
_NTH = ("first", "second")


@dataclass(frozen=True)
class Chart:
    """A chart with one line or two.

    `lines`: points (x, y) in the order of x, by the name of the line, the lower line first. `unit`: the unit
    of y. The x axis has a tick at each measured x, the y axis at round values.
    """

    title: str
    unit: str
    x_title: str
    lines: Mapping[str, ConsistentPoints]

    def svg(self) -> str:
        """Return the SVG file."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
                f' width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{escape(self.title)}">',
                f"<style>{_STYLE}{_COLORS.format(*_LIGHT)}",
                "@media (prefers-color-scheme: dark) {",
                f"{_COLORS.format(*_DARK)}}}</style>",
                f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="8" class="page"/>',
                _text(_LEFT - 48, 34, self.title, "title", "start"),
                _text(_LEFT - 48, 62, self.unit, "quiet", "start"),
                *(self._legend() if len(self.lines) > 1 else ()),
                *self._y_axis(),
                *self._x_axis(),
                *(part for number, name in enumerate(self.lines) for part in self._line(number, name)),
                "</svg>\n",
            ]
        )

    @property
    def _xs(self) -> list[float]:
        return sorted({x for points in self.lines.values() for x, _ in points})

    @property
    def _largest(self) -> float:
        return max(y for points in self.lines.values() for _, y in points)

    @property
    def _step(self) -> float:
        """The distance between two ticks of y: 1, 2 or 5 times a power of ten."""
        power = 10.0 ** math.floor(math.log10(self._largest / _MOST_TICKS))
        return next(power * of for of in (1, 2, 5, 10) if power * of * _MOST_TICKS >= self._largest)

    @property
    def _ticks(self) -> int:
        """The number of ticks of y that the largest value needs, without the tick at 0."""
        return math.ceil(self._largest / self._step)

    def _x(self, x: float) -> float:
        first, last = math.log(self._xs[0]), math.log(self._xs[-1])
        share = (math.log(x) - first) / (last - first) if last > first else 0.5
        return _LEFT + 16 + share * (_RIGHT - _LEFT - 32)

    def _y(self, y: float) -> float:
        return _BOTTOM - y / (self._step * self._ticks) * (_BOTTOM - _TOP)

    def _legend(self) -> list[str]:
        """Return the legend entries, side by side up to the right edge."""
        parts, right = [], float(_RIGHT)
        for number, name in reversed(list(enumerate(self.lines))):
            parts.append(_text(right, 62, name, "value", "end"))
            right -= len(name) * _LETTER
            parts.append(f'<path class="line {_NTH[number]}" d="M{right - 26:.1f} 57.5h20"/>')
            right -= _LEGEND_GAP
        return parts

    def _y_axis(self) -> list[str]:
        parts = []
        for tick in range(self._ticks + 1):
            value = tick * self._step
            y = self._y(value)
            parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_RIGHT}"/>')
            parts.append(_text(_LEFT - 10, y + 4.5, _number(value), "quiet", "end"))
        return parts

    def _x_axis(self) -> list[str]:
        ticks = [_text(self._x(x), _BOTTOM + 20, f"{x:g}", "quiet", "middle") for x in self._xs]
        return [*ticks, _text((_LEFT + _RIGHT) / 2, _BOTTOM + 42, self.x_title, "quiet", "middle")]

    def _line(self, number: int, name: str) -> list[str]:
        """Return a line with its dots, and with its last value above its end.

        If there are two lines, the value of the first, which is the lower one, is below its end.
        """
        nth = _NTH[number]
        places = [(self._x(x), self._y(y)) for x, y in self.lines[name]]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        value = _number(self.lines[name][-1][1])
        shift = 20 if len(self.lines) > 1 and number == 0 else -10
        return [
            f'<path class="line {nth}" d="M{path}"/>',
            *(f'<circle class="dot {nth}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>' for x, y in places),
            _text(places[-1][0] + 8, places[-1][1] + shift, value, "value", "end"),
        ]


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
