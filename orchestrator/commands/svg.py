"""Pictures as plain SVG: T(N), C(N) with the chosen point, and Gantt charts of replicas' lives. Text in, text out.

A panel is a piece of SVG with its height; `figure` stacks panels. Gantt charts of one figure have one time scale, so
that policies below each other can be compared by eye.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from orchestrator.planner.base import CurvePoint

WIDTH = 960
LEFT, RIGHT = 130, 70
LANE = 10
HEAD = 34
"""Room of a panel's title."""
FOOT = 34
"""Room of its time axis."""
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#9d755d", "#72b7b2", "#bab0ac")


@dataclass(frozen=True)
class Life:
    """A replica, or its work, from `start_s` to `stop_s`."""

    function: str
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class Panel:
    height: int
    body: str


def figure(panels: Sequence[Panel]) -> str:
    """One SVG document."""
    parts, top = [], 0
    for panel in panels:
        parts.append(f'<g transform="translate(0,{top})">{panel.body}</g>')
        top += panel.height
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top}" viewBox="0 0 {WIDTH} {top}" '
        'font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{top}" fill="white"/>', *parts, "</svg>"]) + "\n"


def gantt(title: str, lives: Sequence[Life], *, span_s: float | None = None, marks_s: Sequence[float] = ()) -> Panel:
    """A bar per life, in lanes by function: a lane is taken again when its bar has ended.

    `span_s`: seconds across the panel (None: to the last end); `marks_s`: dashed lines, where steps end.
    """
    span_s = span_s or max((life.stop_s for life in lives), default=0.0) or 1.0
    body, top = [_text(8, 18, title, weight="bold")], HEAD
    for number, name in enumerate(dict.fromkeys(life.function for life in lives)):
        own = [life for life in lives if life.function == name]
        places = lanes(own)
        height = LANE * (max(places) + 1)
        body.append(_text(LEFT - 8, top + height / 2 + 4, name, anchor="end"))
        for life, place in zip(own, places, strict=True):
            x, right = _x(life.start_s, span_s), _x(life.stop_s, span_s)
            body.append(
                f'<rect class="life" x="{x:.1f}" y="{top + LANE * place + 1}" width="{max(0.5, right - x):.1f}" '
                f'height="{LANE - 2}" fill="{COLORS[number % len(COLORS)]}">'
                f"<title>{escape(name)} {life.start_s:.4g} to {life.stop_s:.4g} s</title></rect>"
            )
        top += height + 6
    for mark_s in marks_s:
        x = _x(mark_s, span_s)
        body.append(
            f'<line x1="{x:.1f}" y1="{HEAD - 6}" x2="{x:.1f}" y2="{top}" stroke="#888" stroke-dasharray="3 3"/>'
        )
    body.append(_axis(top, span_s))
    return Panel(top + FOOT, "\n".join(body))


def lanes(lives: Sequence[Life]) -> list[int]:
    """The lane of each life: the lowest that is free at its start; no two bars of a lane overlap."""
    places, busy, free = [0] * len(lives), list[tuple[float, int]](), list[int]()
    count = 0
    for i in sorted(range(len(lives)), key=lambda i: lives[i].start_s):
        while busy and busy[0][0] <= lives[i].start_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, count)
            count += 1
        places[i] = heapq.heappop(free)
        heapq.heappush(busy, (lives[i].stop_s, places[i]))
    return places


def curve(points: Sequence[CurvePoint], chosen: CurvePoint, *, unit: str) -> Panel:
    """T(N) (left axis) and C(N) (right axis, `unit`) over replicas, both from 0; the chosen N is marked."""
    height, bottom = 260, 220
    points = sorted(points, key=lambda p: p.replicas)
    most = max(p.replicas for p in points)
    series = (
        ("T(N), s", COLORS[0], [p.time_s for p in points], chosen.time_s),
        (f"C(N), {unit}", COLORS[1], [_cost(p, unit) for p in points], _cost(chosen, unit)),
    )
    x = [_x(p.replicas, most) for p in points]
    body = [_text(8, 18, "replicas of generate: time and cost of a step", weight="bold")]
    for side, (name, color, values, at) in enumerate(series):
        top = max([*values, at]) or 1.0
        y = [bottom - (bottom - HEAD) * value / top for value in values]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
        body.append(f'<polyline class="curve" points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        body += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{color}"/>' for a, b in zip(x, y, strict=True)]
        mark = bottom - (bottom - HEAD) * at / top
        body.append(
            f'<circle class="chosen" cx="{_x(chosen.replicas, most):.1f}" cy="{mark:.1f}" r="6" fill="none" '
            f'stroke="{color}" stroke-width="2"/>'
        )
        at_x, anchor = (LEFT - 8, "end") if side == 0 else (WIDTH - RIGHT + 6, "start")
        body.append(_text(at_x, HEAD + 4, f"{top:.4g}", anchor=anchor, color=color))
        body.append(_text(at_x, HEAD + 20, name, anchor=anchor, color=color))
    body.append(f'<line x1="{LEFT}" y1="{bottom}" x2="{WIDTH - RIGHT}" y2="{bottom}" stroke="black"/>')
    body += [_text(_x(n, most), bottom + 16, str(n), anchor="middle") for n in _ticks_of(points)]
    return Panel(height, "\n".join(body))


def _cost(point: CurvePoint, unit: str) -> float:
    return point.cost_usd if unit == "USD" else point.gpu_s


def _ticks_of(points: Sequence[CurvePoint]) -> list[int]:
    replicas = sorted({p.replicas for p in points})
    return replicas[:: -(-len(replicas) // 16)]


def _x(value: float, most: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * value / most


def _axis(top: int, span_s: float) -> str:
    step = next(s for e in range(-3, 9) for s in (10.0**e, 2 * 10.0**e, 5 * 10.0**e) if span_s / s <= 10)
    parts = [f'<line x1="{LEFT}" y1="{top}" x2="{WIDTH - RIGHT}" y2="{top}" stroke="black"/>']
    for k in range(int(span_s / step) + 1):
        x = _x(k * step, span_s)
        parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{top + 4}" stroke="black"/>')
        parts.append(_text(x, top + 17, f"{k * step:.4g} s", anchor="middle"))
    return "\n".join(parts)


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal", color: str = "black") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" fill="{color}">'
        f"{escape(text)}</text>"
    )
