"""lm-eval's local-completions runs a local task against the server: likelihoods and generation.

Its dependencies are heavy (pandas, pyarrow, scikit-learn): `pip install 'flexinfer[eval]'`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
lm_eval = pytest.importorskip("lm_eval")

from flexinfer import LLM, SamplingParams
from flexinfer.cli.settings import SHIPPED_MODEL
from helpers.serving import MODEL, ServerProcess

QUESTIONS = [
    {"question": "Hello", "choices": [" there", " qqq zz"], "answer": 0},
    {"question": "The cat sat on the", "choices": [" xyz", " mat"], "answer": 1},
]


def run(server: ServerProcess, folder: Path, task: str, config: str) -> list[dict]:  # type: ignore[type-arg]
    """The samples of a task over `QUESTIONS`."""
    from lm_eval.tasks import TaskManager

    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    (folder / f"{task}.yaml").write_text(
        f"task: {task}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\n"
        f"test_split: test\ndoc_to_text: '{{{{question}}}}'\n{config}"
    )
    arguments = (
        f"model={MODEL},base_url={server.url}/v1/completions,tokenizer={SHIPPED_MODEL},"
        "tokenizer_backend=huggingface,num_concurrent=2,max_retries=1,max_length=2048"
    )
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=[task],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    samples: list[dict] = found["samples"][task]  # type: ignore[type-arg]
    return sorted(samples, key=lambda sample: sample["doc_id"])


def test_likelihoods_are_those_of_the_offline_engine(
    server: ServerProcess, offline: LLM, tmp_path: Path
) -> None:
    config = (
        "output_type: multiple_choice\ndoc_to_choice: '{{choices}}'\ndoc_to_target: answer\n"
        "target_delimiter: ''\nmetric_list:\n  - metric: acc\n"
    )
    tokenizer = offline.get_tokenizer()
    for sample, doc in zip(run(server, tmp_path, "choose", config), QUESTIONS, strict=True):
        for (likelihood, _), choice in zip(sample["filtered_resps"], doc["choices"], strict=True):
            context = tokenizer(doc["question"]).input_ids
            whole = tokenizer(f"{doc['question']}{choice}").input_ids
            params = SamplingParams(max_tokens=1, prompt_logprobs=0)
            (output,) = offline.generate([whole], params, use_tqdm=False)
            scored = zip(whole, output.prompt_logprobs or (), strict=True)
            expected = [entry[token].logprob for token, entry in scored if entry]
            assert math.isclose(
                likelihood, sum(expected[len(context) - 1 :]), rel_tol=1e-3, abs_tol=1e-3
            )


def test_generation_is_that_of_the_offline_engine(
    server: ServerProcess, offline: LLM, tmp_path: Path
) -> None:
    config = (
        "output_type: generate_until\ndoc_to_target: ''\ngeneration_kwargs:\n"
        "  until: ['<|end|>']\n  max_gen_toks: 8\n  temperature: 0.0\n"
        "metric_list:\n  - metric: exact_match\n"
    )
    params = SamplingParams(temperature=0, max_tokens=8)
    for sample, doc in zip(run(server, tmp_path, "go_on", config), QUESTIONS, strict=True):
        (output,) = offline.generate([doc["question"]], params, use_tqdm=False)
        assert sample["resps"][0][0] == output.outputs[0].text
