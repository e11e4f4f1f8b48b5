"""DemoRunner: all conversations of the demo through one engine, turn by turn, and what is measured.

All conversations ask their turn t together and are served as one continuous batch; turn t + 1
begins when the last of them has its answer.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from flexinfer.cli.demo.records import Run, Sample, Turn
from flexinfer.cli.demo.script import DemoScript
from flexinfer.cli.memory_map import live_rows
from flexinfer.engine.history import History, choose_format, system_message

if TYPE_CHECKING:
    from flexinfer.llm import LLM
    from flexinfer.outputs import RequestOutput


class RunError(Exception):
    """The engine could not finish an answer; says why."""


class Watch(Protocol):
    """Told about a run while it goes on. Conversations and turns are counted from 1."""

    def turn_begins(self, turn: int, users: list[str]) -> None: ...
    def text(self, conversation: int, text: str) -> None: ...
    def turn_ends(self) -> None: ...


class DemoRunner:
    """Runs a script once. `llm` is fresh, and warm when `run` begins to measure."""

    def __init__(self, llm: LLM, script: DemoScript, max_tokens: int, watch: Watch) -> None:
        self._llm = llm
        self._engine = llm.engine
        self._script = script
        self._max_tokens = max_tokens
        self._watch = watch
        end_ids = llm.engine.loaded.eos_token_ids
        text_format = choose_format(llm.get_tokenizer())
        self._histories = [
            History(text_format, system_message(script.system_prompt), end_ids)
            for _ in script.conversations
        ]
        manager = self._engine.manager
        self._run = Run(
            prefix_caching=self._engine.config.enable_prefix_caching,
            chunk_bytes=manager.chunk_bytes,
            bytes_per_token=manager.spec.bytes_per_token,
            layers_per_plane=manager.spec.layers_per_plane or manager.spec.num_layers,
        )
        self._lengths = [0] * len(script.conversations)
        self._best_map = (0, 0)
        self._begin = 0.0

    def run(self) -> Run:
        """Raises RequestError for a prompt that does not fit, RunError if the engine gives up."""
        self._warm_up()
        evicted = self._engine.manager.stats().chunks_evicted
        self._begin = time.monotonic()
        for turn in range(1, self._script.num_turns + 1):
            self._turn(turn)
        self._run.seconds = time.monotonic() - self._begin
        self._run.num_rewritten = sum(history.num_rewritten for history in self._histories)
        self._run.chunks_evicted = self._engine.manager.stats().chunks_evicted - evicted
        self._engine.manager.check_integrity()
        return self._run

    def _warm_up(self) -> None:
        """One prompt of the real length, so that no measured one pays for what is done once."""
        from flexinfer.sampling.params import SamplingParams

        history = self._histories[0]
        prompt = history.ask("Hello!")
        history.take_back()
        params = SamplingParams(temperature=0.0, max_tokens=2)
        self._llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        self._llm.reset_prefix_cache()

    def _turn(self, turn: int) -> None:
        lines = {
            idx: talk[turn - 1]
            for idx, talk in enumerate(self._script.conversations)
            if turn <= len(talk)
        }
        self._watch.turn_begins(turn, [line.user for line in lines.values()])
        prompts = {idx: self._histories[idx].ask(line.user) for idx, line in lines.items()}
        answers = self._serve(turn, prompts)
        for idx, line in lines.items():
            output = answers[idx]
            history = self._histories[idx]
            record = _turn_record(idx + 1, turn, line, prompts[idx], history, output)
            self._run.turns.append(record)
            history.answer(prompts[idx], record.token_ids, record.text)
        self._watch.turn_ends()

    def _serve(self, turn: int, prompts: dict[int, list[int]]) -> dict[int, RequestOutput]:
        """Step until every prompt has its answer."""
        from flexinfer.sampling.params import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=self._max_tokens)
        idx_of = {f"demo-{turn}-{idx}": idx for idx in prompts}
        for request_id, idx in idx_of.items():
            self._engine.add_request(request_id, {"prompt_token_ids": prompts[idx]}, params)
        answers: dict[int, RequestOutput] = {}
        while len(answers) < len(prompts):
            for output in self._engine.step():
                idx = idx_of[output.request_id]
                answer = output.outputs[0]
                if answer.finish_reason in ("error", "abort"):
                    raise RunError(f"conversation {idx + 1}, turn {turn}: {answer.stop_reason}")
                self._lengths[idx] = len(prompts[idx]) + len(answer.token_ids)
                self._watch.text(idx + 1, answer.text)
                if output.finished:
                    answers[idx] = output
            self._look(turn, idx_of)
        return answers

    def _look(self, turn: int, idx_of: dict[str, int]) -> None:
        """Sample the memory; keep the map of the last turn's fullest moment."""
        manager = self._engine.manager
        snapshot = manager.snapshot()
        used = sum(1 for chunk in snapshot.chunks if chunk.recorded or chunk.sharers)
        self._run.samples.append(
            Sample(
                time_s=time.monotonic() - self._begin,
                turn=turn,
                used_bytes=used * snapshot.chunk_bytes,
                created_bytes=manager.stats().resident_bytes,
                unshared_bytes=sum(manager.bytes_for(length) for length in self._lengths),
            )
        )
        if turn == self._script.num_turns:
            self._keep_map(snapshot, idx_of)

    def _keep_map(self, snapshot: Any, idx_of: dict[str, int]) -> None:
        labels = {}
        for request_id, request in self._engine.scheduler.running.items():
            if request_id in idx_of and request.vtensor is not None:
                labels[request.vtensor.id] = f"conversation {idx_of[request_id] + 1}"
        rows = live_rows(snapshot, labels)
        fullness = (len(rows), sum(row.num_tokens for row in rows))
        if fullness > self._best_map:
            self._best_map = fullness
            self._run.map_rows = sorted(rows, key=lambda row: int(row.label.split()[-1]))
            self._run.num_planes = snapshot.num_planes


def _turn_record(
    conversation: int,
    turn: int,
    line: Any,
    prompt: list[int],
    history: History,
    output: RequestOutput,
) -> Turn:
    answer, metrics = output.outputs[0], output.metrics
    return Turn(
        conversation=conversation,
        turn=turn,
        user=line.user,
        expect=line.expect,
        prompt_token_ids=prompt,
        token_ids=list(answer.token_ids),
        text=answer.text,
        finish_reason=str(answer.finish_reason),
        num_new_tokens=history.num_new_tokens,
        num_reused_tokens=output.num_cached_tokens or 0,
        # All that went through the model, less the answer's tokens (the last one never does).
        num_computed_tokens=metrics.num_computed_tokens - (len(answer.token_ids) - 1),
        chunks_aliased=metrics.chunks_aliased,
        chunks_copied=metrics.chunks_copied,
        num_preemptions=metrics.num_preemptions,
        time_to_first_token_s=metrics.time_to_first_token_s or 0.0,
    )
