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
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flexinfer.distributed.messages import fingerprint, versions
from flexinfer.errors import HandoverError, OutOfMemoryError
from flexinfer.handover.parcels import Delivery, Identity
from flexinfer.lora.adapters import salt_of
from flexinfer.scheduler.pins import EXPORT_TTL_S, export_owner

if TYPE_CHECKING:
    from flexinfer.engine.build import EngineParts
    from flexinfer.lora.request import LoRARequest
    from flexinfer.types import Prompt
    from flexinfer.vtensor import VTensor, VTensorManager

SAMPLED_WEIGHTS = 256
"""Of each tensor of a model that is no folder."""


class EngineHandover:
    """Refused by name: several ranks, models with a recurrent state, devices other than the CPU."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts

    @cached_property
    def identity(self) -> Identity:
        """Whose KV means the same. Reads the ends of weight files, once."""
        parts, config = self._parts, self._parts.config
        computes = [
            sorted(versions().items()),
            config.quantization or "auto",
            config.kv_cache_dtype,
            str(parts.loaded.dtype),
        ]
        if isinstance(config.model, (str, os.PathLike)):
            weights = fingerprint(config.model)
        else:
            weights = _sample_of(parts.loaded.model)
        pieces = () if parts.tokenizer is None else sorted(parts.tokenizer.get_vocab().items())
        return Identity(_digest([weights, *computes]), _digest(list(pieces)))

    def export(self, prompt: Prompt, lora_request: LoRARequest | None = None) -> Delivery | None:
        """The KV of the longest recorded prefix of `prompt`, for another process; None: nothing is
        recorded. Chunks that others share are copied; see `VTensorManager.export`.

        Raises RequestError for what is no prompt, HandoverError where this engine hands nothing
        over, OutOfMemoryError where memory or slots are short.
        """
        self.check()
        parsed = self._parts.inputs.parse(prompt)
        salt = salt_of(parsed.cache_salt, self._parts.adapters.chosen(lora_request))
        parcel = self._parts.manager.export_prefix(parsed.token_ids, salt)
        if parcel is None:
            return None
        return Delivery(self.identity, parsed.token_ids[: parcel.num_tokens], salt, parcel)

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
        vtensor = delivery.adopt(self.identity, self.manager)
        return self.record(vtensor, delivery.tokens, delivery.salt, request_id, keep_s)

    def record(
        self,
        vtensor: VTensor,
        tokens: Sequence[int],
        salt: str,
        request_id: str = "",
        keep_s: float = EXPORT_TTL_S,
    ) -> int:
        """As `adopt`, of a vTensor with what another process has computed, which is given up."""
        try:
            self._check_tokens(tokens)
            vtensor.record_prefix(tokens)
        finally:
            vtensor.release()
        owner = export_owner(request_id)
        return self._parts.scheduler.pins.keep(owner, tokens, keep_s, salt)

    def recorded(self, prompt: Prompt) -> tuple[VTensor, list[int], str] | None:
        """A vTensor of the longest recorded prefix of `prompt`, its tokens and its salt, to be read
        and released; None: nothing is recorded. From any thread."""
        self.check()
        parsed = self._parts.inputs.parse(prompt)
        vtensor = self.manager.create(parsed.token_ids, cache_salt=parsed.cache_salt)
        if vtensor.num_tokens == 0:
            vtensor.release()
            return None
        return vtensor, list(parsed.token_ids[: vtensor.num_tokens]), parsed.cache_salt

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
        return delivery.parcel.num_chunks * self._parts.manager.chunk_bytes

    @property
    def layout(self) -> str:
        """Which parcels fit: `VTensorManager.layout`."""
        return self._parts.manager.layout

    def check(self) -> None:
        """Raises HandoverError, with the reason, where this engine hands nothing over."""
        parts = self._parts
        for is_given, what in (
            (parts.ranks is not None, "each of several ranks has KV heads of its own"),
            (bool(parts.loaded.state), "its model keeps a recurrent state beside KV"),
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
