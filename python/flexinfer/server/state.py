"""ServerState: what all endpoints of one app share. For one event loop."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

from fastapi import Depends, Request

from flexinfer.async_llm import AsyncLLM
from flexinfer.engine.llm_engine import LLMEngine
from flexinfer.lora.adapters import Adapter
from flexinfer.sampling.grammars import CompiledGrammar, StructuredOutputsParams
from flexinfer.sampling.params import SamplingParams
from flexinfer.server.chat_renderer import ChatRenderer
from flexinfer.server.handover.partner import PrefillPartner
from flexinfer.server.handover.prefiller import Prefiller
from flexinfer.server.handover.stats import HandoverStats
from flexinfer.server.http.bodies import Turnstile
from flexinfer.server.http.errors import APIError, shutting_down
from flexinfer.server.http.limits import Limits
from flexinfer.server.observability.logs import new_id
from flexinfer.server.observability.memory_map import MemoryMap
from flexinfer.server.observability.tracing import RequestTracer
from flexinfer.server.parsing.forms import choose_forms
from flexinfer.server.settings import ServerSettings, check_template
from flexinfer.server.stores.adapters import ServedAdapters
from flexinfer.server.stores.conversations import ConversationStore
from flexinfer.server.stores.responses import ResponseStore
from flexinfer.server.stores.shares import equal_share
from flexinfer.server.token_bytes import TokenBytes

END_INTERVAL_S = 0.1
Result = TypeVar("Result")


class ServerState:
    """`request.app.state.flexinfer`."""

    def __init__(self, llm: AsyncLLM, settings: ServerSettings, replica: str | None = None) -> None:
        """`replica`: its name among several; None: a server alone."""
        self.llm = llm
        self.settings = settings
        self.replica = replica
        self.created = int(time.time())
        self.fingerprint = _fingerprint(llm, settings.model_name)
        """Of what answers depend on beside the request."""
        self.chat = _chat_renderer(llm, settings)
        self.forms = choose_forms(
            settings.tool_call_parser,
            settings.reasoning_parser,
            llm.tokenizer,
            knows_tools=self.chat.knows_tools,
            writes_harmony=self.chat.writes_harmony,
        )
        self.token_bytes = TokenBytes(llm.tokenizer)
        self.limits = Limits(
            llm.config.max_num_seqs, settings.max_queue_len, settings.max_key_concurrency
        )
        self.adapters = ServedAdapters(llm, settings)
        self.large_bodies = Turnstile()
        self.grammars = Turnstile(self.limits.has_others)
        self.conversations = ConversationStore(llm, settings, replica)
        self.responses = ResponseStore(
            equal_share(
                settings.max_stored_responses, settings.max_stored_bytes, settings.num_tenants
            ),
            replica,
        )
        self.memory_map = MemoryMap(
            llm, settings.model_name, shows_salted=settings.admin_api_key is not None
        )
        endpoint = settings.otlp_traces_endpoint
        self.tracer = RequestTracer(endpoint, settings.model_name) if endpoint else None
        if llm.config.role != settings.role:
            raise ValueError(
                f"the engine's role is {llm.config.role!r}, the server's {settings.role!r}"
            )
        connects_at = settings.handover_endpoint
        self.prefiller: Prefiller | None = None
        self.partner: PrefillPartner | None = None
        if connects_at and settings.role == "prefill":
            self.prefiller = Prefiller(llm, connects_at)
        if connects_at and settings.role == "decode":
            self.partner = PrefillPartner(
                llm, connects_at, settings.handover_timeout_s, settings.handover_min_tokens
            )
        self.is_draining = False
        """The server is going down: new requests are refused."""
        self.is_ending = False
        """Those that are being served have no more time: they get 503, too."""
        self.trace_path: Path | None = None
        self._engine_ids: set[str] = set()

    @property
    def handover_stats(self) -> HandoverStats | None:
        """None: nothing is handed over."""
        connector = self.prefiller or self.partner
        return None if connector is None else connector.stats

    @property
    def max_n(self) -> int:
        """Most samples, or beams, of one prompt."""
        return self.settings.max_n or self.llm.config.max_num_seqs

    @contextmanager
    def claim_ids(self, wanted: Sequence[str]) -> Iterator[list[str]]:
        """Ids for the engine, which knows each but once: as wanted, with a suffix where a request
        that is being served has it. Callers choose X-Request-Id, and may use one several times."""
        claimed: list[str] = []
        for name in wanted:
            unique = f"{name}-{new_id()[:8]}" if name in self._engine_ids else name
            self._engine_ids.add(unique)
            claimed.append(unique)
        try:
            yield claimed
        finally:
            self._engine_ids.difference_update(claimed)

    async def change_memory(self, function: Callable[[LLMEngine], Result]) -> Result:
        """Have the engine change its memory; the map shows it at once."""
        try:
            return await self.llm.call(function)
        finally:
            self.memory_map.outdate()

    async def end_requests(self) -> NoReturn:
        """Have all that is being served answered 503, or by an event that says the same; until it
        is cancelled, since some may be on their way to the engine."""
        self.is_ending = True
        while True:
            aborted = map(self.llm.abort, self._engine_ids)
            await asyncio.gather(*aborted, return_exceptions=True)  # a dead engine has told them
            await asyncio.sleep(END_INTERVAL_S)

    async def grammar(
        self, tenant: str, structure: StructuredOutputsParams
    ) -> CompiledGrammar | None:
        """Compiled in the tenant's turn; what is compiled already waits for none. Raises
        RequestError. None: the engine is closed."""
        found = self.llm.grammars.find(structure)
        if found is None:
            async with self.grammars.turn(tenant) as work:
                params = SamplingParams(structured_outputs=structure)
                found = await self.llm.prepare_grammar(params, work.append)
        return found

    def check_serving(self, model: str | None) -> None:
        """Raises APIError if the server is going down, or serves no such model."""
        if self.is_draining:
            raise shutting_down()
        if self.prefiller is not None:
            raise APIError(
                403,
                "this server prefills for others (--role prefill) and answers no clients: ask one "
                "that decodes (--role decode)",
                code="wrong_role",
            )
        self.check_model(model)

    def choose(self, model: str | None) -> Adapter | None:
        """The adapter of this name; None for the model itself. Raises APIError for a name that is
        not served, or no longer."""
        self.check_model(model)
        return self.adapters.get(model)

    def check_model(self, model: str | None) -> None:
        names = (*self.settings.served_model_names, *self.adapters)
        if model is not None and model not in names:
            known = ", ".join(map(repr, names))
            raise APIError(
                404,
                f"the model {model!r} is not served here; served: {known}",
                param="model",
                code="model_not_found",
            )


def _chat_renderer(llm: AsyncLLM, settings: ServerSettings) -> ChatRenderer:
    own_template = getattr(llm.tokenizer, "chat_template", None)
    if settings.chat_template is None and isinstance(own_template, str):
        check_template(own_template)
    return ChatRenderer(
        llm.inputs,
        settings.chat_template,
        settings.chat_template_content_format,
        settings.default_chat_template_kwargs,
    )


def _fingerprint(llm: AsyncLLM, model: str) -> str:
    """Equal for servers whose answers to a seed are equal, as far as settings decide it."""
    config = llm.config
    weights = (str(config.dtype), config.quantization, config.overrides, str(config.device))
    parts = (version("flexinfer"), model, *weights, config.kv_cache_dtype, config.seed)
    return f"fp_{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"


# Coroutines, though nothing waits: FastAPI would run plain functions in threads of their own, which
# wait for the GIL while the engine computes.


async def _state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.flexinfer
    return state


async def _tenant_of(request: Request) -> str:
    tenant: str = request.scope["state"]["tenant"]
    return tenant


State = Annotated[ServerState, Depends(_state_of)]


async def _check_replica(state: State, replica: str | None = None) -> None:
    """Raises APIError where a replica is named and there are none: one that was mistyped, or is of
    another server. Among replicas the gateway has found the one that is meant."""
    if replica is not None and state.replica is None:
        raise APIError(
            404,
            f"there is no replica {replica!r}: this server is alone; ask it without a name",
            param="replica",
            code="no_such_replica",
        )


AskedHere = Depends(_check_replica)
Tenant = Annotated[str, Depends(_tenant_of)]
"""Digest of the API key; "" where none is asked for."""
