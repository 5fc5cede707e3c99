"""Which block of the paged K/V cache holds what: free lists, reference counts and the prefix hash chain.

Owns the blocks' bookkeeping. Does not know when a sequence runs (`decode.engine.scheduler`) and what the blocks
hold (`decode.oracle.kv_cache`). Its rules:

- A full block is named by a hash that commits to the model fingerprint, to the parent block's hash and to its token
  ids (BLAKE2b, so that no prompt can be crafted to collide). The token ids alone decide the name.
- A block can be found by its name only from `commit` on, which is called when its K/V has been written.
- A block that nobody references stays findable until its space is needed: nameless blocks are taken first, then the
  named ones, least recently used first; of one sequence the tail goes before the head.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

from decode.engine.sequence import Sequence
from decode.errors import IntegrityError


class BlockManager:
    """`num_blocks` blocks of `block_size` tokens; `fingerprint` seeds the hash chain."""

    def __init__(self, num_blocks: int, block_size: int, fingerprint: str) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._root = _digest(fingerprint.encode())
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_by_hash: dict[bytes, int] = {}
        self._nameless = list(range(num_blocks - 1, -1, -1))
        self._reusable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody references, findable ones included."""
        return len(self._nameless) + len(self._reusable)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def block_hash(self, sequence: Sequence, index: int) -> bytes:
        """The name of full block `index` of the sequence; memoised in the sequence."""
        hashes = sequence.block_hashes
        size = self.block_size
        while len(hashes) <= index:
            start = len(hashes) * size
            parent = hashes[-1] if hashes else self._root
            hashes.append(_digest(parent + array("I", sequence.token_ids[start : start + size]).tobytes()))
        return hashes[index]

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """The blocks that hold the K/V of the longest known prefix, never of the last token: it must be computed."""
        blocks: list[int] = []
        for index in range((len(sequence.token_ids) - 1) // self.block_size):
            block = self._block_by_hash.get(self.block_hash(sequence, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def allocate(self, sequence: Sequence, prefix: list[int], num_spare_blocks: int) -> bool:
        """Admit a waiting sequence: `prefix` (from `find_prefix`, just now) and new blocks for all its other tokens.

        False, and nothing changes, unless `num_spare_blocks` blocks stay free.
        """
        ref_counts = self._ref_counts
        num_new = self.num_blocks_for(len(sequence.token_ids)) - len(prefix)
        num_revived = sum(ref_counts[block] == 0 for block in prefix)
        if num_new + num_revived + num_spare_blocks > self.num_free_blocks:
            return False
        for block in prefix:
            if ref_counts[block] == 0:
                del self._reusable[block]
            ref_counts[block] += 1
        table = [*prefix, *(self._take() for _ in range(num_new))]
        sequence.admit(table, len(prefix) * self.block_size)
        return True

    def append_block(self, sequence: Sequence) -> bool:
        """One more block for a sequence whose blocks are full; False when there is none."""
        if not self._nameless and not self._reusable:
            return False
        sequence.block_table.append(self._take())
        return True

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """The K/V of the next `num_tokens` tokens is written: blocks filled by them can be found from now on."""
        size = self.block_size
        first = sequence.num_computed_tokens // size
        sequence.num_computed_tokens += num_tokens
        for index in range(first, sequence.num_computed_tokens // size):
            name = self.block_hash(sequence, index)
            if name not in self._block_by_hash:
                block = sequence.block_table[index]
                self._block_by_hash[name] = block
                self._hashes[block] = name

    def free(self, sequence: Sequence) -> None:
        """Give up all blocks of an admitted sequence, tail first; those with a name can still be found."""
        ref_counts = self._ref_counts
        for block in reversed(sequence.block_table):
            ref_counts[block] -= 1
            if ref_counts[block] == 0:
                if self._hashes[block] is None:
                    self._nameless.append(block)
                else:
                    self._reusable[block] = None
        sequence.block_table = []

    def _take(self) -> int:
        """A free block, referenced once and without a name. There must be one."""
        if self._nameless:
            block = self._nameless.pop()
        else:
            block, _ = self._reusable.popitem(last=False)
            name = self._hashes[block]
            assert name is not None
            # The name goes before the new owner writes: else a prompt with the old content would find the block in
            # the middle of being overwritten, and read the K/V of another sequence.
            del self._block_by_hash[name]
            self._hashes[block] = None
        self._ref_counts[block] = 1
        return block

    def check(self, block_tables: Iterable[list[int]]) -> None:
        """Compare the books with the tables of all live sequences. Raises IntegrityError: the first contradiction."""
        counted = [0] * self.num_blocks
        for table in block_tables:
            if len(set(table)) != len(table):
                raise IntegrityError(f"a block appears twice in {table}")
            for block in table:
                counted[block] += 1
        free = {*self._nameless, *self._reusable}
        if len(free) != self.num_free_blocks:
            raise IntegrityError("a block is free twice")
        for block, expected in enumerate(counted):
            if self._ref_counts[block] != expected:
                raise IntegrityError(
                    f"block {block}: reference count {self._ref_counts[block]}, but {expected} sequences hold it"
                )
            if (expected == 0) != (block in free):
                raise IntegrityError(f"block {block}: held by {expected} sequences, free is {block in free}")
            name = self._hashes[block]
            if block in (self._reusable if name is None else self._nameless):
                raise IntegrityError(f"block {block}: in the wrong free list for its name")
            if name is not None and self._block_by_hash.get(name) != block:
                raise IntegrityError(f"block {block}: its name leads to another block")
        if len(self._block_by_hash) != sum(name is not None for name in self._hashes):
            raise IntegrityError("a name leads to a block that does not bear it")


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=32).digest()
