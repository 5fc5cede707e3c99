"""`decode.engine.block_manager`: reference counts, the prefix hash chain, and who is evicted first."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from decode.engine.block_manager import BlockManager
from decode.engine.sampling import SamplingParams
from decode.engine.sequence import Sequence
from decode.errors import IntegrityError

SIZE = 4


def sequence(*token_ids: int) -> Sequence:
    return Sequence("a", token_ids, SamplingParams(max_tokens=8))


def written(blocks: BlockManager, *token_ids: int) -> Sequence:
    """A sequence whose tokens all have K/V."""
    made = sequence(*token_ids)
    prefix = blocks.find_prefix(made)
    assert blocks.allocate(made, prefix, 0)
    blocks.commit(made, len(token_ids) - made.num_computed_tokens)
    return made


def test_a_sequence_gets_blocks_for_all_its_tokens() -> None:
    blocks = BlockManager(4, SIZE, "f")
    one = sequence(*range(9))
    assert blocks.allocate(one, [], 0)
    assert len(set(one.block_table)) == 3
    assert blocks.num_free_blocks == 1
    blocks.check([one.block_table])


def test_allocation_that_does_not_fit_changes_nothing() -> None:
    blocks = BlockManager(2, SIZE, "f")
    one = sequence(*range(9))
    assert not blocks.allocate(one, [], 0)
    assert not one.is_admitted
    assert blocks.num_free_blocks == 2
    blocks.check([])


def test_allocation_leaves_the_spare_blocks_free() -> None:
    blocks = BlockManager(3, SIZE, "f")
    assert not blocks.allocate(sequence(*range(8)), [], 2)
    assert blocks.allocate(sequence(*range(8)), [], 1)


def test_restored_blocks_that_nobody_holds_count_as_taken_from_the_free_ones() -> None:
    blocks = BlockManager(3, SIZE, "f")
    blocks.free(written(blocks, *range(8)))
    again = sequence(*range(9))
    prefix = blocks.find_prefix(again)
    assert len(prefix) == 2
    assert not blocks.allocate(again, prefix, 1)
    assert blocks.allocate(again, prefix, 0)
    blocks.check([again.block_table])


def test_a_block_is_not_found_before_its_kv_is_committed() -> None:
    blocks = BlockManager(8, SIZE, "f")
    first = sequence(*range(9))
    assert blocks.allocate(first, [], 0)
    assert blocks.find_prefix(sequence(*range(9))) == []
    blocks.commit(first, SIZE)
    assert blocks.find_prefix(sequence(*range(9))) == first.block_table[:1]


def test_a_block_is_found_only_once_it_is_full() -> None:
    blocks = BlockManager(8, SIZE, "f")
    first = sequence(*range(9))
    assert blocks.allocate(first, [], 0)
    blocks.commit(first, SIZE - 1)
    assert blocks.find_prefix(sequence(*range(9))) == []
    blocks.commit(first, SIZE + 1)
    assert blocks.find_prefix(sequence(*range(9))) == first.block_table[:2]


def test_the_last_token_is_never_restored() -> None:
    blocks = BlockManager(8, SIZE, "f")
    first = written(blocks, *range(8))
    assert blocks.find_prefix(sequence(*range(8))) == first.block_table[:1]
    assert blocks.find_prefix(sequence(*range(9))) == first.block_table[:2]


def test_a_shared_block_is_free_when_its_last_user_is() -> None:
    blocks = BlockManager(8, SIZE, "f")
    first = written(blocks, *range(9))
    second = written(blocks, *range(8), 99)
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    blocks.free(first)
    blocks.check([second.block_table])
    assert blocks.num_free_blocks == 5
    blocks.free(second)
    blocks.check([])
    assert blocks.num_free_blocks == 8


def test_blocks_of_a_finished_sequence_can_still_be_found() -> None:
    blocks = BlockManager(8, SIZE, "f")
    first = written(blocks, *range(9))
    table = first.block_table
    blocks.free(first)
    assert written(blocks, *range(9)).block_table[:2] == table[:2]


def test_nameless_blocks_are_taken_before_findable_ones() -> None:
    blocks = BlockManager(3, SIZE, "f")
    blocks.free(written(blocks, *range(8)))
    other = sequence(50, 51)
    assert blocks.allocate(other, [], 0)
    assert len(blocks.find_prefix(sequence(*range(9)))) == 2


def test_the_least_recently_used_block_is_evicted_first() -> None:
    blocks = BlockManager(2, SIZE, "f")
    blocks.free(written(blocks, 1, 1, 1, 1))
    blocks.free(written(blocks, 2, 2, 2, 2))
    reader = sequence(1, 1, 1, 1, 9)
    one = blocks.find_prefix(reader)
    blocks.allocate(reader, one, 0)  # evicts 2, uses 1
    blocks.free(reader)
    blocks.free(written(blocks, 3, 3, 3, 3))
    assert blocks.find_prefix(sequence(2, 2, 2, 2, 9)) == []
    assert blocks.find_prefix(sequence(1, 1, 1, 1, 9)) == one


def test_of_one_sequence_the_tail_is_evicted_before_the_head() -> None:
    blocks = BlockManager(3, SIZE, "f")
    blocks.free(written(blocks, *range(12)))
    assert blocks.allocate(sequence(50, 51), [], 0)
    assert len(blocks.find_prefix(sequence(*range(13)))) == 2


def test_an_evicted_block_is_not_found() -> None:
    blocks = BlockManager(1, SIZE, "f")
    blocks.free(written(blocks, 1, 1, 1, 1))
    assert blocks.allocate(sequence(2), [], 0)
    assert blocks.find_prefix(sequence(1, 1, 1, 1, 9)) == []


def test_the_second_of_two_equal_blocks_stays_private() -> None:
    blocks = BlockManager(4, SIZE, "f")
    first, second = sequence(*range(5)), sequence(*range(5))
    for one in (first, second):
        assert blocks.allocate(one, [], 0)
    for one in (first, second):
        blocks.commit(one, 5)
    assert blocks.find_prefix(sequence(*range(5))) == first.block_table[:1]
    blocks.check([first.block_table, second.block_table])
    blocks.free(second)
    blocks.free(first)
    blocks.check([])


def test_one_more_block_until_there_is_none() -> None:
    blocks = BlockManager(2, SIZE, "f")
    one = written(blocks, *range(4))
    assert blocks.append_block(one)
    assert not blocks.append_block(one)
    assert len(one.block_table) == 2
    blocks.check([one.block_table])


def test_a_block_name_commits_to_model_parent_and_tokens() -> None:
    names = {
        BlockManager(4, SIZE, fingerprint).block_hash(sequence(*token_ids), 1)
        for fingerprint in ("f", "g")
        for token_ids in (range(8), [9, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 8], [0, 1, 2, 3, 5, 4, 6, 7])
    }
    assert len(names) == 8


def test_a_block_name_is_the_same_in_every_process() -> None:
    names = [BlockManager(4, SIZE, "f").block_hash(sequence(*range(8)), 1) for _ in range(2)]
    assert names[0] == names[1]
    assert len(names[0]) == 32


def _leak(blocks: BlockManager) -> None:
    blocks._ref_counts[0] += 1


def _free_twice(blocks: BlockManager) -> None:
    blocks._nameless.append(blocks._nameless[0])


def _free_in_use(blocks: BlockManager) -> None:
    blocks._nameless[0] = 0


def _wrong_list(blocks: BlockManager) -> None:
    blocks._reusable[blocks._nameless.pop()] = None


def _lost_name(blocks: BlockManager) -> None:
    blocks._block_by_hash.clear()


def _name_without_block(blocks: BlockManager) -> None:
    blocks._block_by_hash[b"x"] = 0


@pytest.mark.parametrize("spoil", [_leak, _free_twice, _free_in_use, _wrong_list, _lost_name, _name_without_block])
def test_the_check_finds_books_that_contradict_themselves(spoil: Callable[[BlockManager], None]) -> None:
    blocks = BlockManager(4, SIZE, "f")
    held = written(blocks, *range(5))
    blocks.check([held.block_table])
    spoil(blocks)
    with pytest.raises(IntegrityError):
        blocks.check([held.block_table])


def test_the_check_finds_a_table_that_names_a_block_twice() -> None:
    blocks = BlockManager(4, SIZE, "f")
    with pytest.raises(IntegrityError, match="twice"):
        blocks.check([[1, 1]])
