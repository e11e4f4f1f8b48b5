"""EngineHandover: KV that an engine gives to another process on this machine, and takes from one.

    sender                                          receiver
    engine.generate(prompt, max_tokens=1)
    delivery = engine.handover.export(prompt)  -->  engine.handover.adopt(delivery)
                                                    engine.generate(prompt): finds it recorded

What is handed over is a recorded prefix, so that all that requests may ask for goes on from it:
samples, beams, grammars, preemption. `export` may be called from any thread, the rest between two
steps.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flexinfer.distributed.messages import fingerprint, versions
from flexinfer.errors import HandoverError, OutOfMemoryError
from flexinfer.handover.parcels import Computed, Delivery, Identity
from flexinfer.lora.adapters import salt_of
from flexinfer.scheduler.pins import EXPORT_TTL_S, export_owner

if TYPE_CHECKING:
    from flexinfer.engine.build import EngineParts
    from flexinfer.lora.request import LoRARequest
    from flexinfer.types import Prompt
    from flexinfer.vtensor import VTensorManager

SAMPLED_WEIGHTS = 256
"""Of each tensor of a model that is no folder."""


class EngineHandover:
    """Refused by name: several ranks, devices other than the CPU."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts

    @cached_property
    def identity(self) -> Identity:
        """Whose KV means the same. Reads the ends of weight files, once."""
        from flexinfer.attention.kv_format import describe_kv

        parts, config = self._parts, self._parts.config
        computes = [
            sorted(versions().items()),
            config.quantization or "auto",
            describe_kv(config.kv_cache_dtype),
            str(parts.loaded.dtype),
        ]
        if isinstance(config.model, (str, os.PathLike)):
            from flexinfer.checkpoints.gguf.hub import gguf_file

            name = os.fspath(config.model)
            weights = fingerprint(gguf_file(name) or name)
        else:
            weights = _sample_of(parts.loaded.model)
        pieces = () if parts.tokenizer is None else sorted(parts.tokenizer.get_vocab().items())
        return Identity(_digest([weights, *computes]), _digest(list(pieces)))

    def export(self, prompt: Prompt, lora_request: LoRARequest | None = None) -> Delivery | None:
        """The KV of the longest recorded prefix of `prompt`, for another process, and where the
        model keeps one the recurrent state behind it; None: nothing is recorded. Chunks that others
        share are copied; see `VTensorManager.export`.

        Raises RequestError for what is no prompt, HandoverError where this engine hands nothing
        over, OutOfMemoryError where memory or slots are short.
        """
        self.check()
        parsed = self._parts.inputs.parse(prompt)
        salt = salt_of(parsed.cache_salt, self._parts.adapters.chosen(lora_request))
        found = self._open(parsed.token_ids, salt)
        if found is None:
            return None
        try:
            parcel = self.manager.export(found.vtensor)
            state = None if found.state is None else self.manager.export(found.state)
        finally:
            found.release()
        return Delivery(self.identity, found.tokens, salt, parcel, state)

    def adopt(self, delivery: Delivery, request_id: str = "", keep_s: float = EXPORT_TTL_S) -> int:
        """Record what another process has computed, in the memory that it has computed it in;
        returns its tokens. It is not evicted for `keep_s` seconds, or until `let_go(request_id)`,
        unless a request would fail otherwise.

        Raises HandoverError, with nothing mapped, for what is not this engine's KV,
        OutOfMemoryError where running requests need the memory or no slot is left.
        """
        self.check()
        self._check_tokens(delivery.tokens)
        self.check_room(self.num_bytes(delivery))
        return self.record(delivery.adopt(self.identity, self.manager), request_id, keep_s)

    def record(self, computed: Computed, request_id: str = "", keep_s: float = EXPORT_TTL_S) -> int:
        """As `adopt`, of what another process has computed, whose vTensors are given up."""
        tokens, salt, scheduler = computed.tokens, computed.salt, self._parts.scheduler
        try:
            self._check_tokens(tokens)
            computed.vtensor.record_prefix(tokens)
            if computed.state is not None:
                scheduler.states.snapshots.add(array("i", tokens), salt, computed.state)
        finally:
            computed.release()
        return scheduler.pins.keep(export_owner(request_id), tokens, keep_s, salt)

    def recorded(self, prompt: Prompt) -> Computed | None:
        """What is recorded of `prompt`, as `export` finds it, to be read and released. From any
        thread."""
        self.check()
        parsed = self._parts.inputs.parse(prompt)
        return self._open(parsed.token_ids, parsed.cache_salt)

    def _open(self, tokens: Sequence[int], salt: str) -> Computed | None:
        """Raises OutOfMemoryError where no slot is left."""
        scheduler = self._parts.scheduler
        head = array("i", tokens[: self.num_usable(tokens, salt)])
        if not head:
            return None
        found = Computed(self.manager.create(head, cache_salt=salt), list(head), salt)
        if scheduler.states.are_kept:
            found = replace(found, state=scheduler.states.snapshots.open(head, salt))
        is_gone = scheduler.states.are_kept and found.state is None
        if is_gone or found.vtensor.num_tokens < len(head):  # evicted meanwhile
            found.release()
            return None
        return found

    def num_usable(self, tokens: Sequence[int], salt: str) -> int:
        """Of these tokens, those behind which a request here could go on."""
        admission = self._parts.scheduler.admission
        return admission.num_usable(array("i", tokens), salt, len(tokens))

    def check_room(self, num_bytes: int) -> None:
        """Raises OutOfMemoryError where running requests need the memory."""
        scheduler = self._parts.scheduler
        if not scheduler.admission.has_room(num_bytes, scheduler.running.values()):
            raise OutOfMemoryError(
                f"{num_bytes} bytes of KV have no room beside the requests that run"
            )

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        vocab_size = self._parts.loaded.vocab_size
        if not all(0 <= token < vocab_size for token in tokens):
            raise HandoverError(f"a parcel has tokens that are not in [0, {vocab_size})")

    @property
    def manager(self) -> VTensorManager:
        return self._parts.manager

    def let_go(self, request_id: str) -> None:
        """Let what was kept for a request be evicted: it has been exported, or found."""
        self._parts.scheduler.pins.drop(export_owner(request_id))

    def num_bytes(self, delivery: Delivery) -> int:
        """Of KV, in whole chunks."""
        return delivery.num_chunks * self._parts.manager.chunk_bytes

    @property
    def layout(self) -> str:
        """Which parcels fit: `VTensorManager.layout`."""
        return self._parts.manager.layout

    def check(self) -> None:
        """Raises HandoverError, with the reason, where this engine hands nothing over."""
        parts = self._parts
        for is_given, what in (
            (parts.ranks is not None, "each of several ranks has KV heads of its own"),
            (parts.loaded.device.type != "cpu", f"its KV is on {parts.loaded.device}"),
            (not parts.config.enable_prefix_caching, "it records no prefixes"),
            (parts.manager.asleep, "it sleeps"),
        ):
            if is_given:
                raise HandoverError(f"this engine hands no KV over: {what}")


def _sample_of(model: Any) -> str:
    """Of a loaded model: its configuration, names and shapes of its weights, some of these."""
    digest = hashlib.sha256(repr(model.config.to_diff_dict()).encode())
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(str(weight.detach().flatten()[:SAMPLED_WEIGHTS].tolist()).encode())
    return digest.hexdigest()


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
