"""How answers of `flexinfer chat` are drawn: as it is told, as the model has it, or greedily."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from flexinfer.cli.chat.local import LocalBackend
from flexinfer.cli.chat.options import ChatSettings
from flexinfer.cli.chat.remote import request_options
from flexinfer.cli.chat.sampling import ChatSampling
from helpers.advised import advised_model


def sampling_of(**given: Any) -> ChatSampling:
    """What one chat is drawn by, with a local model."""
    settings = ChatSettings(memory="32MiB", **given)
    backend = LocalBackend(settings)
    try:
        return settings.sampling().filled(backend.defaults)
    finally:
        backend.close()


def test_a_model_without_advice_is_greedy() -> None:
    params = sampling_of().params()
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0, 1, 0, 256)


def test_the_models_advice_is_taken_and_what_is_said_goes_before(tmp_path: Path) -> None:
    folder = advised_model(tmp_path / "model", temperature=0.6, top_k=20, min_p=0.1)
    taken = sampling_of(model=str(folder)).given
    assert taken == {"max_tokens": 256, "temperature": 0.6, "top_k": 20, "min_p": 0.1}
    said = sampling_of(model=str(folder), temperature=0.0, top_k=0).params()
    assert (said.temperature, said.top_k, said.min_p) == (0, 0, 0.1)


def test_a_server_is_told_only_what_was_said() -> None:
    sent = request_options(ChatSettings(top_p=1.0, temperature=0.0).sampling())
    drawn = {name: value for name, value in sent.items() if not name.startswith("stream")}
    assert drawn == {"max_tokens": 256, "top_p": 1.0, "temperature": 0.0}


def test_numbers_out_of_range_are_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(ValueError, match="top_p must be"):
        ChatSettings(top_p=2.0).sampling()
