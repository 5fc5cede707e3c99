"""llm-comply as a judge. Runs in the judges' own environment; `python -m tests.conformance` starts it.

Its tests of OpenAI's chat API, with its checks of the schema. Those of images and of summaries of thoughts, which a
model of text has not, are turned round: the same requests have to be refused in OpenAI's shape.

Its requests leave temperature and length open, and a small model then rambles up to its context now and then, where
the judge wants an end by `stop`: what failed is tried again, a few times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from llm_comply.config import ComplianceConfig
from llm_comply.tests.openai_chat import OPENAI_CHAT_TESTS

URL, MODEL = os.environ["REAL_URL"], os.environ["REAL_MODEL"]
TRIES = 4
REFUSED = {
    "chat-image-input": "messages[0].content[1].type",
    "chat-reasoning-summary": "reasoning.summary",
}


def test_all_that_a_model_of_text_can_pass_passes() -> None:
    left = [test.id for test in OPENAI_CHAT_TESTS if test.id not in REFUSED]
    for _ in range(TRIES):
        results = judge(left)
        assert [result["id"] for result in results] == left
        for result in results:
            print(f"    {result['id']}: {result['status']}", *found(result), sep="\n      ", flush=True)
        left = [result["id"] for result in results if result["status"] != "passed" or found(result)]
        if not left:
            break
    assert left == []


def test_images_and_summaries_of_thoughts_are_refused_in_openais_shape() -> None:
    tests = {test.id: test for test in OPENAI_CHAT_TESTS}
    for name, param in REFUSED.items():
        body = tests[name].build_request(ComplianceConfig(base_url=URL, api_key="local", model=MODEL))
        status, error = post(body)
        assert status == 400, name
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert (error["param"], error["code"]) == (param, "unsupported_value")


def judge(ids: list[str]) -> list[dict[str, Any]]:
    command = [Path(sys.executable).with_name("llm-comply"), "--format", "openai-chat", "--json"]
    run = subprocess.run(
        [*command, "-u", URL, "-k", "local", "-m", MODEL, "-f", ",".join(ids)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    results: list[dict[str, Any]] = json.loads(run.stdout)["results"]
    return results


def found(result: dict[str, Any]) -> list[str]:
    return [*result.get("errors", []), *result.get("warnings", [])]


def post(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{URL}/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, {}
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, json.load(refusal)["error"]
