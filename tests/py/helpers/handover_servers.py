"""Servers that prefill and that decode, and what one server alone would say."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from flexinfer import LLM, SamplingParams
from flexinfer.async_llm import AsyncLLM
from flexinfer.server.handover.partner import PrefillPartner

GREEDY = SamplingParams(temperature=0, max_tokens=8)
TIMEOUT_S = 60.0


def prompt_of(number: int, length: int = 120) -> list[int]:
    """Unlike the others from its first token on."""
    return [3 + (number * 131 + i * i * 7) % 1000 for i in range(length)]


def expected(single: LLM, prompt: list[int]) -> list[int]:
    (output,) = single.generate([prompt], GREEDY, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def complete(url: str, prompt: list[int], **more: Any) -> httpx.Response:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 8, "return_token_ids": True, **more}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def metric(url: str, name: str, label: str = "") -> float:
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    (line,) = [x for x in lines if x.startswith(f"flexinfer:handover_{name}_total") and label in x]
    return float(line.rpartition(" ")[2])


def run_with(partner: PrefillPartner, llm: AsyncLLM, *prompts: list[int]) -> list[list[int]]:
    """Greedy tokens of a decoding server for each prompt, one after the other."""

    async def run() -> list[list[int]]:
        found = []
        for number, prompt in enumerate(prompts):
            async with partner.prefilled({"prompt_token_ids": prompt}, f"r{number}"):
                outputs = llm.generate(prompt, GREEDY)
                final = [output async for output in outputs][-1]
                found.append(list(final.outputs[0].token_ids))
        return found

    try:
        return asyncio.run(run())
    finally:
        partner.close()
