"""Our router in the place that Serve has for routers: who is chosen, what is known of loads."""

from __future__ import annotations

import asyncio
import gc
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="replicas need Ray: make test-replicas installs it")
pytestmark = pytest.mark.slow

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID
from ray.serve.request_router import PendingRequest

from flexinfer.ray.calls import Call
from flexinfer.ray.request_router import CachedPrefixRouter

DEPLOYMENT = DeploymentID(name="replicas", app_name="app")
LONG = "".join(map(str, range(4000)))


def replicas(*names: str) -> list[Any]:
    async def get_queue_len(*, deadline_s: float) -> int:
        return 0

    return [
        SimpleNamespace(
            replica_id=ReplicaID(unique_id=name, deployment_id=DEPLOYMENT),
            replica_metadata={"capacity_tokens": 100_000},
            max_ongoing_requests=10,
            get_queue_len=get_queue_len,
        )
        for name in names
    ]


def pending(name: str, prompt: str = LONG, salt: str = "") -> PendingRequest:
    metadata: Any = SimpleNamespace(internal_request_id=name)
    return PendingRequest([Call({}, b"", prompt, salt)], {}, metadata)


async def choose(router: CachedPrefixRouter, asked: PendingRequest) -> str:
    """Whom it sends a request to, which is on its way then."""
    first, *_ = await router.choose_replicas(list(router.curr_replicas.values()), asked)
    router.on_request_routed(asked, first[0].replica_id, None)
    return str(first[0].replica_id.unique_id)


def test_prefixes_loads_and_deaths() -> None:
    async def scenario() -> None:
        router = CachedPrefixRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA)
        router.initialize_state()
        router.update_replicas(replicas("a", "b", "c"))
        home = await choose(router, pending("1"))
        other = await choose(router, pending("2", salt="tenant"))
        assert other != home  # it waits at home for the first one's answer
        for name in ("1", "2"):
            for replica in router.curr_replicas:
                router.on_request_completed(replica, name)
        assert [
            (load.num_requests, load.num_waiting_tokens) for load in router._loads.values()
        ] == [(0, 0)] * 3
        assert {await choose(router, pending(str(n), LONG + str(n))) for n in range(3, 6)} == {home}
        router.on_replica_actor_died(ReplicaID(unique_id=home, deployment_id=DEPLOYMENT))
        known = sum(router._index.num_blocks(number) for number in range(3))
        assert known == len(pending("", LONG).args[0].routed_prompt().blocks)  # the tenant's
        assert await choose(router, pending("7")) != home
        router.update_replicas(replicas("a", "b", "d"))
        assert set(router._loads) <= set(router._numbers.values())

    asyncio.run(scenario())


def test_who_is_on_the_way_counts() -> None:
    """Two are chosen for before either of them is accepted."""

    async def scenario() -> None:
        router = CachedPrefixRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA)
        router.initialize_state()
        router.update_replicas(replicas("a", "b"))
        offered = list(router.curr_replicas.values())
        asked = [pending(str(number), f"{number}{LONG}") for number in range(2)]
        chosen = [(await router.choose_replicas(offered, one))[0][0].replica_id for one in asked]
        assert len(set(chosen)) == 2
        (ranks,) = [await router.choose_replicas(offered, asked[0])]  # again: the first was full
        assert ranks[0][0].replica_id == chosen[0]  # its own booking is no load to itself
        router.on_request_routed(asked[0], chosen[1], None)
        loads = {replica_id: router._loads[router._numbers[replica_id]] for replica_id in chosen}
        assert [load.num_requests for load in loads.values()] == [0, 2]
        asked.clear()  # accepted, and cancelled before it was sent: Serve tells nobody
        gc.collect()
        await asyncio.sleep(0)
        assert loads[chosen[1]].num_requests == 1
        router.on_request_completed(chosen[0], "0")  # another one that had not accepted it
        assert loads[chosen[1]].num_requests == 1
        router.on_request_completed(chosen[1], "0")
        assert [(load.num_requests, load.num_waiting_tokens) for load in loads.values()] == [
            (0, 0)
        ] * 2
        assert not router._bookings

    asyncio.run(scenario())


def test_the_first_of_an_answer_takes_its_prompt_off_the_load() -> None:
    async def scenario() -> None:
        router = CachedPrefixRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA)
        router.initialize_state()
        router.update_replicas(replicas("a"))
        asked = pending("1")
        await choose(router, asked)
        (load,) = router._loads.values()
        assert load.num_waiting_tokens == len(LONG) // 4
        sent = pickle.loads(pickle.dumps(asked.args[0]))  # what travels calls nobody
        sent.on_answer()
        asked.args[0].on_answer()
        await asyncio.sleep(0)
        assert (load.num_waiting_tokens, load.num_requests) == (0, 1)

    asyncio.run(scenario())
