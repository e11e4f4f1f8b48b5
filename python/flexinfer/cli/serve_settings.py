"""What the options of `flexinfer serve` say, for the engine and for the server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexinfer.config import EngineConfig
    from flexinfer.server.settings import ServerSettings


def engine_config(given: dict[str, Any]) -> EngineConfig:
    """The engine's part of the options."""
    from flexinfer.cli.settings import EngineSettings
    from flexinfer.config import EngineConfig

    settings = EngineSettings(
        model=given["model"], device=given["device"], chunk_bytes=given["chunk_bytes"]
    )
    same_name = (
        "tokenizer",
        "dtype",
        "seed",
        "attention_backend",
        "enforce_eager",
        "gpu_memory_utilization",
        "threads",
        "max_model_len",
        "layers_per_plane",
        "enable_prefix_caching",
        "enable_pre_extend",
        "swap_directory",
        "max_num_seqs",
        "max_num_batched_tokens",
        "stream_interval",
        "enable_chunked_prefill",
        "scheduling_policy",
        "preemption_mode",
    )
    cache = given["prefix_cache_memory"]
    return EngineConfig(
        model=settings.folder,
        device=settings.engine_device,
        kv_cache_memory_bytes=given["kv_cache_memory"],
        chunk_bytes=settings.engine_chunk_bytes,
        compile=given["compile_model"],
        **{name: given[name] for name in same_name},
        swap_space=_bytes(given["swap_space"]),
        prefix_cache_memory=cache if cache is None else _bytes(cache),
    )


def _bytes(text: str) -> int | str:
    """A bare number is one of bytes; the rest is parsed where it is used."""
    return int(text) if text.isdigit() else text


def server_settings(given: dict[str, Any], config: EngineConfig) -> ServerSettings:
    """The server's part of the options."""
    from flexinfer.runtime.units import parse_bytes
    from flexinfer.server.http.tls import tls_settings
    from flexinfer.server.settings import ServerSettings

    names = given["served_model_name"] or _names_of(str(config.model), given["model"])
    same_name = (
        "host",
        "port",
        "admin_api_key",
        "max_queue_len",
        "max_key_concurrency",
        "max_prompt_tokens",
        "max_n",
        "max_logprobs",
        "max_conversations",
        "otlp_traces_endpoint",
    )
    return ServerSettings(
        served_model_names=tuple(names),
        api_keys=tuple(given["api_key"] or ()),
        chat_template=_template(given["chat_template"]),
        allowed_origins=_list(given["allowed_origins"]),
        allowed_methods=_list(given["allowed_methods"]) or ("*",),
        allowed_headers=_list(given["allowed_headers"]) or ("*",),
        allow_credentials=given["allow_credentials"],
        tls=tls_settings(
            given["ssl_certfile"],
            given["ssl_keyfile"],
            given["ssl_ca_certs"],
            given["ssl_cert_reqs"],
        ),
        trace_directory=given["trace_dir"],
        shutdown_timeout_s=given["shutdown_timeout"],
        max_request_bytes=parse_bytes(given["max_request_bytes"], "max_request_bytes"),
        default_ttl_s=given["conversation_ttl"],
        max_ttl_s=max(86400.0, given["conversation_ttl"]),
        send_timeout_s=given["send_timeout"],
        **{name: given[name] for name in same_name},
    )


def _list(given: Sequence[str] | None) -> tuple[str, ...]:
    """Of an option given several times, or once with a JSON list, as vLLM has it."""
    words: list[str] = []
    for text in given or ():
        if not text.startswith("["):
            words.append(text)
            continue
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{text!r} is no JSON list of texts: {error}") from None
        if not all(isinstance(word, str) for word in found):
            raise ValueError(f"{text!r} is no JSON list of texts")
        words += found
    return tuple(words)


def _names_of(folder: str, model: str | None) -> list[str]:
    """A folder goes by its last name and as it was written, a hub id by itself."""
    if not Path(folder).is_dir():
        return [folder]
    short = Path(folder).resolve().name
    return list(dict.fromkeys([short, model or short]))


def _template(given: str | None) -> str | None:
    """A file, or the text itself. Raises ValueError for a file that is not there."""
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"the chat template {given!r} can not be read: {error}") from None
