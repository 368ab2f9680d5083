"""Every test in this folder needs a GPU; fixtures that several of its modules use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.emulated_modules import use_tensor_cores


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.gpu)


@pytest.fixture
def every_convolution(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run small convolutions on our kernels too, where a plan would otherwise call PyTorch's."""
    use_tensor_cores(monkeypatch)
    before = torch.backends.cudnn.allow_tf32
    torch.manual_seed(0)
    yield
    torch.backends.cudnn.allow_tf32 = before
