"""The catalog's views: the questions that are asked again and again, each answered by one statement.

Owns their SQL and what is said about them. Every reader of a snapshot has them
(`bridge.catalog.catalog.open_snapshot`); `docs/catalog.md` shows them. Days are those of UTC. A view may use the ones
above it.

The tokens of every choice count: a request with `n` choices has its prompt `n` times, most of it cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class View:
    what: str
    sql: str


VIEWS: Mapping[str, View] = {
    "request_times": View(
        "every request with its day, how long it waited (queue_ms), its time to the first token (ttft_ms), how long"
        " it took (duration_ms) and its tokens a second after the first",
        """
        SELECT *,
            CAST(make_timestamp(submitted_ms * 1000) AS DATE) AS day,
            claimed_ms - submitted_ms AS queue_ms,
            first_token_ms - submitted_ms AS ttft_ms,
            ended_ms - submitted_ms AS duration_ms,
            CASE WHEN num_output_tokens > 1 AND ended_ms > first_token_ms
                THEN round((num_output_tokens - 1) * 1000.0 / (ended_ms - first_token_ms), 1) END AS tokens_per_s
        FROM requests
        """,
    ),
    "attempt_times": View(
        "every attempt with how long it was on offer (offered_for_ms), how long a worker held it (held_ms), the"
        " tokens that came of it, and the pause until the next attempt was claimed (pause_ms)",
        """
        SELECT *,
            coalesce(claimed_ms, ended_ms) - offered_ms AS offered_for_ms,
            CASE WHEN claimed_ms IS NOT NULL THEN ended_ms - claimed_ms END AS held_ms,
            next_index - first_index AS num_tokens,
            lead(claimed_ms) OVER (PARTITION BY request_id ORDER BY attempt) - ended_ms AS pause_ms
        FROM attempts
        """,
    ),
    "usage": View(
        "requests and tokens by day, model, API key and end user",
        """
        SELECT day, model, coalesce(api_key, '') AS api_key, coalesce(end_user, '') AS end_user,
            count(*) AS num_requests,
            count(*) FILTER (state = 'finished') AS num_finished,
            coalesce(sum(num_prompt_tokens), 0)::BIGINT AS num_prompt_tokens,
            coalesce(sum(num_cached_tokens), 0)::BIGINT AS num_cached_tokens,
            coalesce(sum(num_output_tokens), 0)::BIGINT AS num_output_tokens
        FROM request_times GROUP BY ALL ORDER BY ALL
        """,
    ),
    "latency": View(
        "half, 95 % and 99 % of the requests of a day, model and class waited for a worker, for their first token and"
        " for their end at most so long",
        """
        SELECT day, model, service_class, count(*) AS num_requests,
            quantile_disc(queue_ms, 0.5) AS queue_p50_ms, quantile_disc(queue_ms, 0.95) AS queue_p95_ms,
            quantile_disc(queue_ms, 0.99) AS queue_p99_ms,
            quantile_disc(ttft_ms, 0.5) AS ttft_p50_ms, quantile_disc(ttft_ms, 0.95) AS ttft_p95_ms,
            quantile_disc(ttft_ms, 0.99) AS ttft_p99_ms,
            quantile_disc(duration_ms, 0.5) AS duration_p50_ms, quantile_disc(duration_ms, 0.95) AS duration_p95_ms,
            quantile_disc(duration_ms, 0.99) AS duration_p99_ms
        FROM request_times WHERE ended_ms IS NOT NULL GROUP BY ALL ORDER BY ALL
        """,
    ),
    "failures": View(
        "what did not finish, by day, model, state and reason, with the latest of each",
        """
        SELECT day, model, state, reason, count(*) AS num_requests,
            arg_max(request_id, ended_ms) AS latest_request_id, arg_max(message, ended_ms) AS latest_message
        FROM request_times WHERE state IN ('failed', 'cancelled') GROUP BY ALL ORDER BY day, num_requests DESC
        """,
    ),
    "losses": View(
        "attempts that were given back or lost, by day, worker, outcome and reason, with the pauses that followed",
        """
        SELECT CAST(make_timestamp(ended_ms * 1000) AS DATE) AS day, worker, outcome, reason,
            count(*) AS num_attempts, coalesce(sum(num_tokens), 0)::BIGINT AS num_tokens,
            quantile_disc(pause_ms, 0.5) AS pause_p50_ms, max(pause_ms) AS pause_max_ms
        FROM attempt_times WHERE outcome IN ('released', 'lost') GROUP BY ALL ORDER BY ALL
        """,
    ),
    "cache_hits": View(
        "the share of prompt tokens that came from the prefix cache, by day and model",
        """
        SELECT day, model, count(*) AS num_requests,
            sum(num_prompt_tokens)::BIGINT AS num_prompt_tokens, sum(num_cached_tokens)::BIGINT AS num_cached_tokens,
            round(sum(num_cached_tokens) / nullif(sum(num_prompt_tokens), 0), 4) AS hit_rate
        FROM request_times WHERE first_token_ms IS NOT NULL GROUP BY ALL ORDER BY ALL
        """,
    ),
    "utilisation": View(
        "every worker: how long it has lived, how many of its places were taken on average (busy_share of"
        " max_num_seqs), what it generated and what it let down",
        """
        WITH lives AS (
            SELECT worker, host, device, model, max_num_seqs, coalesce(left_ms >= joined_ms, false) AS has_left,
                greatest(1, CASE WHEN left_ms >= joined_ms THEN left_ms ELSE epoch_ms(now()) END
                    - coalesce(started_ms, joined_ms)) AS life_ms
            FROM workers
        ),
        work AS (
            SELECT worker, count(*) AS num_attempts,
                count(*) FILTER (outcome IN ('released', 'lost')) AS num_let_down,
                coalesce(sum(num_tokens), 0)::BIGINT AS num_tokens,
                coalesce(sum(greatest(0, coalesce(ended_ms, epoch_ms(now())) - claimed_ms)), 0)::BIGINT AS busy_ms
            FROM attempt_times WHERE claimed_ms IS NOT NULL GROUP BY worker
        )
        SELECT lives.* EXCLUDE (has_left), NOT has_left AS is_alive, coalesce(num_attempts, 0) AS num_attempts,
            coalesce(num_let_down, 0) AS num_let_down, coalesce(num_tokens, 0) AS num_tokens,
            round(coalesce(busy_ms, 0) / (life_ms * greatest(1, coalesce(max_num_seqs, 1))), 4) AS busy_share
        FROM lives LEFT JOIN work USING (worker) ORDER BY is_alive DESC, worker
        """,
    ),
}
"""Name to what it shows and how."""
