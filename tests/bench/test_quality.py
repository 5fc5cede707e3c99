"""The quality figures: by hand on logits that were written down, and on a tiny model through the real variants."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bench.quality import Scores, judge, main, opened, report, table, windows
from tests.decode.native.reference import VOCAB, ReferenceDecoder, tiny_checkpoint

WINDOW = [(5 * i * i + i + 3) % VOCAB for i in range(40)]


def test_windows_leave_out_a_last_token_that_predicts_nothing() -> None:
    assert windows(range(7), 3) == [[0, 1, 2], [3, 4, 5]]
    assert windows(range(8), 3) == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_perplexity_agreement_and_divergence_are_the_usual_ones() -> None:
    p, q = [0.5, 0.25, 0.25], [0.25, 0.5, 0.25]
    reference = torch.tensor([p, p, p]).log()
    logits = torch.tensor([q, p, q]).log() + 3.0  # logits need not be normed
    scores = Scores()
    scores.add([0, 1, 2], reference, logits)
    assert scores.num_predicted == 2
    assert scores.perplexity == pytest.approx(math.exp(-(math.log(0.5) + math.log(0.25)) / 2))
    assert scores.agreement == 0.5
    kl = 0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.5)
    assert scores.mean_kl == pytest.approx(kl / 2)
    assert scores.kl_percentile(0.99) == pytest.approx(kl)
    assert scores.kl_percentile(0.5) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(("variant", "tolerance"), [("fp32", 1e-3), ("bf16", 0.3), ("q8", 1.0)])
def test_every_position_of_a_window_is_computed_as_the_reference_does(variant: str, tolerance: float) -> None:
    checkpoint = tiny_checkpoint("llama")
    wanted = ReferenceDecoder(checkpoint).logits(WINDOW)
    with opened(checkpoint, variant, 48) as logits:
        assert np.abs(logits(WINDOW).numpy() - wanted).max() < tolerance
        first = logits(WINDOW[:17])  # a shorter window after a longer one: nothing of that is left
    assert np.abs(first.numpy() - wanted[:17]).max() < tolerance


def test_the_oracle_agrees_with_itself_and_a_quantised_variant_nearly() -> None:
    scores = judge(tiny_checkpoint("llama"), ["fp32", "q8"], WINDOW, 24)
    assert scores["fp32"].agreement == 1.0
    assert scores["fp32"].mean_kl == 0.0
    assert scores["q8"].num_predicted == len(WINDOW) - 2
    assert 0.0 < scores["q8"].mean_kl < 0.05
    assert scores["q8"].perplexity == pytest.approx(scores["fp32"].perplexity, rel=0.05)


def test_the_report_has_a_row_for_each_variant_and_says_what_it_measured() -> None:
    scores = judge(tiny_checkpoint("llama"), ["fp32", "q8"], WINDOW, 24)
    text = report("tiny", "python -m bench.quality --write", 24, len(WINDOW), scores)
    assert table(scores) in text
    assert [line.split(" | ")[0] for line in table(scores).splitlines()[2:]] == ["| fp32", "| q8"]
    assert "38 of its 40 tokens" in text


@pytest.mark.parametrize(
    ("arguments", "field"), [(["--variants", "fp32,int3"], "--variants: int3"), (["--window", "1"], "--window")]
)
def test_a_bad_option_is_named(arguments: list[str], field: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert field in capsys.readouterr().err
