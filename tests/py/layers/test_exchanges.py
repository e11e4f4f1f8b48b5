"""Exchanges in a compiled graph: all of them, in their order, and their errors as they are."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer.layers import exchanges
from flexinfer.layers.exchanges import CollectiveError, Exchanges

NUM_RANKS = 2


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was exchanged; all ranks send the same."""
    done: list[str] = []

    def exchange(call: Any, sent: torch.Tensor, parts: Any = None, **kwargs: Any) -> None:
        done.append(call.__name__)
        if parts is None:
            sent.mul_(NUM_RANKS)
        for part in parts or ():
            part.copy_(sent)

    monkeypatch.setattr(exchanges, "_exchange", exchange)
    torch._dynamo.reset()
    return done


def test_a_compiled_forward_exchanges_what_the_eager_one_does(exchanged: list[str]) -> None:
    ranks = Exchanges(0, NUM_RANKS)

    def forward(x: torch.Tensor) -> torch.Tensor:
        ranks.sum(x + 1)  # also where nobody reads the sum: the other ranks wait for this one
        return ranks.gather(ranks.sum(x * 2) + ranks.sum(x.T.contiguous().T), 6)

    x = torch.arange(6.0).view(2, 3)
    eager = forward(x)
    of_eager = exchanged.copy()
    exchanged.clear()
    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(x), eager)
    assert exchanged == of_eager == ["all_reduce"] * 3 + ["gather"]


def test_a_compiled_forward_fails_as_the_eager_one_does(
    exchanged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Exchanges(1, NUM_RANKS)

    def gone(*args: Any, **kwargs: Any) -> None:
        raise CollectiveError("a rank is gone")

    compiled = torch.compile(ranks.sum, backend="aot_eager", fullgraph=True)
    compiled(torch.ones(2, 2))
    monkeypatch.setattr(exchanges, "_exchange", gone)
    with pytest.raises(CollectiveError, match="is gone"):
        compiled(torch.ones(2, 2))
