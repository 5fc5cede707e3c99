"""The gate: how many more messages a worker may take."""

from __future__ import annotations

import threading

from decode.engine.sequence import Sequence
from decode.scripted import scripted_engine
from tasks.worker.gate import MAX_UNSEEN, Gate
from tests.tasks.cell import job


def gate(max_num_seqs: int = 4, kv_cache_tokens: int = 1024, num_live: int = 0) -> Gate:
    engine = scripted_engine(
        kv_cache_tokens=kv_cache_tokens, max_num_seqs=max_num_seqs, max_num_batched_tokens=max(64, max_num_seqs)
    )
    for n in range(num_live):
        engine.add(Sequence(f"s{n}", (1, 2, 3), job().sampling))
    made = Gate()
    made.observe(engine)
    return made


def num_open(gate: Gate) -> int:
    count = 0
    while gate.wait_open(0):
        gate.take()
        count += 1
    return count


def test_it_is_closed_until_the_engine_was_observed() -> None:
    assert not Gate().wait_open(0)


def test_it_lets_in_as_many_as_there_are_free_slots() -> None:
    assert num_open(gate(max_num_seqs=4, num_live=1)) == 3


def test_it_lets_in_no_more_at_once_than_one_step_can_start() -> None:
    assert num_open(gate(max_num_seqs=64, kv_cache_tokens=16 * 1024)) == MAX_UNSEEN


def test_it_lets_in_none_when_no_slot_is_free() -> None:
    assert num_open(gate(max_num_seqs=2, num_live=2)) == 0


def test_a_message_that_the_engine_has_seen_is_on_its_way_no_more() -> None:
    door = gate(max_num_seqs=1)
    door.take()
    assert not door.wait_open(0)
    door.seen()
    assert door.wait_open(0)
    assert door.num_taken == 1
    door.give_back()
    assert door.num_taken == 0


def test_closing_ends_the_waiting_at_once() -> None:
    door = gate(max_num_seqs=1)
    door.take()
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(door.wait_open(60)))
    thread.start()
    door.close()
    thread.join(10)
    assert answers == [False]
    door.seen()
    assert not door.wait_open(0)
