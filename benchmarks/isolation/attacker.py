"""The attacking tenant, a process of its own: several connections that attack as fast as they can.

With `--sink` it sends the same bytes to itself: what its own work takes of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterator

from attacks import NAMES, ORDINARY, SLOW, endless

NUM_CONNECTIONS = 4
NUM_SLOW = 300
BYTE_EVERY_S = 0.2
ORDINARY_PAUSE_S = 0.5
"""8 requests a second: as many valid ones as the attack with metadata comes to."""
ANSWER = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\n{}"

Answers = Counter[str]


async def attack(port: int, requests: Iterator[bytes], answers: Answers, pause_s: float) -> None:
    """One connection after the other, since a refusal may close it."""
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                while True:
                    writer.write(next(requests))
                    await writer.drain()
                    answers[await read_answer(reader)] += 1
                    await asyncio.sleep(pause_s)
            finally:
                writer.close()


async def read_answer(reader: asyncio.StreamReader) -> str:
    """The status of an answer, which is read to its end."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    length = next(
        int(line.partition(":")[2])
        for line in head.splitlines()
        if line.lower().startswith("content-length:")
    )
    await reader.readexactly(length)
    return head.split(" ", 2)[1]


async def crawl(port: int, answers: Answers) -> None:
    """A request that never gets ready, and anew when the server has enough of it."""
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            answers["connected"] += 1
            try:
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
                while not writer.is_closing():
                    writer.write(b"a")
                    await asyncio.sleep(BYTE_EVERY_S)
            finally:
                writer.close()


async def sink(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reads requests, and refuses them."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            length = int(head.partition("Content-Length: ")[2].partition("\r")[0])
            await reader.readexactly(length)
            writer.write(ANSWER)


async def run(name: str, port: int, key: str, seconds: float, *, to_sink: bool) -> Answers:
    answers: Answers = Counter()
    requests = iter(()) if name == SLOW else endless(name, key)
    async with contextlib.AsyncExitStack() as stack:
        if to_sink:
            server = await asyncio.start_server(sink, "127.0.0.1", 0, limit=1 << 20)
            await stack.enter_async_context(server)
            port = server.sockets[0].getsockname()[1]
        if name == SLOW:
            work = [crawl(port, answers) for _ in range(NUM_SLOW)]
        else:
            pause_s = ORDINARY_PAUSE_S if name == ORDINARY else 0.0
            work = [attack(port, requests, answers, pause_s) for _ in range(NUM_CONNECTIONS)]
        tasks = [asyncio.ensure_future(one) for one in work]
        print("ready", flush=True)
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--sink", action="store_true")
    args = parser.parse_args()
    answers = asyncio.run(run(args.name, args.port, args.key, args.seconds, to_sink=args.sink))
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
