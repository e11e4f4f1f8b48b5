"""Adapters that PEFT itself has made and saved get the tokens that PEFT itself gives."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

from flexinfer import LLM, LoRARequest, SamplingParams
from flexinfer.lora.expressions import Expressions
from flexinfer.lora.targets import Targets
from helpers.tiny_models import continue_prompt, make_model, random_prompts

pytestmark = pytest.mark.slow  # importing PEFT takes seconds

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"},
        {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": r".*\.(0|2)\..*_proj",
            "rank_pattern": {"down_proj": 2, "layers.0.self_attn.q_proj": 8},
            "alpha_pattern": {"mlp.*": 32},
            "init_lora_weights": "gaussian",
        },
        {"r": 4, "target_modules": ["k_proj", "up_proj"], "layers_to_transform": [1, 3]},
    ],
    "gpt2": [{"r": 4, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}],
}
CASES = [(name, i) for name, settings in SETTINGS.items() for i in range(len(settings))]


@pytest.mark.parametrize(("name", "index"), CASES)
def test_an_adapter_of_peft_gives_what_peft_gives(name: str, index: int, tmp_path: Path) -> None:
    torch.manual_seed(index)
    config = peft.LoraConfig(task_type="CAUSAL_LM", **SETTINGS[name][index])
    model = peft.get_peft_model(copy.deepcopy(make_model(name)), config)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "lora_B" in path:
                parameter.normal_(std=0.3)
    model.save_pretrained(tmp_path)
    prompts = random_prompts((1, 9, 33))
    llm = LLM(make_model(name), skip_tokenizer_init=True, enable_lora=True)
    outputs = llm.generate(
        prompts,
        SamplingParams(temperature=0, max_tokens=10),
        lora_request=LoRARequest("a", 1, str(tmp_path)),
        use_tqdm=False,
    )
    llm.close()
    answers = [output.outputs[0].token_ids for output in outputs]
    assert answers == [continue_prompt(model.eval(), tuple(p), 10) for p in prompts]
    plain = [continue_prompt(make_model(name), tuple(p), 10) for p in prompts]
    assert answers != plain


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": "all-linear"},
        {"target_modules": "all-linear", "exclude_modules": ["q_proj", "1.mlp.up_proj"]},
        {"target_modules": ["q_proj", "model.layers.1.mlp.up_proj"], "layers_to_transform": [0, 2]},
        {"target_modules": ["q_proj"], "layers_to_transform": 2, "layers_pattern": ["h", "layers"]},
        {
            "target_modules": ["v_proj"],
            "layers_to_transform": [1],
            "layers_pattern": "(h|layers)",
        },
        {"target_modules": r"model\.layers\.[13].*(up|down)_proj", "exclude_modules": ".*3.*up.*"},
    ],
)
def test_layers_are_chosen_as_peft_chooses_them(settings: dict[str, Any]) -> None:
    model = copy.deepcopy(make_model("llama"))
    linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    config = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    adapted = peft.get_peft_model(model, config).targeted_module_names
    targets = Targets(settings, Expressions(settings, linear))
    assert [path for path in linear if path in targets and path != "lm_head"] == adapted
