"""Which layers an adapter_config.json chooses."""

from __future__ import annotations

from typing import Any

import pytest

from flexinfer.lora.targets import Targets

PATHS = [f"model.layers.{i}.self_attn.{name}_proj" for i in range(3) for name in "qv"]


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
        ({"target_modules": []}, []),
        ({"target_modules": {"q_proj": 1}}, []),
    ],
)
def test_weights_are_of_what_is_named_and_of_nothing_else(
    config: dict[str, Any], chosen: list[str]
) -> None:
    targets = Targets(config)
    assert [path for path in PATHS if path in targets] == chosen
    assert [path for path in PATHS if targets.requires(path)] == chosen


@pytest.mark.parametrize("names", [None, "all-linear", "All-Linear"])
def test_what_is_left_to_peft_may_be_all_but_what_is_excluded(names: str | None) -> None:
    targets = Targets({"target_modules": names, "exclude_modules": ["q_proj"]})
    assert [path for path in PATHS if path in targets] == PATHS[1::2]
    assert not any(targets.requires(path) for path in PATHS)


def test_an_error_can_say_what_chooses() -> None:
    targets = Targets({"target_modules": ["q_proj"], "layers_to_transform": 1, "r": 4})
    assert str(targets) == "target_modules=['q_proj'], layers_to_transform=1"
