"""Output that has to follow a grammar: which tokens may come next, as a bit mask.

Owns the tokenizer that `llguidance` needs, the compiled grammars, and where each sequence stands in its own. Refuses
to know logits (the samplers apply masks) and how a grammar comes about (the web process writes it).

A mask is a function of the grammar, the sampling parameters and the output tokens. So a matcher is built from the
output history when the engine takes a sequence, and follows the tokens from then on, also through preemption. It is
built on a helper thread (`begin`): the engine goes on with its other sequences.

Masks are off the critical path. `prepare` hands the work to one helper thread when a step is planned; the forward
pass runs meanwhile (native steps and torch's kernels release the interpreter lock, and so does llguidance), and
`mask` is called when the logits are there. What is left to wait for is what took longer than the forward pass.

How a grammar sees tokens: by their bytes, and by `<name>` those that have no text (`Vocabulary.names`). Where the
grammar leaves one text only, it is cut greedily, into the longest tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from decode.checkpoint.vocabulary import Vocabulary
from decode.engine.sampling import SamplingParams
from decode.errors import InvalidGrammar

if TYPE_CHECKING:
    import llguidance

Mask = npt.NDArray[np.int32]
_MAX_COMPILED = 64
"""Compiled grammars that are kept for the next request, or the other choices of the same one."""


class Grammars:
    """Makes the matchers of one engine."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """`vocabulary` is called once, in the helper thread, when somebody says `load` or needs it."""
        self._vocabulary = vocabulary
        self._helper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        # Of its own: compiling takes long, and the masks of other sequences must not wait for it.
        self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-compiler")
        self._tokenizer: Future[_Tokenizer] | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def load(self) -> Future[_Tokenizer]:
        """Begin to read the vocabulary, unless that has been done."""
        if self._tokenizer is None:
            self._tokenizer = self._helper.submit(lambda: _Tokenizer(self._vocabulary()))
        return self._tokenizer

    def begin(
        self, sequence_id: str, sampling: SamplingParams, output_token_ids: list[int]
    ) -> Future[GrammarMatcher]:
        """`matcher` on a thread of its own, and the next token's mask: the first one takes as long as compiling."""

        def work() -> GrammarMatcher:
            try:
                matcher = self.matcher(sequence_id, sampling, output_token_ids)
                matcher.compute()
            except InvalidGrammar:
                raise
            except Exception as error:  # of the library: it ends this sequence, and no step of the others
                raise InvalidGrammar(sequence_id, f"it cannot be compiled: {error!r}") from error
            return matcher

        return self._compiler.submit(work)

    def matcher(self, sequence_id: str, sampling: SamplingParams, output_token_ids: list[int]) -> GrammarMatcher:
        """Where `output_token_ids` stand in `sampling.grammar`. Raises InvalidGrammar naming the reason."""
        try:
            tokenizer = self.load().result()
        except (ValueError, OSError) as error:
            raise InvalidGrammar(sequence_id, f"the tokenizer cannot be used for grammars: {error}") from error
        if not any(token in tokenizer for token in sampling.stop_token_ids):
            raise InvalidGrammar(sequence_id, "stop_token_ids holds no token that could end the output")
        compiled = self._compile(sequence_id, tokenizer, sampling.grammar)
        matcher = GrammarMatcher(compiled.deep_copy(), tokenizer, sampling, self._helper)
        for index, token_id in enumerate(output_token_ids):
            matcher.accept(token_id)
            if matcher.failure:
                raise InvalidGrammar(sequence_id, f"output token {index} does not follow it: {matcher.failure}")
        return matcher

    def _compile(self, sequence_id: str, tokenizer: _Tokenizer, grammar: str) -> llguidance.LLMatcher:
        if (compiled := self._compiled.get(grammar)) is None:
            compiled = tokenizer.compile(grammar)
            if compiled.is_error():
                raise InvalidGrammar(sequence_id, compiled.get_error())
            self._compiled[grammar] = compiled
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return compiled


class GrammarMatcher:
    """Where one output stands in its grammar. One thread calls `prepare`, `mask` and `accept`."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        tokenizer: _Tokenizer,
        sampling: SamplingParams,
        helper: ThreadPoolExecutor,
    ) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._stops = tuple(token for token in sampling.stop_token_ids if token in tokenizer)
        ends = dict.fromkeys((*self._stops, *tokenizer.eos_token_ids))
        self._ends_with_text = tuple(token for token in ends if tokenizer.has_text(token))
        self._min_tokens = sampling.min_tokens
        self._helper = helper
        self._num_accepted = 0
        self._next: Future[Mask] | None = None
        self.failure = ""
        """Why the output cannot go on (a limit of the library, or no token continues it); empty: it can."""

    def prepare(self) -> None:
        """Begin to compute the mask of the next token, unless that has been done."""
        if self._next is None:
            self._next = self._helper.submit(self._compute)

    def compute(self) -> None:
        """As `prepare`, on the caller's thread."""
        self._next = Future()
        self._next.set_result(self._compute())

    def mask(self) -> Mask:
        """Tokens that may come next as bits, the lowest first: [vocab / 32 rounded up], int32. At least one is set.

        Stop tokens are in it where the grammar may end, from `min_tokens` on, and alone where it admits nothing else.
        """
        self.prepare()
        assert self._next is not None
        return self._next.result()

    def accept(self, token_id: int) -> None:
        """The output goes on with `token_id`, which is not a stop token."""
        if self._next is not None:
            self._next.result()  # the helper has left the matcher
            self._next = None
        self._num_accepted += 1
        if not self._matcher.consume_token(token_id):
            self.failure = self._matcher.get_error() or "the grammar had ended"

    def _compute(self) -> Mask:
        matcher = self._matcher
        mask = np.zeros(self._tokenizer.num_words, np.int32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            self.failure = matcher.get_error()
        _clear(mask, self._ends_with_text)  # a grammar that allows its text does not mean an end
        if matcher.is_accepting():
            _clear(mask, self._tokenizer.eos_token_ids)
            if self._num_accepted >= self._min_tokens or not mask.any():
                _set(mask, self._stops)
        if not mask.any():
            self.failure = self.failure or "no token of the vocabulary continues the output"
            _set(mask, self._stops)
        return mask


class _Tokenizer:
    """The vocabulary in llguidance's form."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import llguidance  # not at the top: it takes a tenth of a second, and most sequences have no grammar

        self._library = llguidance
        self.eos_token_ids = vocabulary.eos_token_ids
        self._has_text = bytes(map(bool, vocabulary.token_bytes))
        self.num_words = -(-len(self._has_text) // 32)
        source = _Source(vocabulary)
        wrapper = llguidance.TokenizerWrapper(source)
        self._tokenizer = llguidance.LLTokenizer(wrapper, eos_token=list(self.eos_token_ids) or None)
        source.tokenizer = self._tokenizer
        source.tokens = []  # the library has copied them
        self._limits = llguidance.LLParserLimits(verbose_errors=False)

    def __contains__(self, token_id: int) -> bool:
        return 0 <= token_id < len(self._has_text)

    def has_text(self, token_id: int) -> bool:
        return bool(self._has_text[token_id])

    def compile(self, grammar: str) -> llguidance.LLMatcher:
        return self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)


class _Source:
    """What `llguidance.TokenizerWrapper` wraps."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = [
            vocabulary.names[token_id].encode() if token_id in vocabulary.names else text
            for token_id, text in enumerate(vocabulary.token_bytes)
        ]
        self.special_token_ids = list(vocabulary.names)
        self.eos_token_id = next(iter(vocabulary.eos_token_ids), None)
        self.bos_token_id = None
        self.tokenizer: Any = None

    def __call__(self, text: bytes) -> list[int]:
        """Cuts text that the grammar leaves no choice about."""
        if self.tokenizer is None:
            return []
        tokens: list[int] = self.tokenizer.greedy_tokenize(text.decode())
        return tokens


def _set(mask: Mask, token_ids: tuple[int, ...]) -> None:
    words = mask.view(np.uint32)
    for token_id in token_ids:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)


def _clear(mask: Mask, token_ids: tuple[int, ...]) -> None:
    words = mask.view(np.uint32)
    for token_id in token_ids:
        words[token_id // 32] &= ~np.uint32(1 << token_id % 32)
