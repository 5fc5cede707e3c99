"""The straight line without weights: real Valkey and processes, the `openai` client, and workers that are killed."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from decode.engine.sampling import SamplingParams
from decode.scripted import generate
from tests.e2e.harness import TestedCell

pytestmark = pytest.mark.e2e


def answer(cell: TestedCell, prompt: str, max_tokens: int) -> openai.types.chat.ChatCompletion:
    return cell.shared_client.chat.completions.create(
        model=cell.model,
        messages=[{"role": "user", "content": prompt}],
        max_completion_tokens=max_tokens,
        temperature=0,
    )


def test_the_model_is_listed_and_found(cell: TestedCell) -> None:
    assert [model.id for model in cell.shared_client.models.list().data] == ["scripted"]
    assert cell.shared_client.models.retrieve("scripted").id == "scripted"


def test_streamed_text_equals_the_whole_answer_and_the_oracle(cell: TestedCell) -> None:
    from app.dialect.conversation import ChatMessage
    from app.text.scripted import scripted_text_edge

    whole = answer(cell, "tell me", 40)
    streamed = cell.stream("tell me", 40)
    prompt = scripted_text_edge().render_chat([ChatMessage("user", "tell me")])
    token_ids, reason = generate(prompt, SamplingParams(max_tokens=40, temperature=0), 8192)
    assert streamed.text == whole.choices[0].message.content == "".join(f"<{token}>" for token in token_ids)
    assert streamed.finish_reasons == [whole.choices[0].finish_reason] == [reason]


def test_usage_counts_tokens_and_what_a_worker_restored(cell: TestedCell) -> None:
    prompt = "a prompt that is long enough to fill a few blocks of the cache" * 4
    seen = [cell.stream(prompt, 10) for _ in range(3)]
    assert {s.num_output_tokens for s in seen} == {10}
    assert len({s.num_prompt_tokens for s in seen}) == 1
    # Two workers, three prompts: one worker saw it twice. Only whole blocks are restored, never the last token.
    assert max(s.num_cached_tokens for s in seen) >= seen[0].num_prompt_tokens - 17 > 0
    assert seen[0].num_cached_tokens == 0


def test_two_workers_both_take_work(cell: TestedCell) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: answer(cell, f"number {number}", 30), range(8)))
    assert len({cell.worker_of(one.id) for one in answers}) == 2


def test_an_unknown_model_is_404_in_openai_s_form(cell: TestedCell) -> None:
    with pytest.raises(openai.NotFoundError) as refusal:
        cell.shared_client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "hi"}])
    assert refusal.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"messages": []}, "messages"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ],
)
def test_a_bad_value_is_400_and_names_its_parameter(cell: TestedCell, options: dict[str, object], param: str) -> None:
    body = {"model": cell.model, "messages": [{"role": "user", "content": "hi"}], **options}
    with pytest.raises(openai.BadRequestError) as refusal:
        cell.shared_client.post("/chat/completions", body=body, cast_to=object)
    assert refusal.value.type == "invalid_request_error"
    assert refusal.value.param is not None
    assert refusal.value.param.startswith(param)


def test_a_prompt_beyond_the_context_is_refused_at_once(cell: TestedCell) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        answer(cell, "long " * 10_000, 5)
    assert refusal.value.code == "context_length_exceeded"


def test_a_kill_in_mid_stream_changes_nothing_but_the_time(cell: TestedCell) -> None:
    undisturbed = cell.stream("to be continued", 120)
    killed = cell.stream("to be continued", 120, kill_after_events=15)
    assert killed.text == undisturbed.text
    assert killed.finish_reasons == undisturbed.finish_reasons == ["length"]
    assert killed.num_output_tokens == 120
    assert cell.attempt_of(killed.request_id) == 2
    assert killed.longest_gap_s < 3.0
    cell.wait_until(lambda: len(cell.workers()) == 2, "the killed worker is back")


def test_kills_under_load_lose_repeat_and_reorder_nothing(cell: TestedCell, rng: random.Random) -> None:
    """Ten streams, four kills; each text is compared with the same prompt undisturbed."""
    kill_at = dict(zip(rng.sample(range(10), 4), [rng.randrange(1, 40) for _ in range(4)], strict=True))
    with ThreadPoolExecutor(10) as pool:
        disturbed = list(
            pool.map(
                lambda number: cell.stream(f"story {number}", 80, kill_after_events=kill_at.get(number, 0)), range(10)
            )
        )
    cell.wait_until(lambda: len(cell.workers()) == 2, "the killed workers are back", 30)
    with ThreadPoolExecutor(10) as pool:
        calm = list(pool.map(lambda number: cell.stream(f"story {number}", 80), range(10)))
    assert [one.text for one in disturbed] == [one.text for one in calm]
    cell.wait_quiet()
    assert cell.stream_faults() == []


def test_200_random_cancels_leave_nothing_behind(cell: TestedCell, rng: random.Random) -> None:
    stops = [rng.randrange(12) for _ in range(200)]

    def begin_and_leave(number: int) -> None:
        with cell.open_stream(f"cancelled {number}", 2000) as stream:
            for num_seen, _ in enumerate(stream):
                if num_seen >= stops[number]:
                    return

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(begin_and_leave, range(200)))
    cell.wait_quiet()
    assert cell.stream_faults() == []
    assert answer(cell, "and now?", 5).usage is not None


def test_an_answer_nobody_waits_for_is_cancelled_too(cell: TestedCell) -> None:
    with cell.client(timeout_s=0.3) as client, pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(
            model=cell.model, messages=[{"role": "user", "content": "long"}], max_completion_tokens=4000
        )
    cell.wait_quiet()
