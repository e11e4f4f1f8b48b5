"""ServedAdapters: the LoRA adapters that requests choose by name. For one event loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from flexinfer.async_llm import AsyncLLM
from flexinfer.lora.adapters import Adapter, salt_of
from flexinfer.lora.request import LoRARequest
from flexinfer.server.http.errors import APIError, bad_request
from flexinfer.server.lora_module_path import LoRAModulePath
from flexinfer.server.settings import ServerSettings


class ServedAdapters:
    """
    Invariant: the engine has loaded those in `_by_name`, and no other for this server.
    """

    def __init__(self, llm: AsyncLLM, settings: ServerSettings) -> None:
        """Without adapters, until they are loaded."""
        self._llm = llm
        self._model_names = settings.served_model_names
        self._ids = count(1)
        self._by_name: dict[str, Adapter] = {}
        self._loading: set[str] = set()

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def get(self, name: str | None) -> Adapter | None:
        """None for the name of the model itself. Who has it may use it, removed or not."""
        return None if name is None else self._by_name.get(name)

    async def load_all(self, modules: Sequence[LoRAModulePath]) -> None:
        """Raises ValueError for what cannot be served."""
        for module in modules:
            await self._load(module.name, module.path, module.base_model_name)

    async def load(self, name: str, folder: str, in_place: bool = False) -> None:
        """in_place: if there is one of this name, instead of that: see `_load`. Raises APIError for
        a name that is taken, and for what cannot be served; then all is as it was."""
        if name in (*self._model_names, *self._loading):
            owner = "the model's" if name in self._model_names else "being loaded"
            raise bad_request(f"the name {name!r} is {owner}", "lora_name")
        if name in self._by_name and not in_place:
            reason = "is taken: unload that adapter first, or set load_inplace"
            raise bad_request(f"the name {name!r} {reason}", "lora_name")
        self._loading.add(name)
        try:
            await self._load(name, folder)
        except ValueError as error:
            raise bad_request(str(error)) from None
        finally:
            self._loading.discard(name)

    async def unload(self, name: str) -> None:
        """Requests that have chosen it are served to their end. Raises APIError for none here."""
        adapter = self._by_name.pop(name, None)
        if adapter is None:
            raise APIError(
                404,
                f"there is no adapter {name!r}; loaded: {', '.join(map(repr, self._by_name))}",
                param="lora_name",
                code="adapter_not_found",
            )
        await self._llm.remove_lora(adapter.request.lora_int_id)

    def kv_salt(self, cache_salt: str, adapter: Adapter | None) -> str:
        """Under which the prefixes of such requests are recorded."""
        if adapter is None or self._by_name.get(adapter.request.lora_name) is not adapter:
            return cache_salt  # nobody can go on with an adapter that was unloaded
        return salt_of(cache_salt, adapter)

    async def _load(self, name: str, folder: str, base_model_name: str | None = None) -> None:
        """One that had its name until then serves those that have chosen it to their end. Its KV
        has the digest of its own weights, and is of no use to others."""
        base = base_model_name if base_model_name in self._model_names else None
        request = LoRARequest(name, next(self._ids), folder, base)
        loaded = await self._llm.load_adapter(request)
        replaced = self._by_name.get(name)
        self._by_name[name] = loaded
        if replaced is not None:
            await self._llm.remove_lora(replaced.request.lora_int_id)
