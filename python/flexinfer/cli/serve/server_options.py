"""The options of `flexinfer serve` that are the HTTP side's: where it listens, whom it answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from flexinfer.cli.option_model import option


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    panel: ClassVar[str] = "Server"
    host: Annotated[str, option("Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[int, option("0 takes a free one.", min=0, max=65535)] = 8000
    uds: Annotated[Path | None, option("Unix socket to listen at, in place of host and port.")] = (
        None
    )
    root_path: Annotated[
        str, option("Path below which a proxy shows this server, whether it cuts it off or not.")
    ] = ""
    served_model_name: Annotated[
        list[str] | None, option("Names in requests, one or several; the first is in answers.")
    ] = None
    api_key: Annotated[
        list[str] | None,
        option(
            "Keys that requests must send, one or several, or a JSON list: each is a tenant. "
            "Better in the environment or the file: other users of this machine see arguments."
        ),
    ] = None
    admin_api_key: Annotated[str | None, option("Key that opens /admin.")] = None
    allowed_hosts: Annotated[
        list[str] | None,
        option(
            "Name by which callers may call this server, beside localhost; several times or as a "
            "JSON list. Without it any name will do, unless only this machine can call without key."
        ),
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        option("Origin of web pages that may call (CORS); several times or as a JSON list."),
    ] = None
    allowed_methods: Annotated[
        list[str] | None, option("Methods that such pages may use; by default all.")
    ] = None
    allowed_headers: Annotated[
        list[str] | None, option("Headers that such pages may send; by default all.")
    ] = None
    allow_credentials: Annotated[bool, option("Such pages may send cookies and certificates.")] = (
        False
    )
    trace_dir: Annotated[
        Path | None, option("Where /admin/trace writes.", exists=True, file_okay=False)
    ] = None
    timeout_keep_alive: Annotated[
        int,
        option("Seconds that an idle connection is kept: longer than clients keep theirs.", min=1),
    ] = 75
    shutdown_timeout: Annotated[
        float, option("Seconds that running requests have to end at a shutdown.", min=0)
    ] = 30.0


@dataclass(frozen=True, kw_only=True)
class TLSOptions:
    panel: ClassVar[str] = "HTTPS"
    ssl_keyfile: Annotated[
        Path | None, option("The certificate's key, if in a file of its own.")
    ] = None
    ssl_certfile: Annotated[Path | None, option("Certificate (PEM); turns HTTPS on.")] = None
    ssl_ca_certs: Annotated[
        Path | None, option("Authorities of the certificates that clients show.")
    ] = None
    ssl_cert_reqs: Annotated[
        int, option("Client certificates: 0 not asked for, 1 optional, 2 required.")
    ] = 0


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    panel: ClassVar[str] = "Limits"
    max_queue_len: Annotated[
        int, option("Maximum number of sequences that wait; more get 429.", min=0)
    ] = 256
    max_key_concurrency: Annotated[
        int | None, option("Maximum number of sequences per API key at once.", min=1)
    ] = None
    max_request_bytes: Annotated[str, option("Maximum size of a request's body.")] = "8MiB"
    max_prompt_tokens: Annotated[
        int | None, option("Maximum number of tokens per prompt.", min=1)
    ] = None
    max_n: Annotated[int | None, option("Maximum number of samples per prompt.", min=1)] = None
    max_logprobs: Annotated[
        int, option("Maximum number of log probabilities per token.", min=1)
    ] = 20
    max_conversations: Annotated[
        int, option("Maximum number of conversations kept pinned.", min=1)
    ] = 1024
    conversation_ttl: Annotated[
        float, option("Seconds that an idle conversation is kept.", min=1)
    ] = 600.0
    max_stored_bytes: Annotated[
        str, option("Maximum size of all conversations, and of all stored responses.")
    ] = "256MiB"
    send_timeout: Annotated[
        float, option("Seconds until a client that reads nothing is disconnected.", min=1)
    ] = 60.0
    receive_timeout: Annotated[
        float,
        option("Seconds that a request may take to arrive; longer by 1 s per 16 KiB.", min=1),
    ] = 30.0
