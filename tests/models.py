"""Where the real models are that some tests decode with, and the entry of one that is made up.

SmolLM2 has to be there (`tokenferry pull smollm2-135m-instruct`): without it the test fails and says so. Gemma 3 has
terms that a person must accept, so its tests are skipped where nobody did.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from decode.checkpoint.names import DEFAULT_MODEL, ModelMissing, Package, PublishedModel, resolve
from tasks.process.settings import Settings


def smollm2_path() -> Path:
    return resolve(DEFAULT_MODEL, Settings.from_env(os.environ).cache_dir)


def gemma3_path() -> Path:
    try:
        return resolve("gemma-3-270m", Settings.from_env(os.environ).cache_dir)
    except ModelMissing as error:
        pytest.skip(str(error))


def tiny_model(content: bytes, *parts: Package, notices: tuple[Package, ...] = ()) -> PublishedModel:
    """A published model of the name `tiny`, whose file has this content."""
    return PublishedModel(
        name="tiny",
        description="",
        file="tiny.gguf",
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        licence="Tiny Terms",
        parts=parts,
        notices=notices,
    )
