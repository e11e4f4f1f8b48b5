"""Adapters of an engine: loading and removing, the KV that each has for itself, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file

from flexinfer import LLM, LoRARequest, RequestError, SamplingParams, UnsupportedModelError
from flexinfer.config import EngineConfig
from flexinfer.layers.linear import Linear
from flexinfer.lora.peft_folder import WEIGHTS, PeftFolder
from helpers.engine_kit import drain, make_engine
from helpers.lora_kit import merged_reference, save_adapter
from helpers.tiny_models import make_model, random_prompts

PROMPT = random_prompts((40,))[0]
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
PARAMS = SamplingParams(temperature=0, max_tokens=6)


def adapter(folder: Path, number: int = 1, **settings: Any) -> LoRARequest:
    return LoRARequest(folder.name, number, str(save_adapter(folder, **settings)))


def answer(engine: Any, lora: LoRARequest | None, **prompt: Any) -> Any:
    engine.add_request("a", {"prompt_token_ids": PROMPT, **prompt}, PARAMS, lora_request=lora)
    return drain(engine)["a"]


def test_kv_is_shared_with_requests_of_the_same_adapter_alone(tmp_path: Path) -> None:
    first, second = adapter(tmp_path / "a"), adapter(tmp_path / "b", 2, seed=2)
    engine = make_engine(enable_lora=True)
    for lora in (None, first, second):
        assert answer(engine, lora).num_cached_tokens == 0
    for lora in (None, first, second):
        output = answer(engine, lora)
        assert output.num_cached_tokens == len(PROMPT) - 1
        assert output.lora_request == lora
    engine.close()


def test_a_copy_of_an_adapter_shares_its_kv_and_another_under_its_name_does_not(
    tmp_path: Path,
) -> None:
    engine = make_engine(enable_lora=True)
    answer(engine, adapter(tmp_path / "a"))
    assert answer(engine, adapter(tmp_path / "copy", 2)).num_cached_tokens == len(PROMPT) - 1
    assert engine.remove_lora(1)
    changed = adapter(tmp_path / "a", 1, seed=5)
    output = answer(engine, changed)
    assert output.num_cached_tokens == 0
    expected = merged_reference("llama", Path(changed.lora_path), PROMPT, 6)
    assert output.outputs[0].token_ids == expected
    engine.close()


def test_a_digest_is_of_the_weights_that_are_used_when_the_file_is_replaced_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora, before = adapter(tmp_path / "a"), adapter(tmp_path / "before")
    adapter(tmp_path / "after", seed=5)
    engine = make_engine(enable_lora=True)
    expected = engine.adapters.read(before)
    opened = Path.open

    def replaced(path: Path, *given: Any, **named: Any) -> Any:
        file = opened(path, *given, **named)
        if path == tmp_path / "a" / WEIGHTS and (tmp_path / "after" / WEIGHTS).exists():
            (tmp_path / "after" / WEIGHTS).rename(path)
        return file

    monkeypatch.setattr(Path, "open", replaced)
    found = engine.adapters.read(lora)
    assert not (tmp_path / "after" / WEIGHTS).exists()
    assert found.digest == expected.digest
    parts = [[update.a for _, update in read.updates] for read in (found, expected)]
    assert all(map(torch.equal, *parts))
    engine.close()


def test_weights_that_are_no_longer_what_was_checked_are_refused(tmp_path: Path) -> None:
    lora = adapter(tmp_path / "a")
    engine = make_engine(enable_lora=True)
    folder = PeftFolder("a", lora.lora_path, engine.adapters._places, max_rank=16)
    adapter(tmp_path / "a", rank=2)
    with pytest.raises(RequestError, match="has changed while it was read: ask again"):
        folder.read()
    (tmp_path / "a" / WEIGHTS).write_bytes(b"")
    with pytest.raises(RequestError, match="safetensors cannot be read"):
        folder.read()
    (tmp_path / "a" / WEIGHTS).unlink()
    with pytest.raises(RequestError, match="safetensors cannot be read"):
        folder.read()
    engine.close()


def test_a_callers_salt_reaches_no_adapters_kv(tmp_path: Path) -> None:
    engine = make_engine(enable_lora=True)
    lora = adapter(tmp_path / "a")
    answer(engine, lora)
    salt = engine.kv_salt("", lora)
    with pytest.raises(RequestError, match="begins as those of LoRA"):
        answer(engine, None, cache_salt=salt)
    assert answer(engine, lora, cache_salt="mine").num_cached_tokens == 0
    engine.close()


def test_conversations_keep_the_kv_of_their_adapter(tmp_path: Path) -> None:
    with LLM(
        make_model("llama"),
        skip_tokenizer_init=True,
        enable_lora=True,
        kv_cache_memory_bytes=4 << 20,
    ) as llm:
        with llm.conversation(PROMPT, lora_request=adapter(tmp_path / "a")) as chat:
            said = chat.generate(PARAMS).outputs[0].token_ids
            assert said == merged_reference("llama", tmp_path / "a", PROMPT, 6)
            with chat.fork() as other:
                other.append([3, 4])
                assert other.generate(PARAMS).num_cached_tokens == len(PROMPT) + 5
        with llm.conversation(PROMPT) as plain:
            assert plain.generate(PARAMS).num_cached_tokens == 0


def test_a_removed_adapter_serves_those_that_have_chosen_it(tmp_path: Path) -> None:
    engine = make_engine(enable_lora=True)
    lora = adapter(tmp_path / "a")
    engine.add_request("a", PROMPT, PARAMS, lora_request=lora)
    engine.step()
    assert engine.remove_lora(1)
    assert not engine.remove_lora(1)
    assert engine.list_loras() == set()
    expected = merged_reference("llama", tmp_path / "a", PROMPT, 6)
    assert drain(engine)["a"].outputs[0].token_ids == expected
    assert not any(place.adapters.updates for place in places_of(engine))
    engine.close()


def places_of(engine: Any) -> list[Any]:
    places = engine.adapters._places
    return [places[path] for path in places]


def test_at_most_max_loras_adapters_run_together(tmp_path: Path) -> None:
    engine = make_engine(enable_lora=True, max_loras=2, max_num_seqs=8)
    for i in range(8):
        lora = adapter(tmp_path / str(i % 4), 1 + i % 4, seed=i % 4) if i < 7 else None
        engine.add_request(str(i), PROMPT, PARAMS, lora_request=lora)
    most = 0
    while engine.has_unfinished_requests():
        engine.step()
        running = [request.adapter for request in engine.scheduler.running.values()]
        most = max(most, len(set(running) - {0}))
    assert most == 2
    engine.close()


def test_a_closed_engine_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = make_model("llama")
    engine = make_engine(enable_lora=True)
    answer(engine, adapter(tmp_path / "a"))
    engine.close()
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_rows_without_an_adapter_keep_their_bits(quantization: str | None, tmp_path: Path) -> None:
    from flexinfer.layers.adapters import AdapterSpan, StepAdapters, use_adapters

    folder = tmp_path / "model"
    make_model("llama").save_pretrained(folder)
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        enable_lora=True,
        quantization=quantization,
        kv_cache_memory_bytes=1 << 20,
    )
    lora = llm.llm_engine.adapters.add(adapter(tmp_path / "a"))
    layer = llm.llm_engine.loaded.model.model.layers[0]
    x = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(0))
    for linear in (layer.self_attn.qkv_proj, layer.mlp.gate_up_proj):
        assert isinstance(linear, Linear)
        gates = linear is layer.mlp.gate_up_proj
        plain = linear(x, gates=gates)
        with use_adapters(StepAdapters(9, (AdapterSpan(lora.number, 2, 5),))):
            adapted = linear(x, gates=gates)
        if not gates:
            added = (adapted - plain)[0, 2:5]
            torch.testing.assert_close(added, updates(lora, x)[0, 2:5], rtol=1e-3, atol=1e-4)
        same = [bool((adapted[0, row] == plain[0, row]).all()) for row in range(9)]
        assert same == [row not in (2, 3, 4) for row in range(9)]
    llm.close()


def updates(lora: Any, x: Any) -> Any:
    """What the adapter adds to queries, keys and values of layer 0; its scaling is 2."""
    tensors = load_file(Path(lora.request.lora_path) / "adapter_model.safetensors")
    names = [Q.replace("q_proj", f"{name}_proj") for name in "qkv"]
    pairs = [(tensors[f"{name}A.weight"], tensors[f"{name}B.weight"]) for name in names]
    return torch.cat([2 * x @ a.t() @ b.t() for a, b in pairs], dim=-1)


# Refusals.


def refused(tmp_path: Path, match: str, change: Any = None, **config: Any) -> None:
    """The adapter is refused before any work. change: of its tensors."""
    folder = save_adapter(tmp_path / "bad", **config)
    if change is not None:
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")
    engine = make_engine(enable_lora=True)
    try:
        with pytest.raises(RequestError, match=match):
            answer(engine, LoRARequest("bad", 1, str(folder)))
        assert not engine.has_unfinished_requests()
        assert engine.list_loras() == set()
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("match", "config"),
    [
        ("use_dora: not supported", {"use_dora": True}),
        ("modules_to_save: not supported", {"modules_to_save": ["lm_head"]}),
        ("bias='all': biases", {"bias": "all"}),
        ("lora_bias: not supported", {"lora_bias": True}),
        ("peft_type 'IA3'", {"peft_type": "IA3"}),
        ("task_type 'SEQ_CLS'", {"task_type": "SEQ_CLS"}),
        ("init_lora_weights='pissa'", {"init_lora_weights": "pissa"}),
        ("target_parameters: not supported", {"target_parameters": ["mlp.experts.gate_up_proj"]}),
        ("some_novelty: not supported", {"some_novelty": 1}),
        ("r must be a positive number, got 0", {"r": 0}),
        ("lora_alpha must be a positive number, got inf", {"lora_alpha": float("inf")}),
        ("lora_alpha must be a positive number, got 1000", {"lora_alpha": 10**400}),
        (r"alpha_pattern must be a mapping, got \['q_proj'\]", {"alpha_pattern": ["q_proj"]}),
        ("alpha_pattern of 'q_proj' must be a positive", {"alpha_pattern": {"q_proj": "8"}}),
        (r"alpha_pattern '\(q': missing \)", {"alpha_pattern": {"(q": 8}}),
        (r"rank_pattern must be a mapping, got \['q_proj'\]", {"rank_pattern": ["q_proj"]}),
        (r"rank_pattern '\(q': missing \)", {"rank_pattern": {"(q": 4}}),
        ("rank 4 in model.layers.0.mlp.down_proj, and 8 by its", {"r": 8}),
        ("rank 4 in model.layers.0.self_attn.v_proj, and 2.0 by", {"rank_pattern": {"v_proj": 2}}),
        ("has rank 32, and max_lora_rank is 16", {"rank": 32}),
        ("adapts lm_head", {"targets": ("lm_head",)}),
        ("adapts model.embed_tokens", {"targets": ("embed_tokens",)}),
        ("incomplete: .*layers.0.self_attn.q_proj", {"targets": ("v_proj",),
                                                     "target_modules": ["q_proj", "v_proj"]}),
        ("incomplete: .*layers.0.self_attn.q_proj", {"targets": ("v_proj",),
                                                     "target_modules": r".*\.[qv]_proj"}),
        ("incomplete: .*layers.2.self_attn.q_proj", {"targets": ("v_proj",),
                                                     "target_modules": ["q_proj", "v_proj"],
                                                     "layers_to_transform": [2]}),
        ("incomplete: .*layers.1.self_attn.k_proj", {"targets": ("v_proj",),
                                                     "target_modules": ["k_proj", "v_proj"],
                                                     "exclude_modules": r".*\.0\..*"}),
        (r"target_modules '\(q': missing \)", {"target_modules": "(q"}),
        ("target_modules 'a{9+}': the repetition number is too large",
         {"target_modules": "a{99999999999}"}),
        (r"rank_pattern '\(\?i\)q': global flags not at the", {"rank_pattern": {"(?i)q": 4}}),
        (r"layers_pattern '\(': missing \)", {"layers_to_transform": [0], "layers_pattern": "("}),
        ("layers_pattern must be an expression or a list of .*, got 5", {"layers_pattern": 5}),
        (r"weights of model.layers.0.self_attn.v_proj and 3 other layers, which its adapter_config."
         r"json does not choose \(target_modules=\['q_proj'\]\)", {"targets": ("q_proj", "v_proj"),
                                                              "target_modules": ["q_proj"]}),
        (r"v_proj and 3 .*target_modules='.*q_proj'", {"targets": ("q_proj", "v_proj"),
                                                      "target_modules": ".*q_proj"}),
        (r"v_proj, .*target_modules=\['v_proj'\], exclude_modules=\['layers.2.self_attn.v_proj'\]",
         {"targets": ("v_proj",), "exclude_modules": ["layers.2.self_attn.v_proj"]}),
        (r"v_proj, .*layers_to_transform=\[0, 1, 3\]", {"targets": ("v_proj",),
                                                      "layers_to_transform": [0, 1, 3]}),
        ("v_proj and 3 .*target_modules=5", {"targets": ("v_proj",), "target_modules": 5}),
        ("for another model .*the model has no transformer.h.0.attn", {"model_name": "gpt2",
                                                                "targets": ("c_attn",)}),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(
    match: str, config: dict[str, Any], tmp_path: Path
) -> None:
    refused(tmp_path, match, **config)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    refused(
        tmp_path,
        "is for another model .*has 32 inputs and 64 outputs in it, and 64 and 64",
        lambda t: t.update({f"{Q}A.weight": torch.zeros(4, 32)}),
    )
    refused(tmp_path, "do not fit", lambda t: t.pop(f"{Q}B.weight"))
    magnitude = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"
    refused(tmp_path, magnitude, lambda t: t.update({magnitude: torch.zeros(64)}))


@pytest.mark.parametrize(
    ("which", "value", "alpha"), [("A", float("nan"), 8), ("B", float("inf"), 8), ("B", 1.0, 1e300)]
)
def test_weights_that_are_no_finite_numbers_are_refused(
    which: str, value: float, alpha: float, tmp_path: Path
) -> None:
    refused(
        tmp_path,
        "that are no finite numbers in the model's float32",
        lambda tensors: tensors[f"{Q}{which}.weight"].fill_(value),
        lora_alpha=alpha,
    )


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.int8, "I8"), (torch.bool, "BOOL"), (torch.complex64, "C64")]
)
def test_weights_that_are_no_floating_point_numbers_are_refused(
    dtype: torch.dtype, name: str, tmp_path: Path
) -> None:
    tensor = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[tensor] = (tensors[tensor] * 8).to(dtype)

    refused(tmp_path, rf"{tensor} is {name}; known: BF16", change)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn])
def test_weights_of_other_floating_point_dtypes_are_served(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    lora = adapter(tmp_path / "a")
    weights = Path(lora.lora_path) / "adapter_model.safetensors"
    save_file({name: part.to(dtype) for name, part in load_file(weights).items()}, weights)
    engine = make_engine(enable_lora=True)
    assert answer(engine, lora).outputs[0].token_ids != answer(engine, None).outputs[0].token_ids
    engine.close()


def test_folders_that_are_no_adapters_are_refused(tmp_path: Path) -> None:
    engine = make_engine(enable_lora=True)
    for make, match in (
        (lambda folder: None, "no such folder"),
        (lambda folder: folder.mkdir(), "has no file adapter_model.safetensors"),
        (lambda folder: (folder / "adapter_model.bin").touch(), "save the adapter with safe"),
        (lambda folder: (folder / "adapter_model.safetensors").touch(), "has no file adapter_con"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), "is not a mapping"),
        (lambda folder: (folder / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4})), "cannot be read"),
        (lambda folder: (folder / "adapter_model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1"), "cannot be read: it is a git-LFS"),
        (lambda folder: (folder / "adapter_config.json").write_text("[" * 200_000),
         "adapter_config.json cannot be read"),
    ):  # fmt: skip
        make(tmp_path / "folder")
        with pytest.raises(RequestError, match=match):
            engine.add_lora(LoRARequest("a", 1, str(tmp_path / "folder")))
    with pytest.raises(RequestError, match="File name too long"):
        engine.add_lora(LoRARequest("a", 1, str(tmp_path / ("a" * 5000))))
    engine.close()


def test_a_scaling_that_is_neither_on_nor_off_is_refused(tmp_path: Path) -> None:
    """The text "false" switched it on."""
    refused(tmp_path, "use_rslora must be true or false, got 'false'", use_rslora="false")


def test_an_id_belongs_to_one_adapter(tmp_path: Path) -> None:
    engine = make_engine(enable_lora=True)
    assert engine.add_lora(adapter(tmp_path / "a"))
    with pytest.raises(RequestError, match="lora_int_id 1 is the adapter 'a'"):
        engine.add_lora(adapter(tmp_path / "b"))
    engine.close()
    with pytest.raises(ValueError, match="lora_int_id must be a positive"):
        LoRARequest("a", 0, "a")
    with pytest.raises(ValueError, match="lora_path must be a string that is not empty"):
        LoRARequest("a", 1, "")


def test_settings_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match="set enable_lora=True"):
        answer(engine, adapter(tmp_path / "a"))
    engine.close()
    with pytest.raises(ValueError, match="enable_lora does not go with compile"):
        make_engine(enable_lora=True, compile=True)
    with pytest.raises(ValueError, match="enable_lora does not go with tensor_parallel_size"):
        EngineConfig("m", enable_lora=True, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="max_loras must be a positive"):
        EngineConfig("m", max_loras=0)


def test_models_with_a_state_are_refused() -> None:
    from helpers.hybrids import make_hybrid

    with pytest.raises(UnsupportedModelError, match="enable_lora does not go with"):
        make_engine(enable_lora=True, model=make_hybrid("bamba"))
