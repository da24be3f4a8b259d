"""Small charts as SVG text, for a page without scripts or requests.

Invariant: pure functions from numbers to text. Colours are CSS classes of the page, so that one drawing serves light
and dark; non-finite points are left out, and an empty chart says so.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 520, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 34
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """One line. points: (x, y). style: CSS class of the page: "main", "second" or "faint"."""

    name: str
    points: tuple[Point, ...]
    style: str = "main"


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar. label: under it. text: above it. note: what a pointer resting on it shows."""

    label: str
    value: float
    text: str
    note: str


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers from at most `low` to at least `high`, about `count` apart."""
    if not math.isfinite(low + high):
        return [0.0, 1.0]
    size = max(abs(low), abs(high))
    if size < 1e-30 or high - low <= 1e-12 * size:
        high = low + (size if size >= 1e-30 else 1.0)
    raw = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next((m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= raw), 10 * unit)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def short(value: float) -> str:
    """A number for an axis: 1200000 as 1.2M, 0.00012 as 1.2e-04."""
    size = abs(value)
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.3g}{letter}"
    if size and size < 1e-3:
        return f"{value:.1e}"
    return f"{value:.4g}"


def moving_average(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average without the bias of its start."""
    out, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        out.append(total / norm)
    return out


def line_chart(series: Sequence[Series], *, x_label: str, from_zero: bool = True, label: str) -> str:
    """Lines over a common x. label: what the chart shows, for readers who do not see it."""
    clean = [Series(s.name, tuple(p for p in s.points if math.isfinite(p[0] + p[1])), s.style) for s in series]
    xs = [p[0] for s in clean for p in s.points]
    ys = [p[1] for s in clean for p in s.points]
    if not xs:
        return _empty(label)
    y_ticks = nice_ticks(min(0.0, *ys) if from_zero else min(ys), max(ys))
    x_low, x_high = min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1
    at_x = _scale(x_low, x_high, LEFT, WIDTH - RIGHT)
    at_y = _scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [_y_axis(y_ticks, at_y)]
    parts += [
        f'<text class="tick" x="{at_x(x):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{short(x)}</text>'
        for x in nice_ticks(x_low, x_high, 5)
        if x_low <= x <= x_high
    ]
    parts.append(_x_label(x_label))
    for s in clean:
        path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in _thin(s.points))
        parts.append(f'<polyline class="line {s.style}" points="{path}">{_title(s.name)}</polyline>')
    return _svg(parts, label)


def bar_chart(bars: Sequence[Bar], *, x_label: str, label: str, mark_after: int | None = None, mark: str = "") -> str:
    """Upright bars. mark_after: draw a dashed line after the bar of this index, named `mark`."""
    if not bars or not any(math.isfinite(b.value) for b in bars):
        return _empty(label)
    ticks = nice_ticks(0.0, max(b.value for b in bars if math.isfinite(b.value)))
    at_y = _scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)
    slot = (WIDTH - LEFT - RIGHT) / max(len(bars), 3)
    width = min(slot * 0.72, 72)
    every = math.ceil(len(bars) / 20)
    parts = [_y_axis(ticks, at_y), _x_label(x_label)]
    for index, bar in enumerate(bars):
        x, value = LEFT + slot * (index + 0.5), bar.value if math.isfinite(bar.value) else 0.0
        top = at_y(value)
        parts.append(
            f'<rect class="bar" x="{x - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" rx="2" '
            f'height="{max(0.0, HEIGHT - BOTTOM - top):.1f}">{_title(bar.note)}</rect>'
        )
        if len(bars) <= 12:
            parts.append(
                f'<text class="value" x="{x:.1f}" y="{max(top - 4, TOP):.1f}" text-anchor="middle">'
                f"{html.escape(bar.text)}</text>"
            )
        if index % every == 0:
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
                f"{html.escape(bar.label)}</text>"
            )
    if mark_after is not None and 0 <= mark_after < max(len(bars), 3):
        x = LEFT + slot * (mark_after + 1)
        anchor, shift = ("end", -5) if x > WIDTH * 0.7 else ("start", 5)
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(
            f'<text class="mark-text" x="{x + shift:.1f}" y="{TOP + 10}" text-anchor="{anchor}">'
            f"{html.escape(mark)}</text>"
        )
    return _svg(parts, label)


def share_bar(share: float, label: str) -> str:
    """A horizontal bar filled to `share`, between 0 and 1."""
    filled = 0.0 if not math.isfinite(share) else min(max(share, 0.0), 1.0) * 100
    return (
        f'<svg class="share" viewBox="0 0 100 6" preserveAspectRatio="none" role="img">{_title(label)}'
        f'<rect class="track" width="100" height="6"/><rect class="bar" width="{filled:.2f}" height="6"/></svg>'
    )


def _thin(points: tuple[Point, ...], most: int = 1200) -> tuple[Point, ...]:
    return points[:: math.ceil(len(points) / most)] if len(points) > most else points


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _y_axis(ticks: Sequence[float], at_y: Callable[[float], float]) -> str:
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at_y(t):.1f}" y2="{at_y(t):.1f}"/>'
        f'<text class="tick" x="{LEFT - 7}" y="{at_y(t) + 3.5:.1f}" text-anchor="end">{short(t)}</text>'
        for t in ticks
    )


def _title(text: str) -> str:
    return f"<title>{html.escape(text)}</title>"


def _x_label(text: str) -> str:
    return (
        f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2:.1f}" y="{HEIGHT - 3}" text-anchor="middle">'
        f"{html.escape(text)}</text>"
    )


def _svg(parts: Sequence[str], label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(label)}">{"".join(parts)}</svg>'


def _empty(label: str) -> str:
    return _svg([f'<text class="axis" x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">no data</text>'], label)
