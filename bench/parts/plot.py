"""Small line plots as SVG, written by hand: a row of panels, each with one or more lines over a doubling x axis.

Owns the drawing. Refuses to know what is drawn. The colours are readable on a light and on a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 330, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 42, 44
_COLOURS = ("#2a7ab0", "#d9822b", "#5a9e5a")

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """`lines` by name; x must be above 0 and is drawn in powers of two, y from 0."""

    title: str
    x_label: str
    y_label: str
    lines: dict[str, Points]


def svg(panels: Sequence[Panel]) -> str:
    body = "".join(
        f'<g transform="translate({WIDTH * number},0)">{_panel(panel)}</g>' for number, panel in enumerate(panels)
    )
    size = f'width="{WIDTH * len(panels)}" height="{HEIGHT}" viewBox="0 0 {WIDTH * len(panels)} {HEIGHT}"'
    style = 'font-family="sans-serif" font-size="11" fill="#808080"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{body}</svg>\n'


def ceiling(value: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is not below `value`."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if value <= step * power * (1 + 1e-9))


def _panel(panel: Panel) -> str:
    xs = sorted({x for points in panel.lines.values() for x, _ in points})
    top = ceiling(max(y for points in panel.lines.values() for _, y in points))
    low, high = math.log2(xs[0]), max(math.log2(xs[-1]), math.log2(xs[0]) + 1)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - low) / (high - low)
        return (
            round(_LEFT + across * (WIDTH - _LEFT - _RIGHT), 1),
            round(HEIGHT - _BOTTOM - y / top * (HEIGHT - _TOP - _BOTTOM), 1),
        )

    parts = [_text(WIDTH / 2, 16, panel.title, "middle", weight="bold")]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = at(xs[0], share * top)
        right = WIDTH - _RIGHT
        parts.append(f'<line x1="{x}" y1="{y}" x2="{right}" y2="{y}" stroke="#808080" stroke-opacity="0.3"/>')
        parts.append(_text(x - 6, y + 4, f"{share * top:,g}", "end"))
    parts += [_text(at(x, 0)[0], HEIGHT - _BOTTOM + 15, f"{x:g}", "middle") for x in xs]
    parts.append(_text(WIDTH / 2, HEIGHT - 8, panel.x_label, "middle"))
    parts.append(_text(6, 33, panel.y_label, "start"))
    for number, (name, points) in enumerate(panel.lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        places = [at(x, y) for x, y in points]
        path = " ".join(f"{x},{y}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in places]
        if len(panel.lines) > 1:
            parts.append(_text(WIDTH - _RIGHT, 33 + 13 * number, name, "end", colour=colour))
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str, *, weight: str = "normal", colour: str = "") -> str:
    fill = f' fill="{colour}"' if colour else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}"{fill}>{escape(text)}</text>'
