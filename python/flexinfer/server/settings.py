"""ServerSettings: what the operator decides about the server, checked where it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexinfer.engine.chat_template import CONTENT_FORMATS
from flexinfer.runtime.json_options import require_choice
from flexinfer.server.handover.endpoints import Endpoint, endpoint_of
from flexinfer.server.http.hosts import is_loopback
from flexinfer.server.http.root_path import checked_root_path
from flexinfer.server.http.tls import TLSSettings
from flexinfer.server.lora_module_path import LoRAModulePath
from flexinfer.server.observability.tracing import check_endpoint
from flexinfer.server.parsing.reasoning import check_reasoning_parser
from flexinfer.server.parsing.tool_formats import tool_format


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of the HTTP side; those of the engine are `EngineConfig`."""

    served_model_names: tuple[str, ...]
    """Names that requests may give; the first one stands in answers."""
    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    """A Unix socket, in place of host and port."""
    root_path: str = ""
    """Below which a proxy shows this server, such as "/llm": it may be there in requests or not."""
    api_keys: tuple[str, ...] = ()
    """Each key is a tenant: prefixes are shared only within one. Empty: no key is asked for."""
    admin_api_key: str | None = None
    chat_template: str | None = None
    """Jinja source; None: that of the tokenizer."""
    chat_template_content_format: str = "auto"
    """How it takes the content of messages: one of CONTENT_FORMATS in engine/chat_template.py."""
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """What the template gets of a request that does not say it itself, name by name."""
    tool_call_parser: str = "hermes"
    """The form in which the model writes its calls: a name in parsing/tool_formats.py. Harmony, by
    this name, the next or the chat template, is the form of calls and of reasoning at once."""
    enable_auto_tool_choice: bool = True
    """Whether the model may choose to call; otherwise callers must force or forbid it."""
    exclude_tools_when_tool_choice_none: bool = False
    """Whether prompts are without the tools that may not be called."""
    reasoning_parser: str | None = None
    """The form of the model's reasoning: a name in parsing/reasoning.py; None: it is content."""
    lora_modules: tuple[LoRAModulePath, ...] = ()
    """The LoRA adapters that are served from the start."""
    role: str = "both"
    """As the engine's: "prefill" takes no requests of clients, "decode" has a partner."""
    handover_socket: Path | None = None
    """Where a server that prefills listens, and one that decodes asks, on one machine."""
    handover_address: str | None = None
    """HOST:PORT, in place of a socket, between machines."""
    handover_key: str | None = None
    """What both sides must know there."""
    handover_timeout_s: float = 30.0
    """How long one prompt may take there; after that it is prefilled here."""
    handover_min_tokens: int = 64
    """Prompts with fewer tokens that are not cached are prefilled here."""
    max_request_bytes: int = 8 << 20
    """Bound on one request's body."""
    max_prompt_tokens: int | None = None
    """Bound on one prompt; None: what max_model_len admits."""
    max_n: int | None = None
    """Bound on n, best_of and the beam width; None: the engine's max_num_seqs."""
    max_logprobs: int = 20
    max_queue_len: int = 256
    """Sequences that may wait beyond the max_num_seqs that run; more are answered by 429."""
    max_key_concurrency: int | None = None
    """Sequences of one API key at the same time; None: no bound of its own."""
    max_conversations: int = 1024
    max_stored_responses: int = 1024
    conversation_ttl_s: float = 600.0
    """How long an idle conversation keeps its prefix pinned."""
    max_ttl_s: float = 86400.0
    max_stored_bytes: int = 256 << 20
    """Bound on what conversations hold, and on what stored responses hold. Each API key has an
    equal share of it, and of the numbers above."""
    send_timeout_s: float = 60.0
    """A reader that takes nothing for so long is disconnected."""
    receive_timeout_s: float = 30.0
    """A request that has not arrived after so long, and a second per 16 KiB, is refused."""
    timeout_keep_alive: int = 75
    """Seconds that a connection is kept between two requests. Longer than clients' pools and load
    balancers keep theirs (httpx 5, aiohttp 15, AWS 60): else one is closed just as it is used."""
    shutdown_timeout_s: float = 30.0
    """How long a shutdown waits for running requests."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which callers may call this server, beside those of its loopback. Empty: any name,
    unless only this machine can call, and needs no key."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may call this server (CORS); its own page needs none."""
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    """Headers that they may send; OpenAI's client sends many of its own."""
    allow_credentials: bool = False
    """Whether they may send cookies and TLS certificates. Keys in a header need no permission."""
    tls: TLSSettings | None = None
    """None: plain HTTP."""
    enable_force_include_usage: bool = False
    """Whether streams end with their usage without being asked for it."""
    trace_dir: Path | None = None
    """Where /admin/trace may write; None: it may not."""
    otlp_traces_endpoint: str | None = None
    """URL of an OpenTelemetry collector (OTLP over HTTP) that receives a span per request."""

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise ValueError(f"a served model needs a name, got {self.served_model_names!r}")
        if not self.host:  # for a socket: every address of this machine
            raise ValueError(
                "host must be an address to listen on, got '': 127.0.0.1 is for this machine "
                "alone, 0.0.0.0 for all"
            )
        for name in ("max_request_bytes", "max_logprobs", "max_conversations", "max_stored_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_prompt_tokens", "max_n", "max_key_concurrency", "handover_min_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("max_queue_len", "max_stored_responses", "shutdown_timeout_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        times = ("conversation_ttl_s", "max_ttl_s", "send_timeout_s", "receive_timeout_s")
        for name in (*times, "handover_timeout_s", "timeout_keep_alive"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0 seconds, got {getattr(self, name)}")
        require_choice(
            "chat_template_content_format", self.chat_template_content_format, CONTENT_FORMATS
        )
        if self.chat_template is not None:
            check_template(self.chat_template)
        adapters = [module.name for module in self.lora_modules]
        for name in adapters:
            if adapters.count(name) > 1 or name in self.served_model_names:
                raise ValueError(f"the name {name!r} is given to more than one model or adapter")
        object.__setattr__(self, "root_path", checked_root_path(self.root_path))
        self._check_keys()
        self._check_role()
        tool_format(self.tool_call_parser)
        if self.reasoning_parser is not None:
            check_reasoning_parser(self.reasoning_parser)
        if self.otlp_traces_endpoint is not None:
            check_endpoint(self.otlp_traces_endpoint)

    def _check_role(self) -> None:
        given = [n for n in ("handover_socket", "handover_address") if getattr(self, n)]
        if self.role == "both" and given:
            raise ValueError(
                f"{given[0]} needs role 'prefill' (listens there) or 'decode' (asks there)"
            )
        if self.role != "both" and not given:
            raise ValueError(
                f"role {self.role!r} needs handover_socket, the path of a Unix socket at which the "
                "prefilling server listens and the decoding ones ask, or handover_address, "
                "HOST:PORT, between machines"
            )
        if len(given) > 1:
            raise ValueError("handover_socket does not go with handover_address: give one of them")
        if self.handover_key is not None and self.handover_address is None:
            raise ValueError("handover_key needs handover_address: a socket knows its user")
        endpoint = self.handover_endpoint
        if endpoint is not None:
            endpoint.check()

    @property
    def handover_endpoint(self) -> Endpoint | None:
        """Where the partner is met; None: there is none."""
        return endpoint_of(self.handover_socket, self.handover_address, self.handover_key)

    @property
    def checks_hosts(self) -> bool:
        """Web pages reach this machine's ports, but no sockets with a path."""
        is_open = self.uds is None and is_loopback(self.host) and not self.api_keys
        return bool(self.allowed_hosts) or is_open

    @property
    def num_tenants(self) -> int:
        return max(1, len(self.api_keys))

    @property
    def model_name(self) -> str:
        return self.served_model_names[0]

    def _check_keys(self) -> None:
        if not all(self.api_keys) or self.admin_api_key == "":
            raise ValueError("an API key must not be empty: leave the option out for none")
        if self.admin_api_key is not None and self.admin_api_key in self.api_keys:
            raise ValueError("the admin API key must differ from the API keys")


def check_template(source: str) -> None:
    """Raises ValueError for what does not compile."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template([[]], chat_template=source)
    except TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template is broken in line {error.lineno}: {error.message}"
        ) from None
    except Exception:  # it compiles; a chat without messages is not what it is for
        return
