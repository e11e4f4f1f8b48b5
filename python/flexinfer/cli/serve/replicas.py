"""What the options of `flexinfer serve` say of replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexinfer.runtime.json_options import read_mapping

if TYPE_CHECKING:
    from flexinfer.cli.serve.options import ServeOptions
    from flexinfer.config import EngineConfig
    from flexinfer.ray.options import ReplicaOptions
    from flexinfer.server.settings import ServerSettings

ONLY_WITH_REPLICAS = ("ray_address", "ray_actor_options")


def replicas_wanted(options: ServeOptions) -> bool:
    """Raises ValueError for options that say something of replicas where there are none."""
    if options.replicas is not None or options.autoscaling_config is not None:
        return True
    for name in ONLY_WITH_REPLICAS:
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} needs --replicas")
    if options.router != "cached-prefix":
        raise ValueError("--router needs --replicas")
    return False


def replica_options(
    options: ServeOptions, config: EngineConfig, settings: ServerSettings
) -> ReplicaOptions:
    """Raises ValueError, with its name, for an option that does not go with replicas."""
    from flexinfer.ray.options import ReplicaOptions

    for name in ("ssl_ca_certs", "ssl_cert_reqs"):
        if getattr(options, name):
            raise ValueError(f"{name} cannot be combined with replicas: Serve asks for none")
    if settings.uds is not None:
        raise ValueError("uds cannot be combined with replicas: Serve's proxies listen on a port")
    if settings.port == 0:
        raise ValueError("port 0 cannot be combined with replicas: name one for Serve's proxies")
    if options.log_format != "text":
        raise ValueError("log_format cannot be combined with replicas: Ray writes their logs")
    for module in settings.lora_modules:
        if options.ray_address is None and not Path(module.path).is_dir():  # others may have it
            raise ValueError(
                f"LoRA adapter {module.name!r} ({module.path}): there is no such folder"
            )
    adapters = tuple(
        dataclasses.replace(module, path=_absolute(module.path)) for module in settings.lora_modules
    )
    trace_dir = settings.trace_dir and settings.trace_dir.resolve()
    advice = config.generation_config
    advice = advice if advice in ("auto", "vllm") else _absolute(advice)
    return ReplicaOptions(
        engine=dataclasses.replace(config, model=_absolute(config.model), generation_config=advice),
        server=dataclasses.replace(settings, tls=None, lora_modules=adapters, trace_dir=trace_dir),
        replicas=1 if options.replicas is None else options.replicas,
        router=options.router,
        autoscaling_config=_mapping(options.autoscaling_config, "--autoscaling-config"),
        ray_actor_options=_mapping(options.ray_actor_options, "--ray-actor-options"),
    )


def _absolute(place: Any) -> Any:
    """Of a folder or file that is here; hub ids stay. Ray's processes start elsewhere."""
    return str(Path(place).resolve()) if Path(place).exists() else place


def _mapping(text: str | None, flag: str) -> Mapping[str, Any] | None:
    return None if text is None else read_mapping(flag, text)
