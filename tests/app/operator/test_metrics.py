"""`GET /metrics`: what a scraper sees of a cell, parsed as a scraper parses it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from app.answers.closing import Closer
from app.http.api_keys import KeyFile
from app.reference.metrics import with_table
from tasks.observe.board import MetricsBoard
from tasks.observe.metrics import ENDED, METRICS, REREADS, Meter
from tests.app.web import MODEL, NUM_PROMPT_TOKENS, Exchange, Inline, Web


async def scrape(web: Web) -> list[Sample]:
    exchange = await web.get("/metrics")
    assert exchange.status == 200
    assert exchange.headers["content-type"].startswith("text/plain; version=")
    families = list(text_string_to_metric_families(exchange.body.decode()))
    assert {family.name: family.type for family in families}.items() <= {
        one.name: one.kind for one in METRICS
    }.items()
    return [sample for family in families for sample in family.samples]


def value(samples: list[Sample], name: str, **labels: str) -> float:
    """The sum over all samples with these labels; there must be one."""
    found = [one.value for one in samples if one.name == name and labels.items() <= one.labels.items()]
    assert found, f"no {name} {labels}"
    return sum(found)


def has(samples: list[Sample], name: str, **labels: str) -> bool:
    return any(one.name == name and labels.items() <= one.labels.items() for one in samples)


async def answered(web: Web, **fields: object) -> Exchange:
    """A request, and what its worker publishes: two tokens, with a pause before the first."""
    exchange = await web.chat(**fields)
    request_id = f"chatcmpl-{web.num_ids}"
    worker = web.worker()
    worker.claim(request_id)
    web.now_s += 0.2
    worker.append(request_id, 0, 65)
    await web.turn()
    web.now_s += 0.5
    worker.append(request_id, 1, 66, end="length")
    await web.turn()
    await exchange.task
    return exchange


async def test_one_scrape_shows_what_waits_and_what_runs(web: Web) -> None:
    web.worker()
    await web.chat()
    await web.chat(service_tier="priority")
    samples = await scrape(web)
    assert value(samples, "vllm:num_requests_waiting", process="queue", model_name=MODEL) == 2
    assert value(samples, "tokenferry_queue_waiting", priority="priority") == 1
    assert value(samples, "tokenferry_queue_waiting", priority="flex") == 0
    assert value(samples, "tokenferry_queue_age_seconds", priority="default") >= 0
    assert value(samples, "vllm:num_requests_running", process="w1") == 0
    assert value(samples, "vllm:kv_cache_usage_perc", process="w1") == 0
    assert value(samples, "tokenferry_open_answers") == 2
    assert value(samples, "tokenferry_redis_up") == 1


async def test_the_time_to_the_first_token_and_to_the_end_are_those_of_the_client(web: Web) -> None:
    web.worker()
    for stream in (True, False):
        await answered(web, stream=stream)
    samples = await scrape(web)
    assert value(samples, "vllm:time_to_first_token_seconds_count", model_name=MODEL) == 2
    assert abs(value(samples, "vllm:time_to_first_token_seconds_sum") - 0.4) < 1e-6
    assert value(samples, "vllm:time_to_first_token_seconds_bucket", le="0.1") == 0
    assert value(samples, "vllm:time_to_first_token_seconds_bucket", le="0.25") == 2
    assert value(samples, "vllm:e2e_request_latency_seconds_count") == 2
    assert abs(value(samples, "vllm:e2e_request_latency_seconds_sum") - 1.4) < 1e-6
    assert value(samples, "tokenferry_http_requests_total", route="/v1/chat/completions", status="200") == 2
    assert value(samples, "tokenferry_open_answers") == 0


async def test_bytes_of_streams_are_counted_whichever_way_they_went(outlet: bool) -> None:
    web = Web(outlet=outlet)
    web.worker()
    exchange = await answered(web, stream=True)
    assert (exchange.num_writes > 0) is web.has_outlet
    assert value(await scrape(web), "tokenferry_stream_bytes_total") == len(exchange.body)


async def test_an_answer_that_was_read_again_is_no_new_request(web: Web) -> None:
    web.worker()
    await answered(web)
    again = await web.get("/v1/chat/completions/chatcmpl-1?stream=true")
    await web.turn()
    await again.task
    samples = await scrape(web)
    assert value(samples, "vllm:e2e_request_latency_seconds_count") == 1
    assert value(samples, "tokenferry_http_requests_total", route="/v1/chat/completions/{completion_id}") == 1


async def test_paths_that_do_not_exist_make_one_series(web: Web) -> None:
    for number in range(3):
        await web.request("GET" if number else "BREW", f"/wp-admin/{number}")
    assert value(await scrape(web), "tokenferry_http_requests_total", route="unknown", method="any") == 3


async def test_a_client_that_leaves_is_an_aborted_request(web: Web) -> None:
    web.worker()
    exchange = await web.chat(stream=True)
    exchange.leave()
    await web.settle()
    samples = await scrape(web)
    assert value(samples, "vllm:request_success_total", finished_reason="abort", model_name=MODEL) == 1
    assert value(samples, "tokenferry_requests_ended_total", state="cancelled", reason="disconnect") == 1
    assert not has(samples, "vllm:time_to_first_token_seconds_count")


async def test_a_stop_string_that_this_process_found_ends_the_request_well(web: Web) -> None:
    worker, exchange = await web.claimed_chat(stop=["<65>"])
    worker.append("chatcmpl-1", 0, 65)
    await web.turn()
    await web.turn()
    await exchange.task
    samples = await scrape(web)
    assert value(samples, "vllm:request_success_total", finished_reason="stop") == 1


async def test_a_cancelled_answer_is_counted_where_it_was_cancelled(web: Web) -> None:
    web.worker()
    await web.chat(background=True)
    await web.request("POST", "/v1/chat/completions/chatcmpl-1/cancel", b"")
    await web.request("POST", "/v1/chat/completions/chatcmpl-1/cancel", b"")
    samples = await scrape(web)
    assert value(samples, "tokenferry_requests_ended_total", state="cancelled", reason="stopped") == 1


async def test_what_is_over_already_is_not_counted_again(web: Web) -> None:
    web.worker()
    await web.chat()
    meter = Meter("web")
    closer = Closer(web.records, "reader-1", Inline(), meter)
    for _ in range(2):
        closer.close_soon("chatcmpl-1", "finished", "stop", MODEL)
    assert [one.value for one in meter.samples() if one.metric is ENDED] == [1]


async def test_numbers_of_other_processes_are_there_under_their_names(web: Web) -> None:
    other = Meter("web-2")
    other.count(REREADS, by=5)
    MetricsBoard(web.redis).put(other)
    own = Meter(web.reader.reader_id)
    own.count(REREADS, by=1000)
    MetricsBoard(web.redis).put(own)  # a second ago: the numbers of now go over it
    web.reader.reread()
    samples = await scrape(web)
    assert value(samples, "tokenferry_stream_rereads_total", process="web-2") == 5
    assert value(samples, "tokenferry_stream_rereads_total", process=web.reader.reader_id) == 1


async def test_without_redis_a_scrape_shows_this_process(web: Web) -> None:
    web.worker()
    web.server.connected = False
    samples = await scrape(web)
    assert value(samples, "tokenferry_redis_up") == 0
    assert has(samples, "tokenferry_open_answers")
    assert not has(samples, "vllm:num_requests_running")


async def test_a_client_that_fell_behind_is_a_reread(web: Web) -> None:
    worker, exchange = await web.claimed_chat(stream=True)
    exchange.stop_reading()
    worker.append("chatcmpl-1", 0, *range(60, 80))
    await web.turn()
    exchange.read_on()
    worker.append("chatcmpl-1", 20, 80, end="length")
    for _ in range(3):
        await web.turn()
    await exchange.task
    assert value(await scrape(web), "tokenferry_stream_rereads_total") >= 1


async def test_the_newer_format_is_given_to_who_asks_for_it(web: Web) -> None:
    exchange = await web.get("/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert exchange.headers["content-type"].startswith("application/openmetrics-text")
    assert exchange.body.endswith(b"# EOF\n")


async def test_with_api_keys_a_scraper_needs_one(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-scraper Prometheus\n")
    web = Web(keys=KeyFile(path))
    assert (await web.get("/metrics")).status == 401
    assert (await web.get("/metrics", authorization="Bearer sk-scraper")).status == 200


async def test_an_access_line_has_the_numbers_of_the_answer_and_none_of_its_text(
    web: Web, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    web.worker()
    await answered(web, stream=True, messages=[{"role": "user", "content": "hi SECRET"}])
    await web.get("/nothing?secret=SECRET")
    await web.get("/livez")
    [answer, missing] = [one for one in caplog.records if one.name == "app.access" and one.levelno == logging.INFO]
    assert answer.getMessage() == (
        "chatcmpl-1 POST /v1/chat/completions status=200 ms=700.0 model=scripted "
        f"prompt_tokens={NUM_PROMPT_TOKENS + len(' SECRET')} tokens=2 cached=0 ttft_ms=200.0"
    )
    assert answer.__dict__["fields"]["ttft_ms"] == 200.0
    assert "GET /nothing status=404" in missing.getMessage()
    assert "SECRET" not in caplog.text


async def test_a_client_that_leaves_early_is_told_from_one_that_has_all(
    web: Web, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    web.worker()
    exchange = await web.chat(stream=True)
    exchange.leave()
    await web.settle()
    [line] = [one.getMessage() for one in caplog.records if one.name == "app.access"]
    assert line.endswith("left=early")


def test_the_page_has_the_table_of_now() -> None:
    page = (Path(__file__).parents[3] / "docs/metrics.md").read_text()
    assert page == with_table(page), "python -m app.reference.metrics docs/metrics.md"
    assert page.count("| histogram |") > 5
    with pytest.raises(ValueError, match="the page needs the lines"):
        with_table("")
