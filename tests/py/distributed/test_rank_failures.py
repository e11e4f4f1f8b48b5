"""A rank that dies, hangs or disagrees ends the engine with one error that names it; nothing stays.

Refusals come before a process is started.
"""

from __future__ import annotations

import copy
import os
import random
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import LLMEngine, SamplingParams
from flexinfer.config import EngineConfig
from flexinfer.distributed import group
from flexinfer.errors import RankError, UnsupportedModelError
from helpers.rank_kit import children, folder_of, make_ranked_engine, open_things
from helpers.rank_nursery import Nursery
from helpers.tiny_models import make_model, random_prompts

PROMPTS = random_prompts((20, 33, 7))
NEVER_S = 600.0
"""No error comes by a timeout."""


def run_until_it_fails(engine: LLMEngine, victims: list[int], at_step: int, sign: int) -> RankError:
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=40))
    for step in range(1000):
        if step == at_step:
            for victim in victims:
                os.kill(victim, sign)
        try:
            engine.step()
        except RankError as error:
            if step < at_step:
                raise
            return error
    raise AssertionError("no step failed")


def check_nothing_is_left(before: set[int], things: Counter[tuple[str, int]]) -> None:
    """REQUIRES: the engine has been given up; its arena lives as long as it."""
    assert children() <= before
    assert not open_things() - things


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_a_rank_killed_at_a_random_step_is_named(
    seed: int, nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_spawn", nursery.spawn)
    check_that_a_killed_rank_is_named(seed)


def test_a_rank_killed_in_a_step_is_named_and_nothing_is_left() -> None:
    check_that_a_killed_rank_is_named(0)


def check_that_a_killed_rank_is_named(seed: int) -> None:
    before, things = children(), open_things()
    engine = make_ranked_engine(distributed_timeout_s=NEVER_S)
    (victim,) = children() - before
    error = run_until_it_fails(engine, [victim], random.Random(seed).randrange(30), signal.SIGKILL)
    assert error.rank == 1
    assert "SIGKILL" in str(error)
    engine.add_request("later", PROMPTS[0])
    with pytest.raises(RankError):
        engine.step()
    engine.close()
    del engine, error
    check_nothing_is_left(before, things)


def test_a_rank_that_hangs_is_named_within_the_timeout() -> None:
    before, things = children(), open_things()
    engine = make_ranked_engine(distributed_timeout_s=3.0)  # longer than any step takes
    (victim,) = children() - before
    error = run_until_it_fails(engine, [victim], 3, signal.SIGSTOP)
    assert error.rank == 1
    assert "hangs" in str(error)
    engine.close()
    del engine, error
    check_nothing_is_left(before, things)


def test_a_rank_whose_manager_differs_is_named_with_the_operation() -> None:
    engine = make_ranked_engine()
    assert engine.manager.match_prefix([1, 2, 3]) == 0
    engine.manager._core._operations[-1] = (*engine.manager._core._operations[-1][:2], 7)
    with pytest.raises(RankError, match=r"rank 1 failed: DisagreementError: match_prefix gave 0"):
        engine.sleep()
    engine.close()


@pytest.mark.parametrize(
    ("name", "num_ranks", "message"),
    [
        ("gpt2", 2, "'gpt2' has no tensor-parallel plan"),
        ("phi3", 2, "colwise_gather_output"),
        ("llama", 3, "4 attention heads, which 3 ranks cannot share"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_before_a_process_starts(
    name: str, num_ranks: int, message: str
) -> None:
    before = children()
    with pytest.raises(UnsupportedModelError, match=message):
        make_ranked_engine(name, num_ranks)
    assert children() <= before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"async_scheduling": True}, "async_scheduling does not go with"),
        (
            {
                "speculative_config": {
                    "method": "draft_model",
                    "model": "folder",
                    "num_speculative_tokens": 2,
                }
            },
            'method "draft_model" does not go with',
        ),
        ({"model": None}, "takes a folder or hub id"),
        ({"tensor_parallel_size": 0}, "positive integer"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    config: dict[str, Any] = {"model": "somewhere", "tensor_parallel_size": 2, **settings}
    if config["model"] is None:
        config["model"] = make_model("llama")
    with pytest.raises(ValueError, match=message):
        EngineConfig(**config)


def test_a_rank_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before, things = children(), open_things()
    monkeypatch.setattr(group, "versions", lambda: {"flexinfer": "9.9.9", "torch": "1"})
    with pytest.raises(RankError, match=r"rank 1 has .* rank 0 has"):
        make_ranked_engine()
    check_nothing_is_left(before, things)


def test_the_fingerprint_tells_weights_of_equal_shape_apart(tmp_path: Any) -> None:
    from flexinfer.distributed.messages import fingerprint

    make_model("llama", seed=1).save_pretrained(tmp_path)
    assert fingerprint(folder_of("llama")) != fingerprint(tmp_path)
    assert fingerprint(folder_of("llama")) == fingerprint(folder_of("llama"))


def test_a_rank_of_another_model_is_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from flexinfer.distributed import rank
    from flexinfer.distributed.messages import Setup, fingerprint

    make_model("llama", seed=1).save_pretrained(tmp_path)
    monkeypatch.setattr("flexinfer.runtime.torch_settings.set_up_torch", lambda threads: None)
    config = EngineConfig(model=folder_of("llama"), tensor_parallel_size=2)
    setup = Setup(config, fingerprint(config.model), 2, ("nowhere", 1), 1, 1.0)
    own: Any = EngineConfig(model=str(tmp_path), tensor_parallel_size=2)
    no_connection: Any = None
    with pytest.raises(ValueError, match="is not the one that rank 0 has"):
        rank._serve(no_connection, 1, setup, own)


def test_weights_of_other_shapes_than_the_config_says_are_refused(tmp_path: Any) -> None:
    model = copy.deepcopy(make_model("wide_mlp"))
    model.config.intermediate_size = 256
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"where config\.json asks for"):
        make_ranked_engine(model=str(tmp_path))


@pytest.mark.parametrize("seen_by", ["all", "rank 1"])
def test_weights_that_are_cut_off_are_named_by_their_file(
    seen_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copytree(folder_of("llama"), tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    error: type[Exception] = UnsupportedModelError
    if seen_by == "rank 1":
        error = RankError
        monkeypatch.setattr("flexinfer.models.loading.load_part_of_model", lambda *_: (None, 0))
    before, things = children(), open_things()
    says = f"'{weights}' is no whole safetensors file"
    with pytest.raises(error, match=f"^{'' if seen_by == 'all' else 'rank 1 failed: '}{says}"):
        make_ranked_engine(model=str(folder))
    check_nothing_is_left(before, things)


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's, where rank 0 has to listen itself."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in (("ADDR", "127.0.0.1"), ("PORT", str(port))):
            monkeypatch.setenv(f"MASTER_{name}", value)
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(ValueError, match=f"127.0.0.1:{port} cannot be listened on: is the"):
            group._launched_store()
