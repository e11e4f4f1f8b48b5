"""Random operations on a manager, contents compared with plain tensors after each."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from flexinfer.vtensor import VTensor
from helpers.gpu_kit import SPEC, Arena, Kit, with_layout

VOCAB_SIZE = 50
NUM_STEPS = {"cpu": 60, "cuda": 400}


class TokenKV:
    """KV as a function of token, position and plane, so that equal prompts have equal KV."""

    def __init__(self, kit: Kit) -> None:
        shape = (VOCAB_SIZE, SPEC.num_kv_heads, SPEC.head_dim)
        self.table = torch.rand(shape, generator=kit.generator, device=kit.device)
        self.planes = torch.arange(2 * SPEC.num_layers, device=kit.device).view(-1, 1, 1, 1)

    def of(self, tokens: list[int], start: int = 0) -> torch.Tensor:
        """[planes, len(tokens), heads, dim], the first token at position `start`."""
        device = self.table.device
        positions = torch.arange(start, start + len(tokens), device=device).view(1, -1, 1, 1)
        rows = self.table[torch.tensor(tokens, dtype=torch.int64, device=device)]
        return rows[None] + positions + 10_000 * self.planes


@dataclass
class Live:
    """A vTensor and the tokens whose KV it holds."""

    vtensor: VTensor
    tokens: list[int]


class Run:
    """A manager under random operations, and its model."""

    def __init__(self, kit: Kit, layers_per_plane: int, rng: random.Random) -> None:
        spec = with_layout(layers_per_plane)
        self.kit = kit
        self.rng = rng
        self.kv = TokenKV(kit)
        self.manager = kit.manager(spec, chunks=24 * spec.num_planes, swap_space="1GiB")
        self.arena = Arena(self.manager)
        self.row = kit.row_tokens(self.manager)
        self.live: list[Live] = []
        self.prompts: list[list[int]] = []

    def create(self) -> None:
        """A new request, often one that continues a recorded prompt."""
        tokens = [self.rng.randrange(VOCAB_SIZE) for _ in range(self.rng.randint(1, 2 * self.row))]
        if self.prompts and self.rng.random() < 0.7:
            prefix = self.rng.choice(self.prompts)
            tokens = prefix[: self.rng.randint(1, len(prefix))] + tokens
        tokens = tokens[: SPEC.max_seq_len]
        vtensor = self.manager.try_create(tokens)
        if vtensor is not None:
            cached = vtensor.num_cached_tokens
            self.live.append(Live(vtensor, tokens[:cached]))
            self.grow(self.live[-1], tokens[cached:])

    def grow(self, item: Live, tokens: list[int]) -> None:
        """Extend by tokens and write their KV in a step; released when memory is short."""
        start, end = len(item.tokens), len(item.tokens) + len(tokens)
        if end > SPEC.max_seq_len or not tokens:
            return
        if not item.vtensor.try_extend(end):
            self.release(item)
            return
        with self.kit.step(self.manager):
            self.arena.store(item.vtensor, start, self.kv.of(tokens, start))
        item.tokens = item.tokens + tokens

    def decode(self) -> None:
        for item in list(self.live):
            self.grow(item, [self.rng.randrange(VOCAB_SIZE)])

    def fork(self) -> None:
        item = self.rng.choice(self.live)
        if self.manager.num_free_slots:
            self.live.append(Live(item.vtensor.fork(), item.tokens))

    def record(self) -> None:
        item = self.rng.choice(self.live)
        if item.vtensor.record_prefix(item.tokens):
            self.prompts.append(item.tokens)

    def release(self, item: Live | None = None) -> None:
        item = item or self.rng.choice(self.live)
        self.live.remove(item)
        item.vtensor.release()

    def swap(self) -> None:
        """Contents out and in again."""
        item = self.rng.choice(self.live)
        if item.vtensor.try_swap_out() and not item.vtensor.try_swap_in(item.tokens):
            self.release(item)

    def check(self) -> None:
        self.manager.check_integrity()
        for item in self.live:
            got = self.arena.read(item.vtensor, 0, len(item.tokens))
            assert torch.equal(got, self.kv.of(item.tokens)), f"{item.vtensor} shows other data"

    def step(self) -> None:
        operations = [self.create, self.decode]
        if self.live:
            operations += [self.decode, self.fork, self.record, self.release, self.swap]
        self.rng.choice(operations)()
        if self.rng.random() < 0.05:
            self.manager.trim()


@pytest.mark.parametrize("layers_per_plane", [1, SPEC.num_layers])
@pytest.mark.parametrize("seed", range(2))
def test_contents_are_always_those_that_were_written(
    kit: Kit, seed: int, layers_per_plane: int
) -> None:
    run = Run(kit, layers_per_plane, random.Random(seed))
    for _ in range(NUM_STEPS[kit.device]):
        run.step()
        run.check()
    assert run.manager.stats().chunks_aliased > 0
