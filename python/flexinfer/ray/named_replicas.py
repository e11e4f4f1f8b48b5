"""NamedReplicas: any router of Serve's, but a call that names its replica goes there alone.

The names are Ray's own, which its logs have, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray import cloudpickle
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from flexinfer.ray.calls import Call
from flexinfer.server.http.errors import APIError


class NamedReplicas:
    """Stands before a RequestRouter among the bases of a class."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The one that is named, and no other while it is there. One that has gone is told of by
        whoever the router chooses."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        for call in calls_of(pending_request):
            call.replicas = tuple(sorted(by_name))
            if call.replica in by_name:
                self._send(pending_request, by_name[call.replica])
                return [[by_name[call.replica]]]
        chosen: Any = super()
        ranks: list[list[RunningReplica]] = await chosen.choose_replicas(
            candidate_replicas, pending_request
        )
        return ranks

    def _send(self: Any, pending: Any, replica: RunningReplica) -> None:
        """At once, or never. Serve would ask for the length of its queue until it is told: a few
        calls for a replica that hangs would keep it from routing any other. By the call itself:
        Serve's id of it is that of all calls for one request."""
        pending.routing_context.should_backoff = True
        if pending.future.done():
            return
        if self.select_available_replicas([replica]):
            pending.future.set_result(replica)
        else:
            pending.future.set_exception(_full(replica.replica_id.unique_id))
        self._remove_pending_request_from_indices(pending)

    def _fulfill_next_pending_request(self, replica: Any, request_metadata: Any = None) -> None:
        """Gives a replica to the request for which it was chosen. Power-of-two's gives it to the
        one that has waited longest, which may have named another."""
        RequestRouter._fulfill_next_pending_request(self, replica, request_metadata)


def _full(name: str) -> APIError:
    reason = f"too many requests: the queue of the replica {name} is full; try again"
    return APIError(429, reason, code="queue_full", headers={"Retry-After": "1"})


def with_names(path: str) -> RequestRouterConfig:
    """For the router of this path, `package.module.Class`."""
    config = RequestRouterConfig(request_router_class=path)
    router: Any = config.get_request_router_class()

    class Named(NamedReplicas, router):  # type: ignore[misc]
        pass

    Named.__name__ = Named.__qualname__ = f"Named{router.__name__}"
    config.set_serialized_request_router_cls(cloudpickle.dumps(Named))
    return config


def calls_of(pending: PendingRequest | None) -> Sequence[Call]:
    return [] if pending is None else [arg for arg in pending.args if isinstance(arg, Call)]
