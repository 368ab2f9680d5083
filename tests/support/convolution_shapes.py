"""Convolutions of one to two axes, with the shape of their input."""

from __future__ import annotations

CONVOLUTIONS: dict[str, tuple[dict[str, object], tuple[int, ...]]] = {
    "3x3": ({"in_channels": 64, "out_channels": 128, "kernel_size": 3}, (4, 64, 66, 66)),
    "same": (
        {"in_channels": 32, "out_channels": 64, "kernel_size": 3, "padding": 1},
        (6, 32, 28, 28),
    ),
    "1x1": ({"in_channels": 100, "out_channels": 200, "kernel_size": 1}, (3, 100, 31, 33)),
    "5x5": (
        {"in_channels": 16, "out_channels": 40, "kernel_size": 5, "padding": 2},
        (2, 16, 40, 40),
    ),
    "7x7, stride 2": (
        {"in_channels": 3, "out_channels": 64, "kernel_size": 7, "stride": 2, "padding": 3},
        (4, 3, 112, 112),
    ),
    "stride 2": (
        {"in_channels": 48, "out_channels": 96, "kernel_size": 3, "stride": 2, "padding": 1},
        (4, 48, 57, 57),
    ),
    "few results": (
        {"in_channels": 16, "out_channels": 28, "kernel_size": 3, "padding": 1},
        (5, 16, 37, 44),
    ),
    "dilation 2": (
        {"in_channels": 64, "out_channels": 64, "kernel_size": 3, "dilation": 2, "padding": 2},
        (2, 64, 40, 40),
    ),
    "groups": (
        {"in_channels": 64, "out_channels": 96, "kernel_size": 3, "groups": 2, "padding": 1},
        (4, 64, 24, 24),
    ),
    "oblong": (
        {"in_channels": 20, "out_channels": 30, "kernel_size": (2, 5), "stride": (1, 3)},
        (3, 20, 21, 50),
    ),
    "wide": (
        {"in_channels": 64, "out_channels": 64, "kernel_size": 3, "padding": 1},
        (1, 64, 20, 600),
    ),
    "deep": (
        {"in_channels": 512, "out_channels": 512, "kernel_size": 3, "padding": 1},
        (8, 512, 7, 7),
    ),
    "1x1, stride 2": (
        {"in_channels": 64, "out_channels": 128, "kernel_size": 1, "stride": 2},
        (4, 64, 28, 29),
    ),
    "stride 3, dilation 2, groups": (
        {"in_channels": 64, "out_channels": 96, "kernel_size": 3, "stride": 3, "dilation": 2}
        | {"padding": 2, "groups": 2},
        (4, 64, 40, 38),
    ),
    "line, stride 2": (
        {"in_channels": 32, "out_channels": 64, "kernel_size": 5, "stride": 2, "padding": 2},
        (6, 32, 1001),
    ),
}
