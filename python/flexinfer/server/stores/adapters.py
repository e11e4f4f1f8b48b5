"""ServedAdapters: the LoRA adapters that requests choose by name. For one event loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from flexinfer.async_llm import AsyncLLM
from flexinfer.lora.request import LoRARequest
from flexinfer.server.http.errors import APIError, bad_request
from flexinfer.server.settings import ServerSettings


class ServedAdapters:
    """
    Invariant: the engine has loaded those that are here, or is about to.
    """

    def __init__(self, llm: AsyncLLM, settings: ServerSettings) -> None:
        """Without adapters, until they are loaded."""
        self._llm = llm
        self._model_names = settings.served_model_names
        self._ids = count(1)
        self._by_name: dict[str, LoRARequest] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def get(self, name: str | None) -> LoRARequest | None:
        """None for the name of the model itself."""
        return None if name is None else self._by_name.get(name)

    async def load_all(self, modules: Sequence[tuple[str, str]]) -> None:
        """Raises ValueError for a (name, folder) that cannot be served."""
        for name, folder in modules:
            request = LoRARequest(name, next(self._ids), folder)
            await self._llm.add_lora(request)
            self._by_name[name] = request

    async def load(self, name: str, folder: str) -> None:
        """Raises APIError for a name that is taken, and for what cannot be served."""
        if name in self._by_name or name in self._model_names:
            raise bad_request(f"the name {name!r} is taken: unload that adapter first", "lora_name")
        try:
            request = LoRARequest(name, next(self._ids), folder)
            self._by_name[name] = request  # from now on the name is taken
            await self._llm.add_lora(request)
        except ValueError as error:
            self._by_name.pop(name, None)
            raise bad_request(str(error)) from None

    async def unload(self, name: str) -> None:
        """Requests that have chosen it are served to their end. Raises APIError for none here."""
        request = self._by_name.pop(name, None)
        if request is None:
            raise APIError(
                404,
                f"there is no adapter {name!r}; loaded: {', '.join(map(repr, self._by_name))}",
                param="lora_name",
                code="adapter_not_found",
            )
        await self._llm.remove_lora(request.lora_int_id)

    async def kv_salt(self, cache_salt: str, request: LoRARequest | None) -> str:
        """Under which the prefixes of such requests are recorded."""
        if request is None or self._by_name.get(request.lora_name) is not request:
            return cache_salt  # nobody can go on with an adapter that was unloaded
        return await self._llm.call(lambda engine: engine.kv_salt(cache_salt, request))
