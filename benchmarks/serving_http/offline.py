"""FlexInfer's offline engine behind a pipe: a JSON line of prompts in, a JSON line of answers out.

python benchmarks/serving_http/offline.py MODEL DTYPE MAX_MODEL_LEN MAX_NUM_SEQS KV_BYTES
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    model, dtype, max_model_len, max_num_seqs, kv_bytes = sys.argv[1:]
    from flexinfer import LLM, SamplingParams

    llm = LLM(
        model,
        dtype=dtype,
        max_model_len=int(max_model_len),
        max_num_seqs=int(max_num_seqs),
        kv_cache_memory_bytes=int(kv_bytes),
    )
    for line in sys.stdin:
        asked = json.loads(line)
        params = SamplingParams(temperature=0.0, max_tokens=asked["num_new"], ignore_eos=True)
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        start_s = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start_s
        found = [output.outputs[0] for output in outputs]
        answer = {
            "seconds": seconds,
            "num_new_tokens": sum(len(one.token_ids) for one in found),
            "texts": [one.text for one in found],
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
