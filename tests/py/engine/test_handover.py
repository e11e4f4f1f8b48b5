"""Engines that hand their KV over: what one has prefilled, another decodes, and says the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import BeamSearchParams, LLMEngine, SamplingParams
from flexinfer.attention.kv_format import KVFormat
from flexinfer.config import EngineConfig
from flexinfer.engine.handover import EngineHandover
from flexinfer.errors import HandoverError, OutOfMemoryError
from flexinfer.handover.parcels import Delivery, Identity
from helpers.engine_kit import GREEDY, NUM_NEW, drain, make_engine
from helpers.hybrids import HYBRIDS, continuation, make_hybrid
from helpers.tiny_models import random_prompts, reference

PREFILL = SamplingParams(temperature=0, max_tokens=1)
(PROMPT,) = random_prompts((50,))


@contextmanager
def engines(model: Any = "llama", **settings: Any) -> Iterator[tuple[LLMEngine, LLMEngine]]:
    """One that prefills and one that decodes; nothing is left in either at the end."""
    made = [make_engine(model, role=role, **settings) for role in ("prefill", "decode")]
    yield made[0], made[1]
    for engine in made:
        engine.manager.check_integrity()
        assert engine.manager.stats().num_vtensors == 0
        engine.close()


def prefill(engine: LLMEngine, prompt: list[int], request_id: str = "p", **more: Any) -> Delivery:
    """All of it, whose KV is computed: the token that follows is left to the receiver."""
    engine.add_request(request_id, {"prompt_token_ids": prompt, **more}, PREFILL)
    drain(engine)
    delivery = engine.handover.export({"prompt_token_ids": prompt, **more})
    engine.handover.let_go(request_id)
    assert delivery is not None
    return delivery


def decode(engine: LLMEngine, prompt: list[int], params: Any = GREEDY) -> Any:
    engine.add_request("d", prompt, params)
    return drain(engine)["d"]


@pytest.mark.parametrize("model", ["llama", "gemma3", "mistral"])
def test_tokens_are_those_of_one_engine_and_nothing_is_computed_or_copied_twice(
    model: str,
) -> None:
    with engines(model) as (sender, receiver):
        delivery = prefill(sender, PROMPT[:-1])
        if model == "llama":  # with windows, what they left may be recorded, in the same file
            assert delivery.parcel.num_copied == 0
        assert receiver.handover.adopt(delivery, "d") == len(PROMPT) - 1
        output = decode(receiver, PROMPT)
        receiver.handover.let_go("d")
        assert output.outputs[0].token_ids == reference(model, tuple(PROMPT), NUM_NEW)
        assert output.num_cached_tokens == len(PROMPT) - 1
        assert receiver.step_totals.num_prefill_tokens == 1  # the last one's logits are needed
        assert receiver.manager.stats().chunks_copied == 0


def test_samples_and_beams_go_on_from_what_was_adopted() -> None:
    for params in (
        SamplingParams(n=3, seed=5, max_tokens=6),
        BeamSearchParams(beam_width=3, max_tokens=6),
    ):
        with engines() as (sender, receiver), engines() as (alone, _):
            receiver.handover.adopt(prefill(sender, PROMPT[:-1]))
            found, expected = decode(receiver, PROMPT, params), decode(alone, PROMPT, params)
            assert found.num_cached_tokens == len(PROMPT) - 1
            assert [o.token_ids for o in found.outputs] == [o.token_ids for o in expected.outputs]


def test_quantised_kv_is_handed_over_to_its_own_kind_alone() -> None:
    with engines(kv_cache_dtype="int8") as (sender, receiver):
        receiver.handover.adopt(prefill(sender, PROMPT[:-1]))
        assert decode(receiver, PROMPT).num_cached_tokens == len(PROMPT) - 1
    with engines(kv_cache_dtype="int8") as (sender, _), engines() as (_, receiver):
        with pytest.raises(HandoverError, match="the parcel's model"):
            receiver.handover.adopt(prefill(sender, PROMPT[:-1]))
        assert receiver.manager.stats().chunks_received == 0


def test_keys_of_code_that_did_not_rotate_them_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the same version, as processes are that were started before and after an update."""
    with engines(kv_cache_dtype="int8") as (sender, receiver):
        with monkeypatch.context() as older:
            older.setattr(KVFormat, "rotates_keys", False)
            delivery = prefill(sender, PROMPT[:-1])
        with pytest.raises(HandoverError, match="the parcel's model"):
            receiver.handover.adopt(delivery)
        assert receiver.manager.stats().chunks_received == 0


def test_tenants_do_not_find_each_others_parcels() -> None:
    with engines() as (sender, receiver):
        receiver.handover.adopt(prefill(sender, PROMPT[:-1], cache_salt="theirs"))
        assert decode(receiver, PROMPT).num_cached_tokens == 0


def test_what_waits_to_be_exported_or_found_is_kept_until_it_is_let_go() -> None:
    other = [token + 1 for token in PROMPT]
    with engines(prefix_cache_memory=0) as (sender, receiver):
        sender.add_request("p", PROMPT, PREFILL)
        drain(sender)
        sender.add_request("q", other, PREFILL)
        drain(sender)
        delivery = sender.handover.export(PROMPT)
        assert delivery is not None
        assert delivery.parcel.num_tokens == len(PROMPT)
        receiver.handover.adopt(delivery, "d")
        decode(receiver, other)
        assert receiver.manager.match_prefix(PROMPT) == len(PROMPT)
        for engine, request_id in ((sender, "p"), (receiver, "d")):
            assert len(engine.scheduler.pins) > 0
            engine.handover.let_go(request_id)
            engine.handover.let_go("q")
            assert len(engine.scheduler.pins) == 0


def test_running_requests_keep_the_memory_that_they_need() -> None:
    first, second = random_prompts((90, 100))
    with engines(kv_cache_memory_bytes=128 << 10) as (sender, receiver):
        delivery = prefill(sender, first)
        receiver.add_request("busy", second, GREEDY)
        receiver.step()
        with pytest.raises(OutOfMemoryError, match="no room beside the requests that run"):
            receiver.handover.adopt(delivery)
        drain(receiver)
        receiver.handover.adopt(delivery)


def test_all_slots_may_be_taken_while_a_parcel_comes() -> None:
    with engines(max_num_seqs=1) as (sender, receiver):
        delivery = prefill(sender, PROMPT[:-1])
        receiver.add_request("busy", PROMPT[:5], GREEDY)
        receiver.step()
        assert receiver.handover.adopt(delivery) == len(PROMPT) - 1
        drain(receiver)


def test_another_tokenizer_or_other_weights_are_another_identity() -> None:
    engine, other = make_engine(), make_engine("qwen2")
    parts = engine.handover._parts

    def identity(**vocab: int) -> Identity:
        tokenizer = SimpleNamespace(get_vocab=lambda: vocab)
        return EngineHandover(replace(parts, tokenizer=tokenizer)).identity

    assert identity(a=0, b=1) == identity(b=1, a=0)
    assert identity(a=0, b=1).tokenizer != identity(a=1, b=0).tokenizer
    assert identity(a=0, b=1).model == engine.handover.identity.model
    assert other.handover.identity.model != engine.handover.identity.model
    engine.close()
    other.close()


def test_an_engine_without_a_role_hands_over_by_copies() -> None:
    engine = make_engine()
    try:
        assert engine.handover.export(PROMPT) is None
        engine.add_request("p", PROMPT, PREFILL)
        drain(engine)
        delivery = engine.handover.export(PROMPT)
        assert delivery is not None
        assert delivery.parcel.num_copied == delivery.parcel.num_chunks
        delivery.close()
        engine.sleep()
        with pytest.raises(HandoverError, match="it sleeps"):
            engine.handover.export(PROMPT)
    finally:
        engine.close()


def test_a_parcel_with_tokens_that_nobody_has_is_refused() -> None:
    with engines() as (sender, receiver):
        good = prefill(sender, PROMPT[:-1])
        bad = Delivery(good.identity, [*good.tokens[:-1], 1 << 40], "", good.parcel)
        with pytest.raises(HandoverError, match="tokens that are not in"):
            receiver.handover.adopt(bad)
        good.close()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"role": "decoder"}, "role must be one of 'both', 'prefill', 'decode', got 'decoder'"),
        ({"role": "decode", "enable_prefix_caching": False}, "needs enable_prefix_caching"),
        ({"role": "prefill", "tensor_parallel_size": 2}, "does not go with tensor_parallel_size"),
        ({"role": "prefill", "enable_lora": True}, "enable_lora does not go with role 'prefill'"),
        (
            {"role": "prefill", "speculative_config": '{"method": "ngram"}'},
            "speculative_config does not go with role 'prefill'",
        ),
    ],
)
def test_what_a_role_does_not_go_with_is_refused_before_any_work(
    settings: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        EngineConfig("nowhere", **settings)


def test_a_role_on_a_device_whose_memory_stays_there_is_refused() -> None:
    from flexinfer.handover.roles import check_device

    with pytest.raises(ValueError, match="hand over memory of the CPU only"):
        check_device("decode", "cuda:0")
    check_device("both", "cuda:0")


@contextmanager
def hybrids(name: str, **settings: Any) -> Iterator[tuple[LLMEngine, LLMEngine]]:
    given = {"max_num_batched_tokens": 32, "state_snapshot_tokens": 16, **settings}
    with engines(make_hybrid(name), **given) as (sender, receiver):
        yield sender, receiver


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_recurrent_state_goes_along_and_nothing_is_copied(name: str) -> None:
    with hybrids(name) as (sender, receiver):
        delivery = prefill(sender, PROMPT[:-1])
        assert delivery.state is not None
        assert delivery.num_copied == 0
        assert receiver.handover.adopt(delivery, "d") == len(PROMPT) - 1
        for first_token in (PROMPT[-1], 7):  # a snapshot is read by many, and written by nobody
            prompt = [*PROMPT[:-1], first_token]
            output = decode(receiver, prompt)
            assert output.outputs[0].token_ids == continuation(name, tuple(prompt), NUM_NEW)
            assert output.num_cached_tokens == len(PROMPT) - 1
        assert receiver.step_totals.num_prefill_tokens == 2
        receiver.handover.let_go("d")


def test_a_state_that_lies_in_the_pool_is_one_counted_copy() -> None:
    engine = make_engine(make_hybrid("bamba"), max_num_batched_tokens=32)
    with hybrids("bamba") as (_, receiver):
        engine.add_request("p", PROMPT[:-1], PREFILL)
        drain(engine)
        delivery = engine.handover.export(PROMPT[:-1])
        assert delivery is not None
        assert delivery.num_copied == delivery.num_chunks
        receiver.handover.adopt(delivery)
        found = decode(receiver, PROMPT)
        assert found.outputs[0].token_ids == continuation("bamba", tuple(PROMPT), NUM_NEW)
    engine.close()


def test_what_is_kept_to_be_found_is_kept_with_its_state() -> None:
    """Other prompts, as many as the memory holds, evict neither at either end."""
    others = random_prompts((60,) * 12, seed=3)
    with hybrids("bamba", kv_cache_memory_bytes=1 << 20) as (sender, receiver):
        sender.add_request("p", PROMPT[:-1], PREFILL)
        drain(sender)
        for number, other in enumerate(others):
            sender.add_request(str(number), other, PREFILL)
            drain(sender)
            sender.handover.let_go(str(number))
        assert sender.manager.stats().chunks_evicted > 0
        delivery = sender.handover.export(PROMPT[:-1])
        assert delivery is not None
        receiver.handover.adopt(delivery, "d")
        for other in others:
            decode(receiver, other)
        assert receiver.manager.stats().chunks_evicted > 0
        assert decode(receiver, PROMPT).num_cached_tokens == len(PROMPT) - 1


def test_kv_whose_state_is_gone_is_not_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with hybrids("bamba") as (sender, _):
        prefill(sender, PROMPT[:-1]).close()
        assert sender.handover.num_usable(PROMPT[:40], "") == 32  # the last snapshot below
        delivery = sender.handover.export(PROMPT[:40])
        assert delivery is not None
        assert delivery.parcel.num_tokens == 32
        delivery.close()
        assert sender.handover.export(PROMPT[:15]) is None
        assert sender.handover.recorded(PROMPT[:15]) is None
        monkeypatch.setattr(sender.handover, "num_usable", lambda *_: 40)  # evicted meanwhile
        assert sender.handover.export(PROMPT[:40]) is None


def test_a_parcel_without_its_state_is_refused() -> None:
    with hybrids("bamba") as (sender, receiver):
        good = prefill(sender, PROMPT[:-1])
        bad = Delivery(good.identity, good.tokens, "", good.parcel)
        with pytest.raises(HandoverError, match="recurrent state is not this model's"):
            receiver.handover.adopt(bad)
        assert receiver.manager.stats().chunks_received == 0
        good.close()
