"""Small tensors go to the device in as many transfers for many requests as for few."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer.runtime.transfer import to_device
from flexinfer.sampling import logprobs, sampler
from flexinfer.sampling.params import SamplingParams
from flexinfer.sampling.sampler import Sampler
from flexinfer.sampling.sequences import SequenceSetup


def test_numbers_arrive() -> None:
    cpu = torch.device("cpu")
    assert to_device([1, 2], torch.int64, cpu).tolist() == [1, 2]
    assert to_device([0.5], torch.float32, cpu).tolist() == [0.5]


def count_transfers(num_requests: int, monkeypatch: pytest.MonkeyPatch) -> int:
    copied: list[int] = []

    def watched(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        copied.append(len(values))
        return to_device(values, dtype, device)

    for module in (sampler, logprobs):
        monkeypatch.setattr(module, "to_device", watched)
    monkeypatch.setattr(sampler.host_sampler, "supports", lambda logits: False)  # as on a GPU
    params = [
        SamplingParams(temperature=i % 3 / 2, top_k=5, top_p=0.9, min_p=0.01, logprobs=2,
                       presence_penalty=0.5, logit_bias={3: 1.0}, min_tokens=4)
        for i in range(num_requests)
    ]  # fmt: skip
    one = Sampler(0, torch.device("cpu"))
    one.sequences.add(
        SequenceSetup(i, params[i], 3, (1, 2, 3), (4, 4), frozenset([7]))
        for i in range(num_requests)
    )
    states = [one.sequences[i] for i in range(num_requests)]
    output = one.sample(torch.randn(num_requests, 20), states)
    assert len(output.token_ids) == num_requests
    assert not output.errors
    return len(copied)


def test_the_sampler_sends_as_many_tensors_for_many_requests_as_for_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert count_transfers(12, monkeypatch) == count_transfers(3, monkeypatch) > 5
