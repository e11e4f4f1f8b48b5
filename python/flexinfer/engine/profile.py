"""StepProfiler: where the time of an engine's steps goes, part by part.

Parts nest, and time counts for the innermost one: what the layers take is not in "forward". It
hooks into one engine while it is open, and costs about a microsecond per part. Decoder layers that
are one call (`layers/decoder_kernel.py`) are taken apart for that time, which costs a decode step
0.12 ms for each. Modules of the model are told apart by their class names; what an attention module
does besides its projections and the attention itself is rotary embedding and reshaping.

A compiled model is one part: hooks on its modules would break its graph. On a GPU each part waits
for the device: the sum then is more than a step takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from flexinfer.engine.detokenizer import IncrementalDetokenizer
from flexinfer.engine.llm_engine import LLMEngine
from flexinfer.engine.work import Work, attention_work, linear_work

PARTS = (
    "schedule",
    "extend",
    "pre-extend",
    "inputs",
    "linear",
    "attention",
    "norm",
    "rotary",
    "embedding",
    "other layers",
    "sampling",
    "detokenise",
    "outputs",
    "rest of the step",
)


@dataclass(slots=True)
class PartTime:
    seconds: float = 0.0
    num_calls: int = 0
    work: Work = field(default_factory=Work)

    def add(self, other: PartTime) -> None:
        self.seconds += other.seconds
        self.num_calls += other.num_calls
        self.work.add(other.work)


@dataclass(slots=True)
class StepProfile:
    """Time of some steps of one kind."""

    num_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    parts: dict[str, PartTime] = field(default_factory=lambda: {p: PartTime() for p in PARTS})

    def as_dict(self) -> dict[str, Any]:
        """Per step: milliseconds, 10^9 operations and 10^6 bytes; shares of the whole. Linear
        layers and attention alone have operations and bytes."""
        steps = max(1, self.num_steps)
        return {
            "num_steps": self.num_steps,
            "tokens_per_step": self.num_tokens / steps,
            "step_ms": 1e3 * self.seconds / steps,
            "parts": {
                name: {
                    "ms": 1e3 * part.seconds / steps,
                    "share": part.seconds / self.seconds if self.seconds else 0.0,
                    "calls": part.num_calls / steps,
                    "gflop": part.work.flops / 1e9 / steps,
                    "mbytes": part.work.num_bytes / 1e6 / steps,
                }
                for name, part in self.parts.items()
            },
        }


class StepProfiler:
    """with StepProfiler(engine) as profiler: engine.step(); ...

    Steps that compute prompts and steps that only decode are told apart.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.prefill = StepProfile()
        """Steps with at least one token of a prompt."""
        self.decode = StepProfile()
        self._engine = engine
        self._device = engine.loaded.device
        self._hooks = ExitStack()
        self._open: list[str] = []
        self._now: dict[str, PartTime] = {}
        self._mark_s = 0.0

    def __enter__(self) -> StepProfiler:
        engine = self._engine
        runner, scheduler = engine.runner, engine.scheduler
        self._wrap_step()
        self._wrap(scheduler, "schedule", "schedule")
        self._wrap(engine.manager, "try_extend", "extend")
        self._wrap(scheduler, "pre_extend", "pre-extend")
        self._wrap(runner.inputs, "build", "inputs")
        self._wrap(runner, "forward", "other layers")
        self._wrap(runner.backend, "forward", "attention", self._attention_work)
        self._wrap(runner, "sample", "sampling")
        self._wrap(IncrementalDetokenizer, "append", "detokenise")
        self._wrap(engine, "_outputs", "outputs")
        if not engine.config.compile:
            self._watch_modules(engine.loaded.model)
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.close()

    def _wrap_step(self) -> None:
        """The step itself: sorts what was measured by its kind."""
        step = self._engine.step
        meter = self._engine

        def timed_step() -> Any:
            self._now = {name: PartTime() for name in PARTS}
            before = meter.last_step
            with self._part("rest of the step"):
                outputs = step()
            last = meter.last_step
            if last is not None and last is not before:
                self._add(self.prefill if last.num_prefill_tokens else self.decode, last.num_tokens)
            return outputs

        self._set(self._engine, "step", timed_step)

    def _add(self, profile: StepProfile, num_tokens: int) -> None:
        profile.num_steps += 1
        profile.num_tokens += num_tokens
        for name, part in self._now.items():
            profile.seconds += part.seconds
            profile.parts[name].add(part)

    def _wrap(
        self, owner: Any, name: str, part: str, work: Callable[..., Work] | None = None
    ) -> None:
        """Time `owner.name` as `part`; `work` is told its arguments."""
        call = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if work is not None:
                self._count(part, work(*args))
            with self._part(part):
                return call(*args, **kwargs)

        self._set(owner, name, timed)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        """Put `value` in the place of a method or an attribute, until the end."""
        own = vars(owner).get(name)
        setattr(owner, name, value)
        if own is None:
            self._hooks.callback(delattr, owner, name)
        else:
            self._hooks.callback(setattr, owner, name, own)

    def _watch_modules(self, model: torch.nn.Module) -> None:
        for module in model.modules():
            if getattr(module, "runs_parts", None) is False:  # a OneCallLayer
                self._set(module, "runs_parts", True)
            part = part_of(module)
            if part is None:
                continue
            before = module.register_forward_pre_hook(partial(self._enter, part))
            after = module.register_forward_hook(lambda *_: self._pop())
            self._hooks.callback(before.remove)
            self._hooks.callback(after.remove)

    def _enter(self, part: str, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if part == "linear":
            self._count(part, linear_work(module, args[0]))
        self._push(part)

    def _attention_work(
        self, layer_idx: int, query: torch.Tensor, _key: Any, _value: Any, *rest: Any
    ) -> Work:
        return attention_work(self._engine.runner.backend.layers[layer_idx], query, *rest)

    def _count(self, part: str, work: Work) -> None:
        if self._now:
            self._now[part].work.add(work)

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        self._push(name)
        try:
            yield
        finally:
            self._pop()

    def _push(self, name: str) -> None:
        self._charge()
        self._open.append(name)
        if self._now:
            self._now[name].num_calls += 1

    def _pop(self) -> None:
        self._charge()
        self._open.pop()

    def _charge(self) -> None:
        """The time since the last mark belongs to the innermost open part."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now_s = time.perf_counter()
        if self._open and self._now:
            self._now[self._open[-1]].seconds += now_s - self._mark_s
        self._mark_s = now_s


def part_of(module: torch.nn.Module) -> str | None:
    """The part that a module's own time belongs to; None: that of the module around it."""
    name = type(module).__name__.lower()
    if "linear" in name or name in ("conv1d", "packedgatedmlp"):
        return "linear"  # its activation is part of the products
    if "norm" in name:
        return "norm"
    if "rotary" in name:
        return "rotary"
    if "embedding" in name:
        return "embedding"
    if "attention" in name:
        return "rotary"
    if "mlp" in name or "layer" in name:
        return "other layers"
    return None
