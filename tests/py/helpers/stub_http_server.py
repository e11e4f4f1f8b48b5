"""An HTTP server on this machine that says what a test has written down."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """JSON for a dict or list, server-sent events for a tuple, else text."""

    body: Any
    status: int = 200


@dataclass
class Loopback:
    """Replies by path; of several the first is used up first, the last one stays."""

    replies: dict[str, list[Reply]]
    url: str = ""
    seen: list[tuple[str, Any, dict[str, str]]] = field(default_factory=list)
    """(path, JSON body, headers) of each request."""

    def bodies(self, path: str) -> list[Any]:
        return [body for seen_path, body, _ in self.seen if seen_path == path]


def events(*pieces: str, usage: dict[str, Any] | None = None) -> Reply:
    """A streamed chat answer."""
    chunks: list[Any] = [{"choices": [{"delta": {"role": "assistant"}}]}]
    chunks += [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
    chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    if usage is not None:
        chunks.append({"choices": [], "usage": usage})
    return Reply(tuple(chunks))


@contextmanager
def loopback(replies: dict[str, Reply | Sequence[Reply]]) -> Iterator[Loopback]:
    state = Loopback({p: [r] if isinstance(r, Reply) else list(r) for p, r in replies.items()})
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            with lock:
                state.seen.append((self.path, body, dict(self.headers)))
                left = state.replies.get(self.path, [Reply({"error": {"message": "no"}}, 404)])
                reply = left[0] if len(left) == 1 else left.pop(0)
            self.send_response(reply.status)
            is_stream = isinstance(reply.body, tuple)
            self.send_header("Content-Type", "text/event-stream" if is_stream else "text/plain")
            self.end_headers()
            if is_stream:
                for event in reply.body:
                    self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                self.wfile.write(b"data: [DONE]\n\n")
            else:
                text = reply.body if isinstance(reply.body, str) else json.dumps(reply.body)
                self.wfile.write(text.encode())

        do_GET = do_POST = _answer  # noqa: N815  the names that http.server wants

        def log_message(self, *_: object) -> None:
            pass

    with served(Handler) as state.url:
        yield state


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Where requests are answered by it, in threads."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
