"""Which layers an adapter_config.json chooses."""

from __future__ import annotations

from typing import Any

import pytest

from flexinfer.lora import expressions
from flexinfer.lora.expressions import Expressions
from flexinfer.lora.targets import Targets

PATHS = [f"model.layers.{i}.self_attn.{name}_proj" for i in range(3) for name in "qv"]
ENDLESS = "(([a-z_.0-9]+)*)*!"


def targets_of(config: dict[str, Any]) -> Targets:
    return Targets(config, Expressions(config, PATHS))


@pytest.mark.parametrize(
    ("config", "chosen"),
    [
        ({"target_modules": ["q_proj"]}, PATHS[::2]),
        ({"target_modules": ["layers.1.self_attn.q_proj", "proj"]}, PATHS[2:3]),
        ({"target_modules": r".*\.[02]\..*v_proj"}, PATHS[1::4]),
        ({"target_modules": ["q_proj"], "exclude_modules": r".*\.0\..*"}, PATHS[2::2]),
        ({"target_modules": ["q_proj"], "exclude_modules": ["0.self_attn.q_proj"]}, PATHS[2::2]),
        ({"target_modules": ["q_proj"], "layers_to_transform": 1}, PATHS[2:3]),
        ({"target_modules": ["q_proj"], "layers_to_transform": []}, PATHS[::2]),
        (
            {
                "target_modules": ["q_proj"],
                "layers_to_transform": [0, 2],
                "layers_pattern": ["h", "layers"],
            },
            PATHS[0::4],
        ),
        (
            {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "h"},
            [],
        ),
        (
            {
                "target_modules": ["q_proj"],
                "layers_to_transform": [1],
                "layers_pattern": "(h|layers)",
            },
            PATHS[2:3],
        ),
        (  # not even layer 1: what matches first says no number
            {
                "target_modules": ["q_proj"],
                "layers_to_transform": [1],
                "layers_pattern": ["model|h", "layers"],
            },
            [],
        ),
        ({"target_modules": []}, []),
        ({"target_modules": {"q_proj": 1}}, []),
    ],
)
def test_weights_are_of_what_is_named_and_of_nothing_else(
    config: dict[str, Any], chosen: list[str]
) -> None:
    targets = targets_of(config)
    assert [path for path in PATHS if path in targets] == chosen
    assert [path for path in PATHS if targets.requires(path)] == chosen


@pytest.mark.parametrize("names", [None, "all-linear", "All-Linear"])
def test_what_is_left_to_peft_may_be_all_but_what_is_excluded(names: str | None) -> None:
    targets = targets_of({"target_modules": names, "exclude_modules": ["q_proj"]})
    assert [path for path in PATHS if path in targets] == PATHS[1::2]
    assert not any(targets.requires(path) for path in PATHS)


def test_an_error_can_say_what_chooses() -> None:
    targets = targets_of({"target_modules": ["q_proj"], "layers_to_transform": 1, "r": 4})
    assert str(targets) == "target_modules=['q_proj'], layers_to_transform=1"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ENDLESS},
        {"exclude_modules": ENDLESS},
        {"layers_pattern": ["layers", ENDLESS]},
        {"rank_pattern": {"q_proj": 4, ENDLESS: 4}},
        {"alpha_pattern": {"v_proj": 8, ENDLESS: 8}},
    ],
)
def test_an_expression_that_backtracks_for_ever_is_ended_and_named(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expressions, "LIMIT_S", 0.1)
    (field,) = config
    with pytest.raises(ValueError, match=rf"{field} '\(\(.*!' takes longer than 0.1 s .*list the"):
        Expressions(config, PATHS)


def test_a_rank_for_each_layer_of_a_large_model_is_in_time() -> None:
    paths = [f"model.layers.{i}.mlp.{name}_proj" for i in range(80) for name in "qkvogud"]
    found = Expressions({"rank_pattern": dict.fromkeys(paths, 4)}, paths)
    assert all(found.found("rank_pattern", path) == {path: None} for path in paths)
