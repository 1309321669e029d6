"""A key stands for everything that a page's contents depend on."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from penstock.runtime.kv.disk.page_keys import ROOT, namespace, page_keys

FACTS = {"model": {"layers": 2, "heads": [1, 2]}, "weights": "abc", "dtype": "bfloat16", "page_tokens": 4, "layout": "kv"}


def test_a_namespace_does_not_depend_on_the_order_of_the_configuration() -> None:
    assert namespace(**FACTS | {"model": {"heads": [1, 2], "layers": 2}}) == namespace(**FACTS)


@pytest.mark.parametrize(
    "change",
    [{"model": {"layers": 3, "heads": [1, 2]}}, {"weights": "abd"}, {"dtype": "float16"}, {"page_tokens": 8}, {"layout": "vk"}],
)
def test_whatever_must_not_be_mixed_changes_the_namespace(change: dict) -> None:
    assert namespace(**FACTS | change) != namespace(**FACTS)


def test_a_key_chains_namespace_parent_and_tokens() -> None:
    space = namespace(**FACTS)
    first = xxhash.xxh3_128_digest(space + ROOT + np.arange(4, dtype="<i8").tobytes())
    second = xxhash.xxh3_128_digest(space + first + np.arange(4, 8, dtype="<i8").tobytes())
    assert page_keys(space, range(11), 4) == [first, second]


def test_only_full_pages_have_keys() -> None:
    assert [len(page_keys(bytes(16), [7] * n, 4)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_arrays_of_any_integer_type_and_lists_give_the_same_keys() -> None:
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    keys = page_keys(bytes(16), ids, 4)
    for dtype in ("i4", "u2", ">i8", "<i8"):
        assert page_keys(bytes(16), np.array(ids, dtype=dtype), 4) == keys
    assert page_keys(bytes(16), np.repeat(np.array(ids), 2)[::2], 4) == keys


def test_one_token_changes_the_keys_from_its_page_on() -> None:
    ids = list(range(16))
    changed = page_keys(bytes(16), ids[:6] + [99] + ids[7:], 4)
    same = [a == b for a, b in zip(page_keys(bytes(16), ids, 4), changed, strict=True)]
    assert same == [True, False, False, False]


def test_tokens_must_be_integers() -> None:
    with pytest.raises(TypeError, match="float64"):
        page_keys(bytes(16), [1.5, 2.0], 2)
