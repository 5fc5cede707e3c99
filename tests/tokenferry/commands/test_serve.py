"""The start-up summary: what will run, and why so."""

from __future__ import annotations

import pytest

from tokenferry.commands.serve import variant_and_why


@pytest.mark.parametrize(
    ("variant", "device", "compiler", "told"),
    [
        ("q8", "cpu", "g++", "q8 on cpu (VARIANT)"),
        ("auto", "cpu", "c++", "q4 on cpu (auto: c++ is here"),
        ("auto", "cpu", None, "bf16 on cpu (auto: there is no C++ compiler"),
        ("auto", "cuda", "g++", "bf16 on cuda (auto: native code is for processors)"),
    ],
)
def test_the_summary_says_what_auto_comes_to_and_why(
    variant: str, device: str, compiler: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name if name == compiler else None)
    assert variant_and_why(variant, device).startswith(told)
