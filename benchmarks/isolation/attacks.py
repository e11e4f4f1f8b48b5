"""Attacks: what a tenant may send that hurts most, as bytes that are made before the clock runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import cycle

HELLO = [{"role": "user", "content": "hello"}]
MIB = 1 << 20


def request(path: str, body: bytes, key: str) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _filled(before: str, item: str, after: str, num_bytes: int) -> bytes:
    number = (num_bytes - len(before) - len(after)) // (len(item) + 1)
    return (before + ",".join([item] * number) + after).encode()


def bodies(key: str) -> list[bytes]:
    """As large as bodies may be, and as slow to read as they may be."""
    chat = '{"messages":[{"role":"user","content":'
    small = [
        _filled(chat + "[", '{"type":"text","text":"a"}', "]}]}", 400_000),
        _filled('{"messages":[', '{"role":"assistant","content":"a"}', "]}", 270_000),
    ]
    large = [
        _filled(chat + "[", '{"type":"text","text":"a"}', "]}]}", 8 * MIB - 100),
        _filled(chat + '"a"}],"chat_template_kwargs":{"a":[', "[]", "]}}", 8 * MIB - 100),
        (chat + '"' + "word " * (8 * MIB // 5 - 100) + '"}]}').encode(),
    ]
    ids = _filled('{"max_tokens":1,"prompt":[', "1", "]}", 500_000)
    items = _filled('{"input":[', '{"role":"x"}', "]}", 200_000)
    return [
        *(request("/v1/chat/completions", body, key) for body in [*small, *large]),
        request("/v1/completions", ids, key),
        request("/v1/responses", items, key),
        request("/tokenize", json.dumps({"prompt": "word " * (MIB // 5)}).encode(), key),
        request("/detokenize", json.dumps({"tokens": [5] * 65_000}).encode(), key),
    ]


def grammars(key: str) -> list[bytes]:
    """None twice, nor in two runs, so that none is found compiled."""
    made = []
    first = time.time_ns() // 1_000_000
    for number in range(first, first + 120):
        kinds: list[dict[str, object]] = [
            {"choice": [f"option {number} {i}" for i in range(2000)]},
            {"regex": f"((((([a-z]{{1,30}}){{1,30}}){{1,30}}){{1,30}}){{1,30}}){number}"},
            {"json": {"properties": {f"p{number}_{i}": {"pattern": "^a+$"} for i in range(300)}}},
        ]
        for kind in kinds:
            body = {"messages": HELLO, "max_tokens": 2, "structured_outputs": kind}
            made.append(request("/v1/chat/completions", json.dumps(body).encode(), key))
    return made


def metadata(key: str) -> list[bytes]:
    """Refused where it is large, stored where it is as large as it may be."""
    large = {"input": "a", "max_output_tokens": 1, "metadata": {"a": "x" * (7 * MIB)}}
    full = {
        "input": "a",
        "max_output_tokens": 1,
        "metadata": {str(i): "x" * 512 for i in range(16)},
    }
    return [request("/v1/responses", json.dumps(body).encode(), key) for body in (large, full)]


def conversations(key: str) -> list[bytes]:
    """More, and larger ones, than a tenant may keep."""
    sizes = (7 * MIB, 100_000, 10)
    texts = [[{"role": "user", "content": "y" * size}] for size in sizes]
    return [
        request("/v1/conversations", json.dumps({"messages": text}).encode(), key) for text in texts
    ]


def ordinary(key: str) -> list[bytes]:
    """No attack: what the smaller half of `metadata` is without it."""
    body = {"input": "a", "max_output_tokens": 1}
    return [request("/v1/responses", json.dumps(body).encode(), key)]


ORDINARY = "ordinary"
ATTACKS = {
    ORDINARY: ordinary,
    "bodies": bodies,
    "grammars": grammars,
    "metadata": metadata,
    "conversations": conversations,
}
SLOW = "slow connections"
"""Hundreds of connections that send a byte now and then."""
NAMES = (*ATTACKS, SLOW)


def endless(name: str, key: str) -> Iterator[bytes]:
    return cycle(ATTACKS[name](key))
