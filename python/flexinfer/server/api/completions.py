"""`POST /v1/completions`: a text or token ids that go on, whole or streamed."""

from __future__ import annotations

from contextlib import aclosing

from fastapi import APIRouter, Request
from fastapi.responses import Response

from flexinfer.server.api import generate
from flexinfer.server.api.completion_call import (
    CompletionCall,
    beam_answer,
    final_choice,
    prepare_completion,
)
from flexinfer.server.api.completion_stream import CompletionStream
from flexinfer.server.http.fast_route import FastRoute
from flexinfer.server.http.json_route import JsonRoute
from flexinfer.server.http.streaming import (
    STREAMING_RESPONSES,
    Events,
    start_stream,
    until_disconnect,
)
from flexinfer.server.protocol.completions import Completion, CompletionRequest
from flexinfer.server.state import State, Tenant

router = APIRouter(prefix="/v1", tags=["completions"], route_class=JsonRoute)


@router.post("/completions", response_model=Completion, responses=STREAMING_RESPONSES)
async def create_completion(
    request: Request, state: State, tenant: Tenant, body: CompletionRequest
) -> Response | Completion:
    """Go on with a text, or with token ids. With `stream`, server-sent events."""
    state.check_serving(body.model)
    call = await prepare_completion(state, tenant, body)
    if body.use_beam_search:
        found = await until_disconnect(request, generate.beam_search(state, call.job))
        return beam_answer(call, found)
    if body.wants_stream:
        events = _events(call)
        return await start_stream(request, events, state.settings.send_timeout_s)
    finals = await until_disconnect(request, generate.generate_final(state, call.job))
    outputs = [call.asked_for(output) for output in finals]
    usage = generate.usage_of(outputs)
    generate.log_usage(usage)
    answer = call.answer(
        [
            final_choice(call, idx, output, one)
            for idx, output in enumerate(outputs)
            for one in output.outputs
        ]
    )
    answer.usage = usage
    return answer


FAST_ROUTE = FastRoute("/v1/completions", create_completion, CompletionRequest)


async def _events(call: CompletionCall) -> Events:
    stream = CompletionStream(call)
    try:
        async with aclosing(generate.stream(call.state, call.job)) as outputs:
            async for prompt_idx, output in outputs:
                yield stream.add(prompt_idx, call.asked_for(output))
    finally:
        generate.log_usage(stream.usage())
    yield stream.finish()
