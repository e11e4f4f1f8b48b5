"""Two ranks of a gloo group, in two threads of this process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from flexinfer.handover.planes import Peer


@contextmanager
def gloo_pair() -> Iterator[tuple[Peer, Peer]]:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        making = [
            threads.submit(dist.ProcessGroupGloo, store, rank, 2, timedelta(seconds=20))
            for rank in (0, 1)
        ]
        first, second = (made.result() for made in making)
    yield Peer(first, 1), Peer(second, 0)
    del first, second, making, store
    gc.collect()  # their sockets: others count open files


def together(send: Callable[[], Any], receive: Callable[[], Any]) -> tuple[Any, Any]:
    """What both came to: a result or an error."""

    def outcome(act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Exception as error:
            return error

    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(outcome, send)
        received = outcome(receive)
        return sending.result(), received
