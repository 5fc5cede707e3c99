"""The sweeps on a tiny model and a small cell, what counts as a cliff, and the plot."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from bench.parts.growth import Growth, by_concurrency, by_context, by_workers, drops, engine_for, plot, table
from bench.parts.plot import Panel, ceiling, svg
from tests.decode.native.reference import tiny_checkpoint

EVEN = Growth(
    concurrency=[(1, 100.0), (2, 180.0), (4, 300.0)],
    context=[(128, 5.0), (256, 5.5)],
    prefill=[(128, 1000.0), (256, 900.0)],
    workers=[(1, 200.0), (2, 390.0)],
)


def test_growth_that_bends_a_little_is_no_cliff() -> None:
    assert EVEN.cliffs() == []
    assert table(EVEN).endswith("No cliff.")


def test_each_kind_of_cliff_is_found() -> None:
    broken = Growth(
        concurrency=[(1, 100.0), (2, 80.0)],
        context=[(128, 5.0), (256, 12.0)],
        prefill=[(128, 1000.0), (256, 500.0)],
        workers=[(1, 200.0), (2, 250.0)],
    )
    assert [cliff.split(":")[0] for cliff in broken.cliffs()] == [
        "tokens/s against sequences",
        "prefill tokens/s against prompt tokens",
        "tokens/s a worker against workers",
        "steps/s against context",
    ]
    assert "Cliffs: tokens/s against sequences: 100.0 at 1, 80.0 at 2" in table(broken)


def test_a_drop_names_both_points() -> None:
    assert drops("x", [(1, 10.0), (2, 5.0), (4, 6.0)], 0.9) == ["x: 10.0 at 1, 5.0 at 2"]


def test_the_engine_sweeps_measure_every_point_and_leave_nothing_behind() -> None:
    engine = engine_for(tiny_checkpoint("llama"), "fp32", 4, 128)
    points = by_concurrency(engine, (1, 2, 4))
    assert [count for count, _ in points] == [1, 2, 4]
    steps, prefill = by_context(engine, (32, 64))
    assert [length for length, _ in steps] == [length for length, _ in prefill] == [32, 64]
    assert all(value > 0 for _, value in (*points, *steps, *prefill))
    assert not engine.has_unfinished
    engine.check_integrity()


@pytest.mark.e2e
def test_the_workers_sweep_starts_as_many_workers() -> None:
    [(one, slow), (two, fast)] = by_workers((1, 2), 10)
    assert (one, two) == (1, 2)
    assert slow > 0
    assert 0 < fast <= 2 * 8 * 1000 / 40


@pytest.mark.parametrize(("value", "top"), [(0, 1), (0.9, 1), (3, 5), (1000, 1000), (1001, 2000), (2100, 2500)])
def test_the_axis_ends_at_a_round_number(value: float, top: float) -> None:
    assert ceiling(value) == top


def test_the_plot_is_well_formed_and_stays_inside() -> None:
    root = ElementTree.fromstring(plot(EVEN))
    width, height = float(root.attrib["width"]) / 4, float(root.attrib["height"])
    circles = root.findall(".//{*}circle")
    assert len(circles) == 3 + 2 + 2 + 2 * 2
    assert all(0 <= float(c.attrib["cx"]) <= width and 0 <= float(c.attrib["cy"]) <= height for c in circles)


def test_a_label_with_markup_is_text() -> None:
    drawn = svg([Panel("a < b", "x", "y & z", {"one": [(1, 1.0)]})])
    assert "a < b" in [element.text for element in ElementTree.fromstring(drawn).iter()]
