from __future__ import annotations

import pytest

from trioserve.core.block_pool import BlockContent, BlockPool
from trioserve.core.stats import CacheEvents


def _content(name: int, group: int = 0) -> BlockContent:
    return group, b"%d" % name


def _named_pool(num_blocks: int) -> BlockPool:
    """All blocks are free; block i has the content _content(i), and was released i-th."""
    pool = BlockPool(num_blocks)
    for block in pool.take(num_blocks):
        pool.publish(block, _content(block))
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
    pool.publish(cached, _content(7))
    pool.release([cached, *others])
    pool.check()
    assert set(pool.take(2)) == set(others)
    assert pool.find(_content(7)) == cached


def test_a_free_block_is_found_until_it_is_taken():
    pool = _named_pool(2)
    assert pool.find(_content(1)) == 1
    assert pool.take(1) == [0]
    assert pool.find(_content(0)) is None
    assert pool.find(_content(1)) == 1


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
    pool.publish(first, _content(7))
    pool.publish(second, _content(7))
    assert pool.find(_content(7)) == first
    pool.release([second, first])
    pool.check()
    assert pool.statistics().num_named == 1
    assert pool.take(1) == [second]
    assert pool.find(_content(7)) == first


def test_groups_do_not_find_each_others_blocks():
    pool = BlockPool(3)
    first, second, _ = pool.take(3)
    pool.publish(first, _content(7, group=0))
    assert pool.find(_content(7, group=1)) is None
    pool.publish(second, _content(7, group=1))
    pool.check()
    assert pool.find(_content(7, group=0)) == first
    assert pool.find(_content(7, group=1)) == second


def test_leading_blocks_end_at_the_first_unknown_content():
    pool = _named_pool(4)
    names = [2, 0, 9, 1]
    assert pool.find_leading(map(_content, names)) == [2, 0]
    assert pool.find_leading([_content(9)]) == []
    assert pool.find_leading([]) == []


def test_a_block_has_a_name_from_its_publication_until_it_is_taken():
    pool = BlockPool(1)
    (block,) = pool.take(1)
    assert not pool.is_named(block)
    pool.publish(block, _content(7))
    pool.release([block])
    assert pool.is_named(block)
    pool.take(1)
    assert not pool.is_named(block)


def test_events_count_since_they_were_last_taken():
    pool = _named_pool(3)
    assert pool.take_events() == CacheEvents(num_stored=3)
    block, _ = pool.take(2)
    assert pool.take_events() == CacheEvents(num_evicted=2)
    pool.publish(block, _content(2))  # known: block 2 has it
    assert not pool.forget_contents()
    assert pool.take_events() == CacheEvents()
    pool.release([0, 1])
    assert pool.forget_contents()
    assert pool.take_events() == CacheEvents(num_resets=1)


def test_contents_are_forgotten_only_while_nobody_holds_a_block():
    pool = _named_pool(2)
    pool.share([0])
    assert not pool.forget_contents()
    assert pool.find(_content(1)) == 1
    pool.release([0])
    assert pool.forget_contents()
    assert pool.find(_content(0)) is None
    assert pool.find(_content(1)) is None
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
    pool.publish(block, _content(7))
    with pytest.raises(AssertionError, match="published twice"):
        pool.publish(block, _content(8))
    pool.release([block])
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.release([block])
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.publish(block, _content(8))
