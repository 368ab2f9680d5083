"""PyTorch's transformer layers with attention masks, as people call them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

import fusewright

WIDTH, LENGTH = 8, 5
_CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH)
_BAND = torch.full((LENGTH, LENGTH), float("-inf")).triu(2)


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


def _decoder() -> nn.Module:
    layer = nn.TransformerDecoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerDecoder(layer, 1)


def _whole() -> nn.Module:
    return nn.Transformer(WIDTH, 2, 1, 1, 16, dropout=0.0, batch_first=True)


CALLS: dict[str, tuple[Callable[[], nn.Module], int, dict[str, Tensor]]] = {
    "encoder, causal": (_encoder, 1, {"mask": _CAUSAL}),
    "encoder, bool": (_encoder, 1, {"mask": _CAUSAL.isinf()}),
    "decoder": (_decoder, 2, {"tgt_mask": _CAUSAL}),
    "whole, two masks": (_whole, 2, {"src_mask": _BAND, "tgt_mask": _CAUSAL}),
}


def results(
    model: nn.Module, given: tuple[Tensor, ...], masks: Mapping[str, Tensor]
) -> list[Tensor]:
    """The output and all gradients."""
    model.zero_grad()
    y = model(*given, **masks)
    y.square().sum().backward()
    return [y, *(each.grad for each in model.parameters() if each.grad is not None)]


@pytest.mark.parametrize("name", CALLS)
def test_masks_are_not_asked_for_their_values(name: str) -> None:
    make, count, masks = CALLS[name]
    torch.manual_seed(0)
    model = make()
    given = tuple(torch.randn(2, LENGTH, WIDTH) for _ in range(count))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*original forward.*")
        fast = fusewright.optimize(model, given, masks, modes=("train",))
        found = results(fast, given, masks)
    expected = results(copy.deepcopy(model), given, masks)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_one_program_serves_every_mask() -> None:
    """The mask is an input of the program, whatever it was in the example."""
    torch.manual_seed(0)
    model, x = _encoder(), torch.randn(2, LENGTH, WIDTH)
    fast = fusewright.optimize(model, (x,), {"mask": _CAUSAL}, modes=("train",))
    torch.testing.assert_close(fast(x, mask=_BAND), model(x, mask=_BAND))
    assert not torch.allclose(model(x, mask=_BAND), model(x, mask=_CAUSAL))
