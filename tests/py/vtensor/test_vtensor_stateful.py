"""The manager against a plain Python model, by random operations: `helpers/manager_machine.py`.

CI runs some 30 s of it. For longer: ``HYPOTHESIS_PROFILE=long`` (an hour), or
``VTENSOR_STATEFUL_EXAMPLES=N`` sequences of operations for each configuration.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from flexinfer.vtensor import KVGroup
from helpers.manager_machine import ManagerMachine
from helpers.modelled_kv import Setup
from helpers.state_machine import StateMachine

pytestmark = pytest.mark.usefixtures("kv_device")

SETUPS = {
    # 1 KiB and 2 KiB a token and plane: 4 and 2 tokens per chunk, all borders met often
    "dense-4k": Setup(4096, layers_per_plane=1, heads_x_dim=(4, 64), budget_chunks=120),
    "interleaved-4k": Setup(4096),
    "interleaved-16k": Setup(16384),
    "dense-64k": Setup(65536, layers_per_plane=1, heads_x_dim=(8, 128), budget_chunks=40),
    # a token straddles two chunks: 3 x 100 x 4 bytes x 4 = 4800 bytes, more than a chunk
    "straddling-4k": Setup(4096, heads_x_dim=(3, 100), budget_chunks=160),
    "straddling-8k": Setup(8192, heads_x_dim=(3, 100), budget_chunks=70),
    "half-straddling": Setup(4096, dtype="float16", heads_x_dim=(3, 60)),
    "tight": Setup(4096, budget_chunks=24, max_requests=4),
    "no-park": Setup(4096, park=False),
    "recycling": Setup(4096, idle_chunks=8),
    "no-alias": Setup(4096, alias=False),
    "scrub-tenant": Setup(4096, scrub="tenant"),
    "scrub-off": Setup(4096, scrub="off", layers_per_plane=1, budget_chunks=120),
    # rows of 8 + 8 + 3 + 1 chunks for 32 tokens, and of 3 for 3.4
    "groups": Setup(
        4096,
        groups=(KVGroup((1,), 4, 64, 64), KVGroup((0,), 2, 96, 32, "float16")),
        budget_chunks=160,
    ),
    "window": Setup(4096, groups=(KVGroup((0,), 2, 64, 64), KVGroup((1,), 2, 64, 64, window=10))),
    "window-no-alias": Setup(
        4096,
        groups=(KVGroup((0,), 2, 64, 64), KVGroup((1,), 2, 64, 64, window=10)),
        alias=False,
    ),
    "windows-alone": Setup(
        4096,
        groups=(KVGroup((0,), 3, 100, 100, window=7), KVGroup((1,), 1, 300, 0, window=20)),
        budget_chunks=100,
    ),
    # a layer that keeps all, and windows of two lengths and widths beside it
    "windows-and-widths": Setup(
        4096,
        groups=(
            KVGroup((1,), 2, 64, 64),
            KVGroup((0,), 4, 64, 64, window=7),
            KVGroup((2,), 1, 96, 32, "float16", window=20),
        ),
        budget_chunks=200,
    ),
    "latent-straddling": Setup(
        4096, groups=(KVGroup((0,), 3, 100, 100), KVGroup((1,), 1, 300, 0)), budget_chunks=120
    ),
}


WITH_STATES = {
    "states": Setup(4096, max_requests=8, budget_chunks=80),
    "states-dense-no-park": Setup(
        4096, layers_per_plane=1, max_requests=8, budget_chunks=120, park=False
    ),
    "states-beside-windows": Setup(
        4096,
        groups=(
            KVGroup((0,), 2, 64, 64),
            KVGroup((1,), 1, 96, 32, "float16", window=10),
            KVGroup((2,), 3, 100, 100, window=25),
        ),
        max_requests=8,
        budget_chunks=240,
    ),
}


def _machine_settings() -> settings:
    examples = os.environ.get("VTENSOR_STATEFUL_EXAMPLES")
    if examples is not None:
        return settings(max_examples=int(examples), stateful_step_count=60)
    if os.environ.get("HYPOTHESIS_PROFILE") == "long":
        return settings(max_examples=1000, stateful_step_count=100)
    return settings(max_examples=30, stateful_step_count=40)


@pytest.mark.parametrize("name", SETUPS)
def test_the_manager_behaves_as_the_model(name: str) -> None:
    machine = type(f"ManagerMachine_{name}", (ManagerMachine,), {"setup": SETUPS[name]})
    run_state_machine_as_test(machine, settings=_machine_settings())


@pytest.mark.parametrize("name", WITH_STATES)
def test_states_beside_kv_are_what_was_written_last(name: str) -> None:
    machine = type(f"StateMachine_{name}", (StateMachine,), {"setup": WITH_STATES[name]})
    run_state_machine_as_test(machine, settings=_machine_settings())
