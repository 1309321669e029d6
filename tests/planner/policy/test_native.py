"""mix and lookahead compute in a compiled library: there is nothing else that would do it, and no memory but theirs is touched."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.decisions import ExpertPolicyName
from penstock.planner.contract.experts.policies import ExpertPolicy, make_expert_policy, native

LAYERS, COUNT, TOP_K = 3, 6, 2


@pytest.fixture(autouse=True)
def _loaded_anew() -> Iterator[None]:
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def mix() -> ExpertPolicy:
    return make_expert_policy(ExpertPolicyName.mix, LAYERS, COUNT, TOP_K)


def test_without_the_library_the_error_names_it_and_says_what_builds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: ".of-another-python.so")
    with pytest.raises(UserError, match=r"_native\.of-another-python\.so.*pip install") as refused:
        mix()
    assert "\n" not in str(refused.value)
    make_expert_policy(ExpertPolicyName.lru, LAYERS, COUNT, TOP_K)


@pytest.mark.parametrize(("state", "source"), [("MixState", "mix.c"), ("FarState", "far.c")])
def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, state: str, source: str) -> None:
    class Shorter(ctypes.Structure):
        _fields_ = getattr(native, state)._fields_[:-1]

    monkeypatch.setattr(native, state, Shorter)
    with pytest.raises(UserError, match=f"another version of {source}"):
        mix()


@pytest.mark.parametrize(("layer", "experts"), [(0, [0, COUNT]), (0, [-1, 0]), (0, [0]), (LAYERS, [0, 1]), (-1, [0, 1])])
def test_a_visit_that_cannot_be_is_refused_and_leaves_no_mark(layer: int, experts: list[int]) -> None:
    policy, untouched = mix(), mix()
    with pytest.raises(ValueError, match=f"layer {layer}"):
        policy.observe(layer, experts)
    for each in (policy, untouched):
        each.observe(0, [2, 3])
    np.testing.assert_array_equal(policy.worth(0), untouched.worth(0))


def test_more_experts_than_there_are_do_not_fit_into_a_visit() -> None:
    with pytest.raises(ValueError):
        mix().observe(0, list(range(COUNT)) + [0])


@pytest.mark.parametrize(("layer", "expert"), [(0, COUNT), (0, -1), (LAYERS, 0)])
def test_a_prompt_that_cannot_be_is_refused(layer: int, expert: int) -> None:
    with pytest.raises(ValueError, match=f"layer {layer}"):
        mix().study(layer, np.array([[0, 1], [1, expert]]))


def test_a_prompt_in_any_layout_of_memory_is_the_same_prompt() -> None:
    routed = np.random.default_rng(0).permuted(np.tile(np.arange(COUNT), (40, 1)), axis=1)[:, :TOP_K]
    found = []
    for prompt in (routed, np.asfortranarray(routed), routed.astype(np.int16), np.repeat(routed, 2, axis=0)[::2]):
        policy = mix()
        policy.study(0, prompt)
        found.append(policy.worth(0).copy())
    for each in found[1:]:
        np.testing.assert_array_equal(each, found[0])
