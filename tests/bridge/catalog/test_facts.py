from __future__ import annotations

import pytest

from bridge.catalog.facts import MAX_TEXT, Fact, MalformedFact, fold, parse_fact


def fields(**changed: str | bytes) -> dict[bytes, bytes]:
    whole: dict[str, str | bytes] = {"k": "claimed", "id": "r1", "a": "2", "w": "w1", "m": "m", "t": "7", "d": "{}"}
    return {
        name.encode(): value if isinstance(value, bytes) else value.encode()
        for name, value in (whole | changed).items()
    }


def test_an_entry_becomes_a_fact() -> None:
    assert parse_fact(fields(d='{"next_index":3}')) == Fact("claimed", 7, "r1", 2, "w1", "m", {"next_index": 3})


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"k": ""}, "no kind"),
        ({"t": ""}, "t: not a whole number"),
        ({"t": "-5"}, "t: not a whole number"),
        ({"t": "1e9"}, "t: not a whole number"),
        ({"t": "٣"}, "t: not a whole number"),
        ({"t": "9" * 400}, "t: not a whole number"),
        ({"a": "99999999999"}, "a: not a whole number"),
        ({"a": ""}, "claimed without attempt"),
        ({"id": ""}, "claimed without request_id"),
        ({"w": ""}, "claimed without worker"),
        ({"id": b"\xff"}, "not UTF-8"),
        ({"id": "x" * (MAX_TEXT + 1)}, "request_id: longer"),
        ({"id": "a\0b"}, "request_id: longer"),
        ({"d": "{"}, "d: "),
        ({"d": "[1]"}, "d: not an object"),
        ({"d": '"text"'}, "d: not an object"),
    ],
)
def test_an_entry_that_is_no_fact_is_refused_with_the_reason(changed: dict[str, str], why: str) -> None:
    with pytest.raises(MalformedFact, match=why):
        parse_fact(fields(**changed))


def test_an_entry_without_any_field_is_refused() -> None:
    with pytest.raises(MalformedFact):
        parse_fact({})


def test_the_empty_table_of_lua_is_no_details() -> None:
    assert parse_fact(fields(d="[]")).details == {}


def test_a_kind_from_a_newer_version_is_a_fact_without_rows() -> None:
    fact = parse_fact(fields(k="teleported"))
    assert not any(fold([fact]).values())


def test_the_life_of_a_request_folds_into_one_row_and_one_for_each_attempt() -> None:
    facts = [
        Fact("submitted", 10, "r1", 1, model="m", details={"prompt_tokens": 5, "stream": 1, "end_user": "u"}),
        Fact("claimed", 20, "r1", 1, "w1", "m", {"next_index": 0, "fingerprint": "f"}),
        Fact("first_token", 30, "r1", 1, "w1", "m", {"cached": 4}),
        Fact("lost", 40, "r1", 1, "w1", "m", {"reason": "worker_lost", "next_index": 7}),
        Fact("reoffered", 40, "r1", 2, "", "m", {"reason": "worker_lost", "next_index": 7}),
        Fact("claimed", 50, "r1", 2, "w2", "m", {"next_index": 7}),
        Fact("ended", 60, "r1", 2, "w2", "m", {"state": "finished", "reason": "stop", "next_index": 9, "cached": 6}),
    ]
    rows = fold(facts)
    assert rows["requests"] == [
        {
            "request_id": "r1",
            "model": "m",
            "state": "finished",
            "reason": "stop",
            "worker": "w2",
            "num_attempts": 2,
            "num_prompt_tokens": 5,
            "is_streamed": True,
            "is_idempotent": False,
            "end_user": "u",
            "fingerprint": "f",
            "num_output_tokens": 9,
            "num_cached_tokens": 6,
            "submitted_ms": 10,
            "claimed_ms": 20,
            "first_token_ms": 30,
            "ended_ms": 60,
            "updated_ms": 60,
        }
    ]
    first, second = rows["attempts"]
    assert first == {
        "request_id": "r1",
        "attempt": 1,
        "worker": "w1",
        "fingerprint": "f",
        "outcome": "lost",
        "reason": "worker_lost",
        "first_index": 0,
        "next_index": 7,
        "num_cached_tokens": 4,
        "offered_ms": 10,
        "claimed_ms": 20,
        "first_token_ms": 30,
        "ended_ms": 40,
        "updated_ms": 40,
    }
    assert (second["offer_reason"], second["first_index"], second["outcome"]) == ("worker_lost", 7, "finished")


def test_a_request_that_is_claimed_with_tokens_goes_on_streaming() -> None:
    states = [
        fold([Fact("claimed", 1, "r1", 2, "w", details={"next_index": next_index})])["requests"][0]["state"]
        for next_index in (0, 7)
    ]
    assert states == ["claimed", "streaming"]


def test_the_attempt_whose_loss_was_one_too_many_stays_lost_while_the_request_fails() -> None:
    rows = fold(
        [
            Fact("lost", 40, "r1", 3, "w1", "m", {"reason": "worker_lost"}),
            Fact("ended", 40, "r1", 3, "w1", "m", {"state": "failed", "reason": "poison"}),
        ]
    )
    assert (rows["attempts"][0]["outcome"], rows["attempts"][0]["reason"]) == ("lost", "worker_lost")
    assert (rows["requests"][0]["state"], rows["requests"][0]["reason"]) == ("failed", "poison")


def test_a_worker_that_joins_tells_about_itself_and_its_model() -> None:
    info = {
        "v": 1,
        "host": "h",
        "pid": 3,
        "device": "cpu",
        "fingerprint": "fp",
        "variant": "fp32",
        "max_model_len": 9,
        "architecture": "llama",
    }
    rows = fold([Fact("worker_joined", 5, worker="w1", model="m", details=info), Fact("worker_left", 9, worker="w1")])
    (worker,) = rows["workers"]
    assert (worker["host"], worker["pid"], worker["fingerprint"]) == ("h", 3, "fp")
    assert (worker["joined_ms"], worker["left_ms"]) == (5, 9)
    assert rows["models"] == [
        {
            "model": "m",
            "fingerprint": "fp",
            "architecture": "llama",
            "variant": "fp32",
            "max_model_len": 9,
            "first_seen_ms": 5,
            "updated_ms": 5,
        }
    ]


def test_details_of_an_odd_type_are_left_out() -> None:
    details = {"state": 5, "reason": None, "next_index": "many", "cached": 1e300}
    (row,) = fold([Fact("ended", 1, "r1", 1, model="m", details=details)])["requests"]
    assert row == {"request_id": "r1", "model": "m", "ended_ms": 1, "updated_ms": 1}


def test_a_long_text_is_cut() -> None:
    (row,) = fold([Fact("ended", 1, "r1", 1, details={"reason": "x" * (MAX_TEXT + 9)})])["requests"]
    assert row["reason"] == "x" * MAX_TEXT
