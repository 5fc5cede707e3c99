"""Compiling once, and saying clearly why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode.native.build import NativeUnavailable, build_native
from tests.decode.native.reference import cache_dir, library


def test_a_second_build_takes_the_library_from_the_cache() -> None:
    first = library()
    written = first.stat().st_mtime_ns
    assert build_native(cache_dir()) == first
    assert first.stat().st_mtime_ns == written


def test_the_portable_library_is_another_file() -> None:
    assert library(portable=True) != library()


def test_without_a_compiler_the_message_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler found \(looked for no-such-compiler\); install"):
        build_native(tmp_path, compilers=("no-such-compiler",))


def test_a_compiler_that_fails_is_named_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailable, match="false cannot compile"):
        build_native(tmp_path, compilers=("false",))
    assert list(tmp_path.iterdir()) == []
