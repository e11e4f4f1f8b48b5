"""Beam searches whose length_penalty no score can be computed with."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

ENDPOINTS: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "one two"},
}


@pytest.mark.parametrize("penalty", [1000, 1e308, -2000])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_length_penalty_that_overflows_is_refused(
    http: httpx.Client, endpoint: str, penalty: float
) -> None:
    """It was a 500."""
    body = {**ENDPOINTS[endpoint], "max_tokens": 9, "use_beam_search": True, "n": 2}
    answer = http.post(endpoint, json=body | {"length_penalty": penalty})
    assert answer.status_code == 400
    assert f"length_penalty is {penalty:g}, but 9 generated tokens" in answer.text
    answer = http.post(endpoint, json=body | {"length_penalty": -250})
    assert answer.status_code == 200
