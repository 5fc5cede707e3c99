"""The engine loop: owns the engine and the one thread that may touch it.

Takes jobs from actor threads, steps, hands each step's tokens to the publisher, and aborts what was fenced out.
Refuses to know about Redis and Dramatiq. An actor thread sleeps in `run` until its sequence is over; nothing wakes it
before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, Protocol

from decode.engine.engine import Engine, SequenceOutput
from decode.engine.sequence import Sequence as EngineSequence
from decode.errors import DecodeError, DeviceOutOfMemory, InvalidGrammar, PromptTooLong
from tasks.observe.metrics import Meter
from tasks.protocol.contract import GenerationJob, WorkerLoad, pack_logprobs
from tasks.protocol.record import Append, AppendResult, Refused, Terminal
from tasks.worker.gate import Gate
from tasks.worker.metrics import AttemptTimes, WorkerMetrics
from tasks.worker.publish import Unpublishable

log = logging.getLogger(__name__)

FLUSH_S = 1.0
CHECK_EVERY_S = 10.0
"""An idle engine's books are compared at most so often.

PERF: 8 ms for 4,096 blocks; with few requests that came after each of them, and before the first step of the next.
"""
_REASONS: dict[type[DecodeError], str] = {
    PromptTooLong: "context_length_exceeded",
    InvalidGrammar: "invalid_grammar",
}
"""What a request that the engine refuses has failed with; anything else is an "invalid_prompt"."""

Outcome = Literal["ended", "fenced", "drain", "gap", "engine_error", "too_large"]
"""ended: the terminal entry is published. fenced: the request is somebody else's, or over. The others: give the
assignment back with this reason (`RequestRecords.release`); too_large: to a worker that has more room, if any."""


class Publishing(Protocol):
    """What the loop needs of `tasks.worker.publish.Publisher`."""

    def publish(self, appends: Sequence[Append]) -> None: ...
    def forget(self, request_id: str, attempt: int) -> None: ...
    def wait_published(self, timeout_s: float) -> bool: ...


class Handle:
    """One assignment in the loop, from hand-over to its outcome."""

    def __init__(self, job: GenerationJob, attempt: int, token_ids: tuple[int, ...], now_s: float = 0.0) -> None:
        self.job = job
        self.attempt = attempt
        self.sequence_id = f"{job.request_id}#{attempt}"
        self.token_ids = token_ids
        self.next_index = len(token_ids)
        self.num_cached_tokens = 0
        self.is_ending = False
        self.sequence: EngineSequence | None = None
        self.times = AttemptTimes(now_s)
        self.outcome: Outcome | None = None
        self._over = threading.Event()

    def wait(self, timeout_s: float | None = None) -> Outcome | None:
        """The outcome; None when the time is over."""
        self._over.wait(timeout_s)
        return self.outcome

    def settle(self, outcome: Outcome) -> None:
        if self.outcome is None:
            self.outcome = outcome
            self._over.set()


class EngineLoop:
    """`tick` is the engine's thread; everything else may be called from any.

    `publisher` is set by whoever builds both, before the first tick.
    """

    publisher: Publishing

    def __init__(
        self,
        engine: Engine,
        gate: Gate,
        *,
        on_fatal: Callable[[str], None],
        metrics: WorkerMetrics | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_fatal` is told when the engine cannot be trusted any more; the process should end."""
        self._engine = engine
        self._gate = gate
        self._on_fatal = on_fatal
        self._monotonic = monotonic
        self._metrics = metrics or WorkerMetrics(Meter(), "", monotonic=monotonic)
        self._metrics.preempted_so_far(lambda: engine.num_preemptions)
        self._metrics.drafted_so_far(lambda: engine.num_draft_tokens, lambda: engine.num_accepted_tokens)
        self._changed = threading.Condition()
        self._inbox: deque[Handle] = deque()
        self._refused: deque[tuple[str, Outcome]] = deque()
        self._live: dict[str, Handle] = {}
        self._not_admitted: list[Handle] = []
        self._is_releasing = False
        self._is_stopping = False
        self._is_checked = True
        self._next_check_s = float("-inf")
        self._step_started_s: float | None = None
        self._last_step_s = monotonic()
        self._load = engine.load()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        gate.observe(engine)

    # -- for actor threads, the publisher and the heartbeat

    def run(self, job: GenerationJob, attempt: int, token_ids: tuple[int, ...]) -> Outcome:
        """Generate one assignment, on from `token_ids`. Blocks its thread until the outcome is known."""
        outcome = self.hand_over(job, attempt, token_ids).wait()
        assert outcome is not None
        return outcome

    def hand_over(self, job: GenerationJob, attempt: int, token_ids: tuple[int, ...]) -> Handle:
        handle = Handle(job, attempt, token_ids, self._monotonic())
        with self._changed:
            if self._is_releasing:
                self._gate.seen()
                handle.settle("drain")
            else:
                self._inbox.append(handle)
                self._changed.notify_all()
        return handle

    def settle(self, item: Append, result: AppendResult | Unpublishable) -> None:
        """What became of an append; the publisher's `settle`."""
        sequence_id = f"{item.request_id}#{item.attempt}"
        if not isinstance(result, Unpublishable):
            self._metrics.settled(item, result)
        match result:
            case Refused("gap"):
                self._refuse(sequence_id, "gap")
            case Refused(reason):
                log.info("%s attempt=%d: fenced out, %s", item.request_id, item.attempt, reason)
                self._refuse(sequence_id, "fenced")
            case Unpublishable():
                self._refuse(sequence_id, "engine_error")
            case _ if item.terminal is not None:
                self._end(sequence_id, "ended")

    def release_all(self) -> None:
        """Give up everything, now and from now on, with outcome "drain"."""
        with self._changed:
            self._is_releasing = True
            self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no assignment is in the loop. False when the time is over."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._live and not self._inbox, timeout_s)

    def load(self, now_ms: int) -> WorkerLoad:
        """The load after the last step. An idle engine counts as having just finished one."""
        load = self._load
        idle_ms = 0 if not self._live else int((self._monotonic() - self._last_step_s) * 1000)
        return WorkerLoad(load.num_running, load.num_waiting, load.num_free_blocks, load.num_blocks, now_ms - idle_ms)

    def stalled_s(self) -> float:
        """How long the step that is running has been running; 0 between steps."""
        started_s = self._step_started_s
        return 0.0 if started_s is None else self._monotonic() - started_s

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread after the step it is in."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _refuse(self, sequence_id: str, outcome: Outcome) -> None:
        with self._changed:
            self._refused.append((sequence_id, outcome))
            self._changed.notify_all()

    def _end(self, sequence_id: str, outcome: Outcome) -> None:
        with self._changed:
            handle = self._live.pop(sequence_id, None)
            self._changed.notify_all()
        if handle is not None:
            self.publisher.forget(handle.job.request_id, handle.attempt)
            handle.settle(outcome)
            self._metrics.over(handle.job, handle.attempt, outcome, handle.times)

    # -- the engine's thread

    def tick(self) -> bool:
        """One turn: abort what was refused, take what was handed over, step, publish. False when there is no work."""
        self._abort_refused()
        if self._is_releasing:
            self._give_up("drain")
        self._take_new()
        if not self._engine.has_unfinished:
            if not self._is_checked and self._monotonic() >= self._next_check_s:
                self._is_checked = True
                self._next_check_s = self._monotonic() + CHECK_EVERY_S
                self._check()
            self._observe()
            return False
        self._is_checked = False
        started_s = self._monotonic()
        outputs = self._step()
        if self._not_admitted:
            self._note_admitted(started_s)
        self._observe()
        self.publisher.publish(self._appends(outputs))
        return True

    def _run(self) -> None:
        try:
            while True:
                if not self.tick():
                    with self._changed:
                        self._changed.wait_for(self._has_mail, None if self._is_checked else CHECK_EVERY_S)
                if self._is_stopping:
                    return
        except Exception as error:
            log.exception("the engine loop failed")
            self._on_fatal(f"the engine loop failed: {error}")

    def _has_mail(self) -> bool:
        leftover = self._is_releasing and bool(self._live or self._inbox)
        return bool(self._is_stopping or self._inbox or self._refused or leftover)

    def _abort_refused(self) -> None:
        while self._refused:
            sequence_id, outcome = self._refused.popleft()
            self._engine.abort(sequence_id)
            self._end(sequence_id, outcome)

    def _take_new(self) -> None:
        while self._inbox:
            with self._changed:
                handle = self._inbox.popleft()
                self._live[handle.sequence_id] = handle
            self._add(handle)
            self._gate.seen()
        self._observe()

    def _add(self, handle: Handle) -> None:
        job = handle.job
        try:
            sequence = EngineSequence(handle.sequence_id, job.prompt_token_ids, job.sampling, handle.token_ids)
            self._engine.add(sequence)
            handle.sequence = sequence
            self._not_admitted.append(handle)
        except DecodeError as error:
            if isinstance(error, PromptTooLong) and error.fits_elsewhere:
                log.warning("%s attempt=%d: given back, %s", job.request_id, handle.attempt, error)
                self._end(handle.sequence_id, "too_large")
                return
            reason = _REASONS.get(type(error), "invalid_prompt")
            log.warning("%s attempt=%d: refused, %s", job.request_id, handle.attempt, error)
            self.publisher.publish([self._append(handle, (), Terminal("failed", reason, str(error)))])

    def _step(self) -> list[SequenceOutput]:
        self._step_started_s = self._monotonic()
        try:
            return self._engine.step()
        except DeviceOutOfMemory as error:
            shed = self._engine.shed()
            if shed.num_preempted or shed.has_smaller_steps:
                log.warning("out of device memory, num_preempted=%d: %s", shed.num_preempted, error)
            else:
                log.error("out of device memory with a single token: %s", error)
                self._give_up("drain", dict.fromkeys(self._engine.admitted_ids, "engine_error"))
        except Exception:
            log.exception("the engine failed in a step, num_live=%d", len(self._live))
            self._give_up("engine_error")
        finally:
            self._step_started_s = None
            self._last_step_s = self._monotonic()
        return []

    def _note_admitted(self, started_s: float) -> None:
        """Whoever has blocks after the step has had them since it began."""
        still: list[Handle] = []
        for handle in self._not_admitted:
            if handle.sequence is not None and handle.sequence.was_admitted:
                handle.times.admitted_s = started_s
            elif handle.sequence_id in self._live:
                still.append(handle)
        self._not_admitted = still

    def _give_up(self, outcome: Outcome, except_for: Mapping[str, Outcome] = MappingProxyType({})) -> None:
        """Abort everything; what was computed is published first, if Redis lets us."""
        with self._changed:
            while self._inbox:
                handle = self._inbox.popleft()
                self._live[handle.sequence_id] = handle
                self._gate.seen()
        for sequence_id in tuple(self._live):
            self._engine.abort(sequence_id)
        self._check()
        if self._live:
            self.publisher.wait_published(FLUSH_S)
        for sequence_id in tuple(self._live):
            self._end(sequence_id, except_for.get(sequence_id, outcome))

    def _check(self) -> None:
        try:
            self._engine.check_idle()
        except DecodeError as error:
            log.critical("the engine's books are wrong: %s", error)
            self._on_fatal(f"the engine's books are wrong: {error}")

    def _observe(self) -> None:
        self._load = self._engine.load()
        self._gate.observe(self._engine)

    def _appends(self, outputs: Sequence[SequenceOutput]) -> list[Append]:
        """The step's tokens; for a sequence without any, an empty append that learns whether it was cancelled."""
        appends: list[Append] = []
        silent = dict(self._live)
        now_s = self._last_step_s
        continued: dict[float, int] = {}
        num_together = 0
        for output in outputs:
            handle = silent.pop(output.sequence_id, None)
            if handle is None:
                continue
            end = None if output.finish_reason is None else Terminal("finished", output.finish_reason)
            if output.failure is not None:
                log.warning("%s attempt=%d: failed, %s", handle.job.request_id, handle.attempt, output.failure)
                end = Terminal("failed", "invalid_grammar", output.failure)
            handle.num_cached_tokens = output.num_cached_tokens
            if output.token_ids:
                # PERF: sequences that had their last tokens together are counted together, a histogram costs more.
                last_s = handle.times.last_token_s
                if last_s is None:
                    self._note_first(handle, output, now_s)
                else:
                    continued[last_s] = continued.get(last_s, 0) + 1
                num_together += len(output.token_ids) - 1
                handle.times.last_token_s = now_s
            if output.finish_reason is not None:
                self._metrics.finished(handle.times)
            appends.append(self._append(handle, output.token_ids, end, pack_logprobs(output.logprobs)))
        if num_together:
            self._metrics.continued(now_s, now_s, num_together)
        for last_s, num_sequences in continued.items():
            self._metrics.continued(last_s, now_s, num_sequences)
        appends.extend(self._append(handle, (), None) for handle in silent.values() if not handle.is_ending)
        return appends

    def _note_first(self, handle: Handle, output: SequenceOutput, now_s: float) -> None:
        job, times = handle.job, handle.times
        self._metrics.computed(job, handle.attempt, output.first_index, output.num_cached_tokens, times, now_s)

    def _append(
        self, handle: Handle, token_ids: tuple[int, ...], end: Terminal | None, logprobs: bytes = b""
    ) -> Append:
        first_index = handle.next_index
        handle.next_index += len(token_ids)
        handle.is_ending = end is not None
        return Append(
            handle.job.request_id,
            handle.attempt,
            first_index,
            token_ids,
            handle.num_cached_tokens,
            end,
            logprobs,
        )
