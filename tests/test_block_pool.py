from __future__ import annotations

import pytest

from trioserve.core.block_pool import BlockPool


def _named_pool(num_blocks: int) -> BlockPool:
    """All blocks are free; block i has the content b"i", and was released i-th."""
    pool = BlockPool(num_blocks)
    for block in pool.take(num_blocks):
        pool.publish(block, b"%d" % block)
    pool.release(range(num_blocks))
    pool.check()
    return pool


def test_released_longest_ago_is_given_out_first():
    pool = _named_pool(4)
    assert pool.take(2) == [0, 1]
    pool.release([1, 0])
    pool.check()
    # 0 and 1 were given out for new content and have none yet, so they go before 2 and 3.
    assert set(pool.take(2)) == {0, 1}
    assert pool.take(2) == [2, 3]


def test_sharing_a_free_block_renews_its_age():
    pool = _named_pool(3)
    pool.share([0])
    pool.release([0])
    assert pool.take(3) == [1, 2, 0]


def test_blocks_without_content_are_given_out_before_cached_ones():
    pool = BlockPool(3)
    cached, *others = pool.take(3)
    pool.publish(cached, b"content")
    pool.release([cached, *others])
    pool.check()
    assert set(pool.take(2)) == set(others)
    assert pool.find(b"content") == cached


def test_a_free_block_is_found_until_it_is_taken():
    pool = _named_pool(2)
    assert pool.find(b"1") == 1
    assert pool.take(1) == [0]
    assert pool.find(b"0") is None
    assert pool.find(b"1") == 1


def test_a_shared_block_stays_held_until_its_last_holder_releases_it():
    pool = _named_pool(2)
    pool.share([1])
    pool.share([1])
    assert pool.statistics().num_free == 1
    pool.release([1])
    assert pool.statistics().num_free == 1
    pool.check()
    pool.release([1])
    assert pool.statistics().num_free == 2
    pool.check()


def test_the_first_block_of_equal_content_stays_the_one_found():
    pool = BlockPool(3)
    first, second, _ = pool.take(3)
    pool.publish(first, b"same")
    pool.publish(second, b"same")
    assert pool.find(b"same") == first
    pool.release([second, first])
    pool.check()
    assert pool.statistics().num_named == 1
    assert pool.take(1) == [second]
    assert pool.find(b"same") == first


def test_contents_are_forgotten_only_while_nobody_holds_a_block():
    pool = _named_pool(2)
    pool.share([0])
    assert not pool.forget_contents()
    assert pool.find(b"1") == 1
    pool.release([0])
    assert pool.forget_contents()
    assert pool.find(b"0") is None
    assert pool.find(b"1") is None
    assert pool.statistics().num_free == 2
    pool.check()


def test_misuse_is_refused():
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.release([0])
    block, other = pool.take(2)
    with pytest.raises(AssertionError, match="1 blocks taken, 0 free"):
        pool.take(1)
    with pytest.raises(AssertionError, match="may still change"):
        pool.share([other])
    pool.publish(block, b"content")
    with pytest.raises(AssertionError, match="published twice"):
        pool.publish(block, b"other")
    pool.release([block])
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.release([block])
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.publish(block, b"other")
