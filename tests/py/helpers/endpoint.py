"""Endpoint: questions to one endpoint of a running server, each a base with other fields."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class Endpoint:
    path: str
    base: dict[str, Any]

    def ask(self, http: httpx.Client, **fields: Any) -> dict[str, Any]:
        answer = http.post(self.path, json=self.base | fields)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def stream(self, http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
        """The data of the events but for the last, [DONE], which must be there."""
        lines = self.lines(http, **fields)
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def lines(self, http: httpx.Client, **fields: Any) -> list[str]:
        body = self.base | {"stream": True} | fields
        with http.stream("POST", self.path, json=body) as answer:
            assert answer.status_code == 200, answer.read()
            return [line for line in answer.iter_lines() if line]
