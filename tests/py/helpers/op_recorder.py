"""OpRecorder: a CUDA graph on the CPU. Operators are recorded with their tensors and run again.

As in a graph, only what operators do is repeated: Python between them ran once, and a number that
it took from a tensor stays as it was. Outputs are written where they first were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flexinfer.attention.hook import attention_operator, register


class OpRecorder:
    """`flexinfer.runner.cuda_graphs.Recorder`."""

    def __init__(self) -> None:
        self.num_records = 0
        self.num_replays = 0

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        self.num_records += 1
        function()  # the warm-up, as on a GPU: what it leaves in caches must do no harm
        with _Tape() as tape:
            function()

        def replay() -> None:
            self.num_replays += 1
            tape.replay()

        return replay


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        register()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.flexinfer.attention.default:
            with self:  # it is made of operators, like everything on a GPU
                return attention_operator(*args, **kwargs)
        assert func is not torch.ops.aten._local_scalar_dense.default, "a graph cannot ask"
        output = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, output))
        return output

    def replay(self) -> None:
        for func, args, kwargs, output in self.calls:
            again = func(*args, **kwargs)
            for new, old in zip(tree_leaves(again), tree_leaves(output), strict=True):
                if isinstance(old, torch.Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)
