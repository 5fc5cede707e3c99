"""Where the real models are that some tests decode with.

SmolLM2 has to be there (`tokenferry pull smollm2-135m-instruct`): without it the test fails and says so. Gemma 3 has
terms that a person must accept, so its tests are skipped where nobody did.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from decode.registry import DEFAULT_MODEL, ModelMissing, resolve
from tasks.settings import cache_dir


def smollm2_path() -> Path:
    return resolve(DEFAULT_MODEL, cache_dir(os.environ))


def gemma3_path() -> Path:
    try:
        return resolve("gemma-3-270m", cache_dir(os.environ))
    except ModelMissing as error:
        pytest.skip(str(error))
