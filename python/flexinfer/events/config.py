"""KVEventsConfig: where KV events go; names and meanings are those of vLLM's `kv_events_config`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexinfer.runtime.json_options import from_mapping

OPTION = "kv_events_config"


@dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    enable_kv_cache_events: bool = False
    publisher: str | None = None
    """"zmq", or "null" for none; None: zmq if events are enabled."""
    endpoint: str = "tcp://*:5557"
    """Of the PUB socket: listens with a `*` or `::` or if it is ipc or inproc, else connects."""
    replay_endpoint: str | None = None
    """Of the ROUTER socket that sends missed batches again; None: there is none."""
    buffer_steps: int = 10_000
    """Batches kept for that."""
    hwm: int = 100_000
    """Batches that wait for a slow subscriber, before it misses some."""
    topic: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.enable_kv_cache_events, bool):
            raise ValueError(
                f"{OPTION}: enable_kv_cache_events must be true or false, "
                f"got {self.enable_kv_cache_events!r}"
            )
        if self.publisher not in (None, "zmq", "null"):
            raise ValueError(
                f"{OPTION}: publisher must be one of 'zmq', 'null', got {self.publisher!r}"
            )
        for name in ("buffer_steps", "hwm"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{OPTION}: {name} must be a positive integer, got {value!r}")
        if not isinstance(self.topic, str):
            raise ValueError(f"{OPTION}: topic must be a string, got {self.topic!r}")
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            is_left_out = value is None and name == "replay_endpoint"
            if not is_left_out and (not isinstance(value, str) or "://" not in value):
                raise ValueError(
                    f"{OPTION}: {name} must be an address such as tcp://*:5557, got {value!r}"
                )
        if self.endpoint == self.replay_endpoint:
            raise ValueError(f"{OPTION}: endpoint and replay_endpoint are both {self.endpoint!r}")

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"

    @classmethod
    def parse(cls, given: Any) -> KVEventsConfig:
        """From a mapping or its JSON. Raises ValueError, naming what is wrong with it."""
        return from_mapping(cls, OPTION, given)
