"""Pictures: well-formed SVG whose bars and points lie where the numbers say."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.commands.svg import HEAD, LANE, LEFT, RIGHT, WIDTH, Life, curve, figure, gantt, lanes
from orchestrator.planner.base import CurvePoint

SVG = "{http://www.w3.org/2000/svg}"
INNER = WIDTH - LEFT - RIGHT


def drawn(picture: str, tag: str, kind: str) -> list[ElementTree.Element]:
    return [e for e in ElementTree.fromstring(picture).iter(f"{SVG}{tag}") if e.get("class") == kind]


def test_each_life_is_one_bar_from_its_start_to_its_end() -> None:
    lives = [Life("generate", 0.0, 5.0), Life("generate", 5.0, 10.0), Life("generate", 2.0, 4.0), Life("a<b", 9.0, 9.5)]
    bars = drawn(figure([gantt("<title> & more", lives)]), "rect", "life")
    assert len(bars) == 4
    at = [(float(bar.attrib["x"]), float(bar.attrib["width"]), float(bar.attrib["y"])) for bar in bars]
    assert at[0] == (LEFT, INNER / 2, HEAD + 1)
    assert at[1] == (LEFT + INNER / 2, INNER / 2, HEAD + 1)  # the lane of the first is free again
    assert at[2] == (LEFT + INNER / 5, INNER / 5, HEAD + LANE + 1)
    assert at[3][2] == HEAD + 2 * LANE + 6 + 1


def test_panels_of_one_figure_can_share_a_time_scale() -> None:
    panels = [
        gantt("short", [Life("train", 0.0, 5.0)], span_s=20.0),
        gantt("long", [Life("train", 0.0, 20.0)], span_s=20.0),
    ]
    short, long = drawn(figure(panels), "rect", "life")
    assert float(long.attrib["width"]) == pytest.approx(4 * float(short.attrib["width"]))


def test_a_picture_without_lives_is_a_picture() -> None:
    assert drawn(figure([gantt("nothing", [])]), "rect", "life") == []


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=30))
def test_bars_of_a_lane_do_not_overlap_and_no_lane_is_wasted(spans: list[tuple[int, int]]) -> None:
    lives = [Life("f", float(start), float(start + length)) for start, length in spans]
    places = lanes(lives)
    for lane in set(places):
        own = sorted((x.start_s, x.stop_s) for x, place in zip(lives, places, strict=True) if place == lane)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(own))
    most = max((sum(x.start_s <= t < x.stop_s for x in lives) for t in range(40)), default=0)
    assert len(set(places)) == most


@pytest.mark.parametrize(("unit", "costs"), [("USD", (2.0, 4.0)), ("GPU s", (30.0, 60.0))])
def test_the_chosen_point_is_marked_on_both_curves(unit: str, costs: tuple[float, float]) -> None:
    points = [CurvePoint(1, 8.0, 2.0, 30.0), CurvePoint(2, 4.0, 4.0, 60.0)]
    picture = figure([curve(points, points[1], unit=unit)])
    time, cost = drawn(picture, "circle", "chosen")
    bottom = 220
    assert (float(time.attrib["cx"]), float(time.attrib["cy"])) == (LEFT + INNER, bottom - (bottom - HEAD) / 2)
    assert (float(cost.attrib["cx"]), float(cost.attrib["cy"])) == (LEFT + INNER, HEAD)
    first = drawn(picture, "polyline", "curve")[1].attrib["points"].split()[0]
    assert [float(v) for v in first.split(",")] == [LEFT + INNER / 2, bottom - (bottom - HEAD) * costs[0] / costs[1]]
    assert unit in picture
