"""The server keeps its own contract: schemathesis asks what the document allows, and what it does not.

Against the one-process server with the scripted engine. Each operation gets a bounded number of examples; answers are
kept short by a small context.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import Case, GenerationMode
from schemathesis.config import GenerationConfig, ProjectConfig, ProjectsConfig, SchemathesisConfig
from schemathesis.specs.openapi import checks

from app.reference.openapi import document
from tests.app.web import MODEL
from tokenferry.cell.one_process import LocalServer, open_server

CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]
MAX_EXAMPLES = 15


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with open_server(
        MODEL, environ={}, scripted_step_ms=0, max_model_len=96, max_num_seqs=64, max_waiting=1024
    ) as running:
        yield running


_generation = GenerationConfig(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
_all = schemathesis.openapi.from_dict(
    document([MODEL]),
    config=SchemathesisConfig(projects=ProjectsConfig(default=ProjectConfig(generation=_generation))),
)
# What is there twice is asked once.
schema = _all.exclude(path_regex="^/v1/(de)?tokenize$")


def repaired(body: Any) -> Any:
    """Keeps what the schema does not say: rules between fields, and which tokens the model has."""
    if not isinstance(body, dict):
        return body
    dropped = {"best_of", "logprobs", "top_logprobs", "min_tokens", "logit_bias"}
    dropped |= set() if body.get("stream") else {"stream_options"}
    dropped |= {"prompt"} if "messages" in body else set()
    body = {name: value for name, value in body.items() if name not in dropped}
    if "prompt" in body:
        body["prompt"] = _known(body["prompt"]) or "x"
    if "tokens" in body:
        body["tokens"] = _known(body["tokens"])
    return body


def _known(tokens: Any) -> Any:
    if isinstance(tokens, list):
        return [_known(token) for token in tokens]
    return int(tokens) % 1000 if isinstance(tokens, (int, float)) else tokens


@schema.parametrize()
@settings(
    max_examples=MAX_EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_what_the_document_says_is_so(case: Case, server: LocalServer) -> None:
    if case.meta is not None and case.meta.generation.mode is GenerationMode.POSITIVE:
        case.body = repaired(case.body)
    case.call_and_validate(base_url=server.origin, checks=CHECKS)
