"""What the options of `flexinfer serve` say, for the engine and for the server."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexinfer.cli.serve.options import ServeOptions
    from flexinfer.config import EngineConfig
    from flexinfer.server.lora_module_path import LoRAModulePath
    from flexinfer.server.settings import ServerSettings


def engine_config(options: ServeOptions) -> EngineConfig:
    """The engine's part of the options."""
    from flexinfer.cli.settings import EngineSettings
    from flexinfer.config import EngineConfig
    from flexinfer.runtime.vllm_arguments import note_remote_code

    note_remote_code(options.trust_remote_code)
    opened = EngineSettings(
        model=options.model, device=options.device, chunk_bytes=options.chunk_bytes
    )
    cache = options.prefix_cache_memory
    translated = {
        "model": opened.folder,
        "device": opened.engine_device,
        "chunk_bytes": opened.engine_chunk_bytes,
        "swap_space": _bytes(options.swap_space),
        "distributed_timeout_s": options.distributed_timeout,
        "prefix_cache_memory": cache if cache is None else _bytes(cache),
    }
    return EngineConfig(**_same_names(options, EngineConfig) | translated)


def server_settings(options: ServeOptions, config: EngineConfig) -> ServerSettings:
    """The server's part of the options."""
    from flexinfer.engine.inputs import read_chat_template
    from flexinfer.runtime.units import parse_bytes
    from flexinfer.server.http.tls import tls_settings
    from flexinfer.server.settings import ServerSettings

    names = options.served_model_name or _names_of(str(config.model), options.model)
    translated = {
        "served_model_names": tuple(names),
        "lora_modules": _adapters(options),
        "api_keys": _list(options.api_key, "--api-key"),
        "chat_template": read_chat_template(options.chat_template),
        "default_chat_template_kwargs": _mapping(
            options.default_chat_template_kwargs, "--default-chat-template-kwargs"
        ),
        "allowed_hosts": _list(options.allowed_hosts, "--allowed-hosts"),
        "allowed_origins": _list(options.allowed_origins, "--allowed-origins"),
        "allowed_methods": _list(options.allowed_methods, "--allowed-methods") or ("*",),
        "allowed_headers": _list(options.allowed_headers, "--allowed-headers") or ("*",),
        "tls": tls_settings(
            options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs, options.ssl_cert_reqs
        ),
        "shutdown_timeout_s": options.shutdown_timeout,
        "max_request_bytes": parse_bytes(options.max_request_bytes, "max_request_bytes"),
        "conversation_ttl_s": options.conversation_ttl,
        "max_ttl_s": max(86400.0, options.conversation_ttl),
        "max_stored_bytes": parse_bytes(options.max_stored_bytes, "max_stored_bytes"),
        "handover_timeout_s": options.handover_timeout,
        "send_timeout_s": options.send_timeout,
        "receive_timeout_s": options.receive_timeout,
    }
    return ServerSettings(**_same_names(options, ServerSettings) | translated)


def _same_names(options: ServeOptions, target: type) -> dict[str, Any]:
    """Options that are fields of `target` too."""
    known = {field.name for field in dataclasses.fields(target)}
    names = {field.name for field in dataclasses.fields(options)} & known
    return {name: getattr(options, name) for name in names}


def _bytes(text: str) -> int | str:
    """A bare number is one of bytes; the rest is parsed where it is used."""
    return int(text) if text.isdigit() else text


def _list(given: Sequence[str] | None, flag: str) -> tuple[str, ...]:
    """The values of an option given several times, or once with a JSON list, as vLLM has it."""
    words = tuple(given or ())
    if not words or not words[0].startswith("["):
        return words
    text = " ".join(words)  # of the environment, which is cut at blanks
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{flag} {text!r} is not a JSON list of strings: {error}") from None
    if not all(isinstance(word, str) for word in found):
        raise ValueError(f"{flag} {text!r} is not a JSON list of strings")
    return tuple(found)


def _mapping(given: str | None, flag: str) -> dict[str, Any]:
    from flexinfer.runtime.json_options import read_mapping

    return {} if given is None else dict(read_mapping(flag, given))


def _adapters(options: ServeOptions) -> tuple[LoRAModulePath, ...]:
    from flexinfer.cli.serve.adapters import lora_modules

    modules = lora_modules(options.lora_modules or ())
    if modules and not options.enable_lora:
        raise ValueError("--lora-modules needs --enable-lora")
    return modules


def _names_of(folder: str, model: str | None) -> list[str]:
    """A folder or file goes by its last name and as it was written, a hub id by itself."""
    path = Path(folder).resolve()
    if not path.exists():
        return [folder]
    short = path.name if path.is_dir() else path.stem
    return list(dict.fromkeys([short, model or short]))
