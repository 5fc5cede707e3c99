"""Schedules of the whole cell under logical time (`tests.tasks.simulation`): each seed is one, and replays.

`SIMULATION_SCHEDULES=5000 SIMULATION_SEED=1000 pytest tests/tasks/protocol/test_simulation.py` runs others, and more.
"""

from __future__ import annotations

import os

import pytest

from tests.tasks.simulated_redis import Server
from tests.tasks.simulation import Simulation

NUM_SCHEDULES = int(os.environ.get("SIMULATION_SCHEDULES", "300"))
FIRST_SEED = int(os.environ.get("SIMULATION_SEED", "0"))

MUST_BE_SEEN = {
    "another fingerprint",
    "append without an answer",
    "called again",
    "continued",
    "forestalled",
    "generated anew",
    "crashed holding",
    "disturbed",
    "flushed",
    "joined",
    "logged",
    "lost data",
    "missed heartbeat",
    "nobody read",
    "poison",
    "QueueFull",
    "reader was forgotten",
    "refused closed",
    "refused missing",
    "refused stale",
    "released drain",
    "released engine_error",
    "several choices",
    "stale message",
    "step given up",
    "step sent again",
    "submit without an answer",
    "taken from the log",
    "watchdog failed",
    "web crashed",
}


def test_no_schedule_of_faults_loses_repeats_or_reorders_anything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    server = Server()
    seen: set[str] = set()
    for seed in range(FIRST_SEED, FIRST_SEED + NUM_SCHEDULES):
        simulation = Simulation(server, seed)
        simulation.run()
        seen |= simulation.seen
    if NUM_SCHEDULES >= 300:
        assert seen >= MUST_BE_SEEN, f"the pressure is not real: never seen {MUST_BE_SEEN - seen}"


def test_a_seed_replays_its_schedule() -> None:
    server = Server()
    first, second = Simulation(server, 7), Simulation(server, 7)
    for simulation in (first, second):
        server.redis.flushall()
        server.redis.script_flush()
        simulation.run()
    assert first.trace == second.trace
