"""What PyTorch leaves open is not asked: which of equal elements `topk` and its like return."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fusewright.judge.ties import OtherTies, Ties
from fusewright.verify.feeds import Feed
from fusewright.verify.reference import Reference
from fusewright.verify.scenarios import Scenario


def test_other_ones_of_equal_elements_and_the_same_values() -> None:
    x = torch.tensor([[3.0, 1.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    with OtherTies() as ways:
        values, places = x.topk(2, dim=1)
        lowest, first = torch.sort(x, dim=1)
        kept = torch.sort(x, dim=1, stable=True).indices
        fourth = x.argmax(dim=1)
    assert ways.met
    assert torch.equal(values, x.topk(2, dim=1).values)
    assert torch.equal(lowest, x.sort(dim=1).values)
    for each in (places, first):
        assert torch.equal(x.gather(1, each), values if each is places else lowest)
        assert not torch.equal(each[1], torch.arange(len(each[1])))
    assert torch.equal(kept[1], torch.arange(4)) and fourth.tolist() == [0, 0]


class Chosen(nn.Module):
    def __init__(self, *, places: bool) -> None:
        super().__init__()
        self.places = places

    def forward(self, x: Tensor) -> Tensor:
        values, places = x.topk(2, dim=1)
        return places if self.places else values


def decided(model: nn.Module, x: Tensor) -> bool:
    reference = Reference(model, Feed(((x,),), seed=0), 0, "eval")
    expected = reference.expect(Scenario(mode="eval"), (x,))
    assert expected is not None
    return Ties().decide(reference, expected, "contiguous")


def test_only_answers_that_follow_from_the_choice_are_open() -> None:
    x, zeros = torch.randn(4, 6), torch.zeros(4, 6)
    assert decided(Chosen(places=True), zeros)
    assert not decided(Chosen(places=True), x)
    assert not decided(Chosen(places=False), zeros)
    assert not decided(nn.ReLU(), zeros)
