"""The picture is well-formed, labelled and to scale."""

from xml.etree import ElementTree

import pytest

from lq_lightning.planning.memory import KINDS
from lq_lightning.planning.picture import _COLORS, _ticks, draw

GIB = 2**30
MEMORY = [
    ("forward 1", {"weights": 10 * GIB, "saved activations": 5 * GIB}),
    ("forward 1", {"weights": 10 * GIB, "saved activations": 20 * GIB}),
    ("backward 1", {"weights": 10 * GIB, "gradients": 6 * GIB, "temporary": 1 * GIB}),
    ("optimizer", {"weights": 10 * GIB, "gradients": 6 * GIB}),
]
PIPELINE = [(0, "F1", 0.0, 0.010), (1, "F1", 0.010, 0.020), (1, "B1", 0.020, 0.040)]
PIPELINE += [(0, "B1", 0.040, 0.060), (0, "optimizer <&>", 0.060, 0.080)]


def _elements(svg, kind):
    return ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}" + kind)


def _words(svg):
    return [text.text for text in _elements(svg, "text")]


def test_memory():
    svg = draw(MEMORY, title="8B on <one> GPU")
    words = _words(svg)
    assert "8B on <one> GPU" in words
    assert "peak 30.00 GiB" in words
    assert "weights, 10" in words
    assert "saved activations, 20" in words
    assert {"forward 1", "backward 1", "optimizer"} <= set(words)
    areas = {area[0].text: area.get("points") for area in _elements(svg, "polygon")}
    assert set(areas) == {"weights", "gradients", "saved activations", "temporary"}
    heights = [float(point.split(",")[1]) for point in areas["saved activations"].split()]
    # four points above, then the same four below from right to left
    thick = [below - above for above, below in zip(heights[:4], heights[:3:-1], strict=True)]
    assert thick == pytest.approx([thick[1] / 4, thick[1], 0, 0], abs=0.2)


def test_pipeline():
    svg = draw(pipeline=PIPELINE)
    words = _words(svg)
    # 80 of 160 ms are busy
    assert "One step of the pipeline, ms; 50.0% idle" in words
    assert {"rank 0", "rank 1", "F1", "B1", "optimizer <&>"} <= set(words)
    boxes = {box[0].text: box for box in _elements(svg, "rect") if len(box)}
    assert "optimizer <&>: 20 ms" in boxes
    assert float(boxes["F1: 10 ms"].get("width")) == pytest.approx(
        float(boxes["B1: 20 ms"].get("width")) / 2, abs=0.5
    )


def test_parts_are_optional():
    assert len(draw(MEMORY, PIPELINE)) > len(draw(MEMORY))
    ElementTree.fromstring(draw())
    ElementTree.fromstring(draw([("forward 1", {})]))


def test_every_allocated_kind_has_a_color():
    assert {*KINDS} - {*_COLORS} == {"CUDA and NCCL", "fragmentation"}
    assert len(set(_COLORS.values())) == len(_COLORS)


@pytest.mark.parametrize(
    ("largest", "ticks"),
    [
        (30, [0, 5, 10, 15, 20, 25, 30]),
        (1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.004, [0, 0.001, 0.002, 0.003, 0.004]),
    ],
)
def test_ticks(largest, ticks):
    assert _ticks(largest) == ticks
