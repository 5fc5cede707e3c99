"""One request inside the engine: its tokens, how far its K/V is computed, and which blocks hold it.

Owns the facts about a sequence and the rule by which it ends. Does not know who decides what runs
(`decode.engine.scheduler`), which blocks are free (`decode.engine.block_manager`) and how a token is chosen
(`decode.oracle.sampler`).
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import Literal

from decode.engine.grammar import GrammarMatcher
from decode.engine.lookup import PromptLookup
from decode.engine.sampling import LogitAdjustments, SamplingParams

FinishReason = Literal["stop", "length"]


class Sequence:
    """Prompt and output of one request as one list of token ids; the first `num_computed_tokens` have K/V.

    Given `output_token_ids` it is a continuation: they were published before (perhaps by another worker), so they
    are prefilled with the prompt and the next sampled token has index `len(output_token_ids)`.

    A sequence holds blocks (is admitted) or waits; an admitted one with exactly one token left to compute is
    decoding, with more it is prefilling. The last token sampled never has K/V yet.
    """

    __slots__ = (
        "adjustments",
        "arrival",
        "block_hashes",
        "block_table",
        "grammar",
        "lookup",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_overtaken",
        "num_prompt_tokens",
        "sampling",
        "sequence_id",
        "token_ids",
        "waits_for_blocks",
        "was_admitted",
    )

    def __init__(
        self,
        sequence_id: str,
        prompt_token_ids: Tokens[int],
        sampling: SamplingParams,
        output_token_ids: Tokens[int] = (),
    ) -> None:
        self.sequence_id = sequence_id
        self.sampling = sampling
        self.token_ids: list[int] = [*prompt_token_ids, *output_token_ids]
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        """Prompt tokens whose K/V was restored from the prefix cache when the sequence was first admitted."""
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []
        """The hash chain of its full blocks, as far as anyone asked; depends on the tokens alone."""
        self.arrival = 0
        """Order of arrival, set when the engine takes the sequence; kept through preemption."""
        self.was_admitted = False
        self.num_overtaken = 0
        """How many later arrivals were admitted while this one was first in the queue."""
        self.waits_for_blocks = False
        """Its turn to be admitted came, and there was no room for it."""
        self.adjustments = LogitAdjustments.of(sampling, output_token_ids)
        """What penalties and biases make of the output so far; None: nothing."""
        self.grammar: GrammarMatcher | None = None
        """Where the output stands in its grammar, set when the engine takes the sequence."""
        self.lookup: PromptLookup | None = None
        """Who drafts its next tokens, set when the engine takes the sequence; None: nobody."""

    def __repr__(self) -> str:
        return (
            f"Sequence({self.sequence_id!r}, {self.num_prompt_tokens}+{self.num_output_tokens} tokens, "
            f"{self.num_computed_tokens} computed, blocks {self.block_table})"
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_admitted(self) -> bool:
        return bool(self.block_table)

    def admit(self, block_table: list[int], num_restored_tokens: int) -> None:
        """Begin to run in `block_table`, whose first `num_restored_tokens` tokens have their K/V already."""
        assert not self.block_table
        assert self.num_computed_tokens == 0
        assert num_restored_tokens < len(self.token_ids)
        self.block_table = block_table
        self.num_computed_tokens = num_restored_tokens
        self.waits_for_blocks = False
        if not self.was_admitted:
            self.was_admitted = True
            self.num_cached_tokens = min(num_restored_tokens, self.num_prompt_tokens)

    def append_token(self, token_id: int) -> None:
        """Extend the output by the token that was just sampled: all others have their K/V."""
        assert self.num_computed_tokens == len(self.token_ids)
        self.token_ids.append(token_id)
        if self.adjustments is not None:
            self.adjustments.count(token_id)

    def preempt(self) -> None:
        """Forget all K/V: wait again, and recompute when admitted again. The blocks must have been freed."""
        assert not self.block_table
        self.num_computed_tokens = 0

    def finish_reason(self, max_len: int) -> FinishReason | None:
        """Why the sequence is complete as it stands, or None. `max_len` bounds prompt and output together.

        A stop token under a grammar always is its end: the grammar allows it nowhere else.
        """
        sampling = self.sampling
        num_tokens = len(self.token_ids)
        num_output_tokens = num_tokens - self.num_prompt_tokens
        if (
            self.token_ids[-1] in sampling.stop_token_ids
            and num_output_tokens
            and (sampling.grammar or (num_output_tokens > sampling.min_tokens and not sampling.ignore_eos))
        ):
            return "stop"
        if num_output_tokens >= sampling.max_tokens or num_tokens >= max_len:
            return "length"
        return None
