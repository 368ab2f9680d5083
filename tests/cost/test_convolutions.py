"""The sizes of convolutions: how results are cut into bands, parts and classes, and what pays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusewright.cost.conv_staged import best_line, line_us, prefers_lines
from fusewright.cost.conv_tensor_core import (
    band_widths,
    beside_lines_us,
    best_band,
    fits,
    gradient_is_worthwhile,
    gradient_work,
    is_possible,
)
from fusewright.cost.convolution import gradient_pays, is_worthwhile, prefers_shared
from fusewright.ir.convolution import Geometry, WindowAxis
from fusewright.ir.graph import Dim


def geometry(size: int, taps: int, stride: int = 1, dilation: int = 1) -> Geometry:
    result = (size - dilation * (taps - 1) - 1) // stride + 1
    axis = WindowAxis(size, result, taps, stride, dilation, 0)
    return Geometry(Dim(16), 1, 64, 128, axis, axis)


@pytest.mark.parametrize(
    ("size", "taps", "stride", "dilation"),
    [(7, 3, 1, 1), (130, 3, 1, 1), (226, 3, 1, 1), (1000, 3, 1, 1), (230, 7, 2, 1), (256, 3, 1, 8)],
)
def test_bands_find_room(size: int, taps: int, stride: int, dilation: int) -> None:
    of = geometry(size, taps, stride, dilation)
    band = best_band(of)
    assert band is not None and fits(of, band) and is_possible(of)
    widths = list(band_widths(of))
    assert band in widths and widths[0] == of.x.result and all(w % 4 == 0 for w in widths[1:])
    assert (band < of.x.result) == (of.x.result > 200)


def test_gradients_are_divided_among_all_processors() -> None:
    of = geometry(130, 3)
    work = gradient_work(of, 128, {})
    assert work.parts(132) == 66, "two tiles of 64 results, nine taps in one set"
    assert (work.units, work.sums, work.wide) == (2, 9.0, False)
    assert gradient_work(replace(of, images=Dim(1), channels=2048), 128, {}).parts(132) == 2
    assert gradient_work(replace(of, images=Dim(0)), 128, {}).parts(132) == 1


def test_too_many_taps_are_left_to_pytorch() -> None:
    assert not is_possible(geometry(200, 13)) and not is_possible(geometry(400, 3, 5))
    assert is_worthwhile(geometry(130, 3), {}) and not is_worthwhile(geometry(4, 3), {})


def test_classes_of_results() -> None:
    axis = WindowAxis(32, 64, 4, 2, 1, 1, transposed=True)
    of = Geometry(Dim(64), 1, 128, 64, axis, axis)
    assert of.classes == ((4,), (4,), (4,), (4,)) and best_band(of) == 32
    assert is_possible(of)
    # A kernel that is narrower than its stride leaves results that nothing is added to.
    narrow = replace(of, x=WindowAxis(32, 96, 2, 3, 1, 1, transposed=True))
    assert narrow.x.phases == (1, 0, 1) and narrow.classes.count(()) == 2
    assert (narrow.x.positions, narrow.x.halo) == (32, 0)
    # Every second tap is of the same class, and they lie three apart.
    dilated = WindowAxis(9, 20, 5, 2, 3, 4, transposed=True)
    assert dilated.phases == (3, 2) and dilated.halo == 6


def test_gradients_by_weights_that_pay_beside_those_by_sources() -> None:
    """Small images, strides and dilations: with lines that the other gradient has laid out."""
    small, strided = WindowAxis(7, 7, 3, 1, 1, 1), WindowAxis(56, 28, 3, 2, 1, 1)
    dilated, single = WindowAxis(56, 56, 3, 1, 2, 2), WindowAxis(14, 14, 1, 1, 1, 0)
    for axis, channels, results in ((small, 512, 512), (strided, 64, 128), (dilated, 128, 128)):
        of = Geometry(Dim(64), 1, channels, results, axis, axis)
        assert gradient_pays(of, {}, beside=True), "shares lines"
        assert not gradient_pays(of, {}, beside=False) and not gradient_is_worthwhile(of, {})
        assert prefers_shared(of, of.turned_back, {}), "or the plan would not share them"
    one = Geometry(Dim(64), 1, 1024, 256, single, single)
    few = Geometry(Dim(64), 1, 3, 64, strided, strided)
    assert not gradient_pays(one, {}, beside=True) and not gradient_pays(few, {}, beside=True)


def test_sources_that_backward_turns_anyway() -> None:
    strided = WindowAxis(56, 28, 3, 2, 1, 1)
    of = Geometry(Dim(64), 1, 64, 128, strided, strided)
    assert not gradient_is_worthwhile(of, {}), "which is PyTorch's then, and reads channels-last"
    assert is_worthwhile(of, {}, True) and not is_worthwhile(of, {}, True, turned=True)


def test_memory_for_lines_is_bounded() -> None:
    """Three channels fill a sixteenth of a row; by sixteen phases that is too much."""
    axis = WindowAxis(227, 55, 11, 4, 1, 0)
    of = Geometry(Dim(256), 1, 3, 96, axis, axis)
    assert best_line(of, 55, {}, 132) and not prefers_lines(of, None, {}, 132)
    stem = WindowAxis(224, 112, 7, 2, 1, 3)
    assert prefers_lines(Geometry(Dim(64), 1, 3, 64, stem, stem), None, {}, 132)


def test_inputs_are_laid_out_first_where_that_pays() -> None:
    def by_lines(of: Geometry) -> bool:
        return prefers_lines(of, beside_lines_us(of, {}, 132), {}, 132)

    wide, one = WindowAxis(130, 128, 3, 1, 1, 0), WindowAxis(224, 224, 3, 1, 1, 1)
    strided = WindowAxis(56, 28, 3, 2, 1, 1)
    assert not by_lines(Geometry(Dim(128), 1, 64, 128, wide, wide)), "a pass over much for little"
    assert by_lines(Geometry(Dim(1), 1, 64, 64, one, one)), "all processors convert a part first"
    assert by_lines(Geometry(Dim(64), 1, 64, 128, strided, strided)), "four phases"
    back = WindowAxis(128, 130, 3, 1, 1, 0, transposed=True)
    assert not by_lines(Geometry(Dim(128), 1, 128, 64, back, back)), "narrow tiles walk on"
    nothing = Geometry(Dim(0), 1, 64, 64, one, one)
    assert line_us(nothing, {}, 132) is not None
    few, middle = WindowAxis(14, 14, 3, 1, 1, 1), WindowAxis(28, 28, 3, 1, 1, 1)
    assert by_lines(Geometry(Dim(16), 1, 256, 256, few, few)), "more tiles than by channels"
    assert not by_lines(Geometry(Dim(16), 1, 128, 128, middle, middle)), "a kernel more for little"


def test_tiles_of_lines_are_small_where_there_are_few() -> None:
    """With 256 positions 60 of 132 processors would have one."""
    few, many = WindowAxis(14, 14, 3, 1, 1, 1), WindowAxis(56, 56, 3, 1, 1, 1)
    assert best_line(Geometry(Dim(16), 1, 256, 256, few, few), 14, {}, 132) == 128
    assert best_line(Geometry(Dim(10), 1, 256, 256, many, many), 56, {}, 132) == 256


def test_rows_and_images_share_their_zeros() -> None:
    same = WindowAxis(7, 7, 3, 1, 1, 1)
    assert same.extent == 8 and replace(same, transposed=True).extent == 8
    assert replace(same, before=0, result=5).extent == 7
    assert replace(same, stride=2, result=4).extent == 5, "not with a stride"
    assert WindowAxis(7, 13, 3, 1, 1, 4).extent == 13, "results lie beside each other"
