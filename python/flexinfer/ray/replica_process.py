"""ReplicaProcess: the process of a replica, from its start by Ray to its end."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from typing import TYPE_CHECKING

from ray import serve

from flexinfer.async_llm import AsyncLLM
from flexinfer.ray.replica import EngineReplica
from flexinfer.server.observability.logs import adopt_transformers, configure_logging

if TYPE_CHECKING:
    from flexinfer.config import EngineConfig
    from flexinfer.server.settings import ServerSettings

logger = logging.getLogger(__name__)


class ReplicaProcess(EngineReplica):
    """Its name is Ray's, which Ray's logs have, too."""

    def __init__(self, config: EngineConfig, settings: ServerSettings) -> None:
        configure_logging("text", "info")
        adopt_transformers()
        name = serve.get_replica_context().replica_id.unique_id
        super().__init__(AsyncLLM.from_engine_args(config), settings, name)
        threading.Thread(target=self._end_with_engine, name="flexinfer-end", daemon=True).start()

    def _end_with_engine(self) -> None:
        """A process whose engine has failed ends: to routers it would be the one that has least to
        do, until Serve has found its health bad three times."""
        self._llm.join()
        if self._llm.errored:
            logger.critical("%s ends with its engine: Ray starts another replica", self.name)
            os._exit(1)

    async def __del__(self) -> None:
        if hasattr(self, "_app"):
            tracer = self._app.state.flexinfer.tracer
            if tracer is not None:
                await asyncio.to_thread(tracer.shutdown)
            await asyncio.to_thread(self._llm.shutdown)
