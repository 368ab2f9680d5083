"""The geometry of convolutions: bands, parts and residue classes, and what is worthwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusewright.cost.conv_staged import best_staged, prefers_staging, staged_us
from fusewright.cost.conv_tensor_core import (
    band_widths,
    beside_staging_us,
    best_band,
    fits,
    gradient_is_worthwhile,
    gradient_work,
    is_possible,
)
from fusewright.cost.convolution import gradient_pays, is_worthwhile, prefers_shared
from fusewright.ir.convolution import ConvAxis, Geometry
from fusewright.ir.graph import Dim
from fusewright.target.target import Target

CUDA = Target.cuda()


def geometry(size: int, taps: int, stride: int = 1, dilation: int = 1) -> Geometry:
    result = (size - dilation * (taps - 1) - 1) // stride + 1
    axis = ConvAxis(size, result, taps, stride, dilation, 0)
    return Geometry(Dim(16), 1, 64, 128, axis, axis)


@pytest.mark.parametrize(
    ("size", "taps", "stride", "dilation"),
    [(7, 3, 1, 1), (130, 3, 1, 1), (226, 3, 1, 1), (1000, 3, 1, 1), (230, 7, 2, 1), (256, 3, 1, 8)],
)
def test_bands_fit_into_shared_memory(size: int, taps: int, stride: int, dilation: int) -> None:
    of = geometry(size, taps, stride, dilation)
    band = best_band(of)
    assert band is not None and fits(of, band) and is_possible(of)
    widths = list(band_widths(of))
    assert band in widths and widths[0] == of.x.result and all(w % 4 == 0 for w in widths[1:])
    assert (band < of.x.result) == (of.x.result > 200)


def test_gradients_are_divided_among_all_processors() -> None:
    of = geometry(130, 3)
    work = gradient_work(of, 128, {})
    assert work.parts(CUDA) == 66, "two tiles of 64 results, nine taps in one set"
    assert (work.units, work.sums, work.wide) == (2, 9.0, False)
    assert gradient_work(replace(of, images=Dim(1), channels=2048), 128, {}).parts(CUDA) == 2
    assert gradient_work(replace(of, images=Dim(0)), 128, {}).parts(CUDA) == 1


def test_too_many_taps_are_left_to_pytorch() -> None:
    assert not is_possible(geometry(200, 13)) and not is_possible(geometry(400, 3, 5))
    assert is_worthwhile(geometry(130, 3), {}, CUDA) and not is_worthwhile(geometry(4, 3), {}, CUDA)


def test_residue_classes_of_results() -> None:
    axis = ConvAxis(32, 64, 4, 2, 1, 1, transposed=True)
    of = Geometry(Dim(64), 1, 128, 64, axis, axis)
    assert of.residue_classes == ((4,), (4,), (4,), (4,)) and best_band(of) == 32
    assert is_possible(of)
    # With a kernel narrower than its stride, some results have no terms.
    narrow = replace(of, x=ConvAxis(32, 96, 2, 3, 1, 1, transposed=True))
    assert narrow.x.phases == (1, 0, 1) and narrow.residue_classes.count(()) == 2
    assert (narrow.x.positions, narrow.x.halo) == (32, 0)
    # Every second tap is of the same residue class, and these are three apart.
    dilated = ConvAxis(9, 20, 5, 2, 3, 4, transposed=True)
    assert dilated.phases == (3, 2) and dilated.halo == 6


def test_weight_gradients_that_pay_beside_input_gradients() -> None:
    """Small images, strides and dilations, with input that the other gradient has staged."""
    small, strided = ConvAxis(7, 7, 3, 1, 1, 1), ConvAxis(56, 28, 3, 2, 1, 1)
    dilated, single = ConvAxis(56, 56, 3, 1, 2, 2), ConvAxis(14, 14, 1, 1, 1, 0)
    for axis, channels, results in ((small, 512, 512), (strided, 64, 128), (dilated, 128, 128)):
        of = Geometry(Dim(64), 1, channels, results, axis, axis)
        assert gradient_pays(of, {}, CUDA, beside=True), "shares staged input"
        assert not gradient_pays(of, {}, CUDA, beside=False)
        assert not gradient_is_worthwhile(of, {}, CUDA)
        assert prefers_shared(of, of.input_gradient, {}, CUDA), "or the plan would not share them"
    one = Geometry(Dim(64), 1, 1024, 256, single, single)
    few = Geometry(Dim(64), 1, 3, 64, strided, strided)
    assert not any(gradient_pays(each, {}, CUDA, beside=True) for each in (one, few))


def test_an_input_that_backward_reads_in_channels_last() -> None:
    strided = ConvAxis(56, 28, 3, 2, 1, 1)
    of = Geometry(Dim(64), 1, 64, 128, strided, strided)
    assert not gradient_is_worthwhile(of, {}, CUDA), "PyTorch's, which reads channels-last"
    assert is_worthwhile(of, {}, CUDA, True)
    assert not is_worthwhile(of, {}, CUDA, True, channels_last=True)


def test_memory_for_staged_input_is_bounded() -> None:
    """Three channels fill a sixteenth of a row; with sixteen phases that is too much."""
    axis = ConvAxis(227, 55, 11, 4, 1, 0)
    of = Geometry(Dim(256), 1, 3, 96, axis, axis)
    assert best_staged(of, 55, {}, CUDA) and not prefers_staging(of, None, {}, CUDA)
    stem = ConvAxis(224, 112, 7, 2, 1, 3)
    assert prefers_staging(Geometry(Dim(64), 1, 3, 64, stem, stem), None, {}, CUDA)


def test_inputs_are_staged_where_that_pays() -> None:
    def by_staging(of: Geometry) -> bool:
        return prefers_staging(of, beside_staging_us(of, {}, CUDA), {}, CUDA)

    wide, one = ConvAxis(130, 128, 3, 1, 1, 0), ConvAxis(224, 224, 3, 1, 1, 1)
    strided = ConvAxis(56, 28, 3, 2, 1, 1)
    assert not by_staging(Geometry(Dim(128), 1, 64, 128, wide, wide)), "a pass over much for little"
    assert by_staging(Geometry(Dim(1), 1, 64, 64, one, one)), "all processors convert a part first"
    assert by_staging(Geometry(Dim(64), 1, 64, 128, strided, strided)), "four phases"
    back = ConvAxis(128, 130, 3, 1, 1, 0, transposed=True)
    assert not by_staging(Geometry(Dim(128), 1, 128, 64, back, back)), "narrow tiles walk on"
    nothing = Geometry(Dim(0), 1, 64, 64, one, one)
    assert staged_us(nothing, {}, CUDA) is not None
    few, middle = ConvAxis(14, 14, 3, 1, 1, 1), ConvAxis(28, 28, 3, 1, 1, 1)
    assert by_staging(Geometry(Dim(16), 1, 256, 256, few, few)), "more tiles than by channels"
    assert not by_staging(Geometry(Dim(16), 1, 128, 128, middle, middle)), (
        "a kernel more for little"
    )


def test_tiles_of_staged_input_are_small_where_there_are_few() -> None:
    """With 256 positions, 60 of 132 processors would have one."""
    few, many = ConvAxis(14, 14, 3, 1, 1, 1), ConvAxis(56, 56, 3, 1, 1, 1)
    assert best_staged(Geometry(Dim(16), 1, 256, 256, few, few), 14, {}, CUDA) == 128
    assert best_staged(Geometry(Dim(10), 1, 256, 256, many, many), 56, {}, CUDA) == 256


def test_rows_and_images_share_their_padding() -> None:
    same = ConvAxis(7, 7, 3, 1, 1, 1)
    assert same.extent == 8 and replace(same, transposed=True).extent == 8
    assert replace(same, before=0, result=5).extent == 7
    assert replace(same, stride=2, result=4).extent == 5, "not with a stride"
    assert ConvAxis(7, 13, 3, 1, 1, 4).extent == 13, "results are adjacent"
