"""Recurrent states beside KV, for the random operations of `helpers/manager_machine.py`.

A state is a vTensor of fixed length whose bytes are replaced: in place, or where a snapshot or a
fork shows them too, in a fresh vTensor. A snapshot is a prefix of numbers below 0, found whole or
not used. Whatever else the manager is doing, each state shows the number written last.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from flexinfer.errors import OutOfMemoryError
from flexinfer.vtensor import VTensor
from helpers.manager_machine import ManagerMachine, salts

STATE_TOKENS = 12


@dataclass
class State:
    vtensor: VTensor
    salt: str
    number: int = 0
    is_shared: bool = False
    is_swapped: bool = False


class StateMachine(ManagerMachine):
    """REQUIRES: a layer that keeps all, where states lie."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[State] = []
        self.snapshots: list[tuple[str, int]] = []
        self.numbers = count(1)

    @property
    def num_taken_slots(self) -> int:
        return len(self.live) + len(self.states)

    @property
    def settled(self) -> list[State]:
        return [state for state in self.states if not state.is_swapped]

    def pick_state(self, index: int) -> State:
        return self.settled[index % len(self.settled)]

    def lasting_views(self, state: State) -> list[Any]:
        """K and V of the layers that keep all: elsewhere a state has no bytes."""
        views = []
        for layer in range(self.spec.num_layers):
            if self.spec.group_of(layer).window is None:
                arenas = (self.manager.k(layer), self.manager.v(layer))
                views += [arena[state.vtensor.slot, :STATE_TOKENS] for arena in arenas]
        return views

    def target(self, salt: str) -> VTensor | None:
        """An empty vTensor for a state; None: slots or memory are short."""
        vtensor = self.manager.try_create(cache_salt=salt)
        if vtensor is None:
            assert self.num_taken_slots == self.setup.max_requests
        elif not vtensor.try_extend(STATE_TOKENS):
            vtensor.release()
            return None
        return vtensor

    def put(self, state: State) -> None:
        """Writes as a step does, through the arena: all of the state."""
        state.number = next(self.numbers)
        for view in self.lasting_views(state):
            view[:] = state.number
        self.computed[state.salt].add(float(state.number))

    # ------------------------------------------------------------------------------------ rules

    @rule(salt=salts)
    def first_state(self, salt: str) -> None:
        vtensor = self.target(salt)
        if vtensor is not None:
            self.states.append(State(vtensor, salt))
            self.put(self.states[-1])

    @precondition(lambda self: self.settled)
    @rule(index=st.integers(0, 9))
    def replace_state(self, index: int) -> None:
        state = self.pick_state(index)
        if state.is_shared:
            vtensor = self.target(state.salt)
            if vtensor is None:
                return
            state.vtensor.release()
            state.vtensor, state.is_shared = vtensor, False
        self.put(state)

    @precondition(lambda self: self.settled)
    @rule(index=st.integers(0, 9))
    def take_snapshot(self, index: int) -> None:
        state = self.pick_state(index)
        assert state.vtensor.record_prefix(self.key(state.number)) <= STATE_TOKENS
        state.is_shared = True
        self.snapshots.append((state.salt, state.number))

    def key(self, number: int) -> list[int]:
        return [-number] * STATE_TOKENS

    @precondition(lambda self: self.snapshots)
    @rule(index=st.integers(0, 9))
    def open_snapshot(self, index: int) -> None:
        salt, number = self.snapshots[index % len(self.snapshots)]
        if self.manager.match_prefix(self.key(number), salt) < STATE_TOKENS:
            assert self.may_have_evicted
            self.snapshots.remove((salt, number))
            return
        vtensor = self.manager.try_create(self.key(number), cache_salt=salt)
        if vtensor is None:
            assert self.num_taken_slots == self.setup.max_requests or not self.setup.alias
            return
        assert vtensor.num_cached_tokens == STATE_TOKENS
        self.states.append(State(vtensor, salt, number, is_shared=True))

    @precondition(lambda self: self.settled)
    @rule(index=st.integers(0, 9))
    def fork_state(self, index: int) -> None:
        state = self.pick_state(index)
        try:
            vtensor = state.vtensor.fork()
        except OutOfMemoryError:
            assert self.num_taken_slots == self.setup.max_requests or not self.setup.alias
            return
        state.is_shared = True
        self.states.append(State(vtensor, state.salt, state.number, is_shared=True))

    @precondition(lambda self: self.states)
    @rule(index=st.integers(0, 9))
    def swap_state(self, index: int) -> None:
        """Out, or in again."""
        state = self.states[index % len(self.states)]
        if state.is_swapped:
            state.is_swapped = not state.vtensor.try_swap_in()
        else:
            state.is_swapped = state.vtensor.try_swap_out()

    @precondition(lambda self: self.states)
    @rule(index=st.integers(0, 9))
    def release_state(self, index: int) -> None:
        self.states.pop(index % len(self.states)).vtensor.release()

    @rule()
    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        self.snapshots = []

    # ------------------------------------------------------------------------------- invariants

    @invariant()
    def states_show_what_was_written_last(self) -> None:
        for state in self.settled:
            for view in self.lasting_views(state):
                assert (view == state.number).all()

    def teardown(self) -> None:
        for state in self.states:
            state.vtensor.release()
        self.states = []
        super().teardown()
