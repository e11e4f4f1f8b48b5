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
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from flexinfer.ray.calls import Call
from flexinfer.ray.named_replicas import NamedReplicas, with_names
from flexinfer.ray.options import ROUTERS
from flexinfer.ray.request_router import CachedPrefixRouter
from flexinfer.server.http.errors import APIError

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
            multiplexed_model_ids=set(),
            get_queue_len=get_queue_len,
        )
        for name in names
    ]


def full_for(num_probes: int) -> Any:
    """How long the queue of a replica is each time when it is asked."""
    lengths = iter([10] * num_probes)

    async def get_queue_len(*, deadline_s: float) -> int:
        return next(lengths, 0)

    return get_queue_len


def pending(
    name: str, prompt: str = LONG, salt: str = "", replica: str | None = None
) -> PendingRequest:
    metadata: Any = SimpleNamespace(
        internal_request_id=name, request_id=name, multiplexed_model_id="", call_method="answer"
    )
    return PendingRequest([Call({}, b"", prompt, salt, replica)], {}, metadata)


class LastOfAll(RequestRouter):  # type: ignore[misc]
    """Somebody else's router."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        return [candidate_replicas[-1:]]


def router_of(path: str) -> Any:
    """As Serve makes it in the gateway: from what was pickled."""
    router = with_names(path).get_request_router_class()
    made = router(deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA)
    made.initialize_state()
    return made


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


@pytest.mark.parametrize(
    "path", [ROUTERS["cached-prefix"], ROUTERS["power-of-two"], f"{__name__}.LastOfAll"]
)
def test_who_names_a_replica_gets_that_one_by_any_router(path: str) -> None:
    """Also while one is full at first, so that those who want it stand before all others."""

    async def scenario() -> None:
        router = router_of(path)
        assert isinstance(router, NamedReplicas)
        offered = replicas("a", "b", "c")
        offered[0].get_queue_len = full_for(5)
        router.update_replicas(offered)
        wanted = [name for name in "abc" for _ in range(5)]
        asked = [pending(str(i), replica=name) for i, name in enumerate(wanted)]
        others = [pending(f"other {i}") for i in range(15)]
        mixed = [one for pair in zip(asked, others, strict=True) for one in pair]
        chosen = await asyncio.gather(*map(router._choose_replica_for_request, mixed))
        assert [replica.replica_id.unique_id for replica in chosen[::2]] == wanted
        assert {one.args[0].replicas for one in mixed} == {("a", "b", "c")}
        router.update_replicas(replicas("a", "c"))
        gone = pending("gone", replica="b")
        taken = await router._choose_replica_for_request(gone)
        assert taken.replica_id.unique_id in gone.args[0].replicas == ("a", "c")

    asyncio.run(scenario())


def test_calls_for_one_that_hangs_keep_no_others_waiting() -> None:
    """More of them than Serve routes at the same time, and what is known of its queue is old."""

    async def scenario() -> None:
        router = router_of(ROUTERS["cached-prefix"])
        offered = replicas("a", "b")

        async def hang(*, deadline_s: float) -> int:
            await asyncio.Event().wait()
            raise AssertionError

        offered[0].get_queue_len = hang
        router.update_replicas(offered)
        asked = [pending(str(number), replica="a") for number in range(50)]
        others = [pending(f"other {number}", replica="b") for number in range(3)]
        chosen = await asyncio.wait_for(
            asyncio.gather(*map(router._choose_replica_for_request, [*asked, *others])), 60
        )
        assert [one.replica_id.unique_id for one in chosen] == ["a"] * 50 + ["b"] * 3

    asyncio.run(scenario())


def test_calls_for_one_request_are_told_apart() -> None:
    """Serve has one id for all of them."""

    async def scenario() -> None:
        router = router_of(ROUTERS["cached-prefix"])
        router.update_replicas(replicas("a", "b", "c"))
        asked = [pending("the same", replica=name) for name in "abc"]
        chosen = await asyncio.wait_for(
            asyncio.gather(*map(router._choose_replica_for_request, asked)), 60
        )
        assert [one.replica_id.unique_id for one in chosen] == ["a", "b", "c"]

    asyncio.run(scenario())


def test_one_that_is_named_and_full_is_told_of() -> None:
    async def scenario() -> None:
        router = router_of(ROUTERS["power-of-two"])
        offered = replicas("a", "b")
        router.update_replicas(offered)
        router.replica_queue_len_cache.update(offered[0].replica_id, 10)
        with pytest.raises(APIError, match="the queue of the replica a is full") as told:
            await router._choose_replica_for_request(pending("1", replica="a"))
        assert told.value.status_code == 429
        assert not router._pending_requests_by_id
        router.replica_queue_len_cache.update(offered[0].replica_id, 9)
        taken = await router._choose_replica_for_request(pending("1", replica="a"))
        assert taken.replica_id.unique_id == "a"

    asyncio.run(scenario())


def test_what_a_replica_keeps_is_the_beginning_of_nothing() -> None:
    async def scenario() -> None:
        router = router_of(ROUTERS["cached-prefix"])
        router.update_replicas(replicas("a", "b"))
        await choose(router, pending("1", replica="a"))
        (load,) = router._loads.values()
        assert (load.num_requests, load.num_waiting_tokens) == (1, len(LONG) // 4)
        assert not router._index.num_blocks(0)
        for replica in router.curr_replicas:
            router.on_request_completed(replica, "1")
        assert (load.num_requests, load.num_waiting_tokens) == (0, 0)

    asyncio.run(scenario())
