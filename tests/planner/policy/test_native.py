"""mix and lookahead compute in a compiled library, or in numpy that says the same, and no memory but theirs is touched."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.decisions import ExpertPolicyName
from penstock.planner.contract.experts.policies import ExpertPolicy, make_expert_policy, native
from penstock.planner.contract.experts.policies.far import FarSight, reach
from penstock.planner.contract.experts.policies.uncompiled import Uncompiled
from penstock.planner.doctor.processor import processor_findings
from penstock.planner.solver.notes.expert_notes import expert_notes
from penstock.planner.solver.planning import answer
from penstock.planner.solver.terms.problem import Question
from tests.planner.small import GB, MB, machine, model, work

LAYERS, COUNT, TOP_K = 3, 6, 2


@pytest.fixture(autouse=True)
def _loaded_anew() -> Iterator[None]:
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def mix() -> ExpertPolicy:
    return make_expert_policy(ExpertPolicyName.mix, LAYERS, COUNT, TOP_K)


def test_a_library_that_cannot_be_loaded_is_named_with_what_builds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "_native.so").write_text("no library")
    monkeypatch.setattr(native, "library_path", lambda: tmp_path / "_native.so")
    with pytest.raises(UserError, match=r"_native\.so.*pip install") as refused:
        mix()
    assert "\n" not in str(refused.value)
    make_expert_policy(ExpertPolicyName.lru, LAYERS, COUNT, TOP_K)


def visited(name: ExpertPolicyName, seed: int) -> list[np.ndarray]:
    """All that a policy says while 120 tokens pass, some of them as prompts, most by habit."""
    layers, count, top_k = 4, 12, 3
    policy, draw, said = make_expert_policy(name, layers, count, top_k), np.random.default_rng(seed), []
    for token in range(120):
        for layer in range(layers):
            chances = draw.dirichlet(np.roll(np.arange(1, count + 1.0), 3 * layer + token // 4) ** 2)
            experts = draw.choice(count, top_k, replace=False, p=chances)
            if token % 40 == 20:
                policy.study(layer, np.stack([draw.permutation(count)[:top_k] for _ in range(5)]))
                continue
            policy.observe(layer, [int(e) for e in experts], np.roll(chances, 1).astype(np.float32))
            said += [policy.worth(layer).copy(), policy.foresee(layer).copy()] if layer else []
    return said


@pytest.mark.parametrize("name", [ExpertPolicyName.mix, ExpertPolicyName.lookahead])
@pytest.mark.parametrize("seed", [1, 2])
def test_without_a_compiler_the_same_is_said(name: ExpertPolicyName, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.library_path().exists(), "this suite runs with the compiled library"
    compiled = visited(name, seed)
    native.library.cache_clear()
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: ".of-another-python.so")
    uncompiled = visited(name, seed)
    assert isinstance(native.library(), Uncompiled)
    for here, there in zip(compiled, uncompiled, strict=True):
        np.testing.assert_allclose(there, here, rtol=2e-3, atol=2e-4)


def test_without_a_compiler_plans_and_the_doctor_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = "policies"
    assert native.unbuilt(ExpertPolicyName.mix) is None and next(f for f in processor_findings() if f.name == found).change == ""
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: ".of-another-python.so")
    said = native.unbuilt(ExpertPolicyName.mix)
    assert said and "C compiler" in said and native.unbuilt(ExpertPolicyName.lru) is native.unbuilt(None) is None
    assert next(f for f in processor_findings() if f.name == found).change == said
    moe = answer(Question(machine(vram=2 * GB, dram=4 * GB), model(16, ffn=480 * MB, experts=8), work()))
    assert [*expert_notes(moe, None)][-1] == said


@pytest.mark.parametrize("seed", [1, 2])
def test_without_a_compiler_the_same_is_named_far_ahead(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def named() -> list[object]:
        native.library.cache_clear()
        sight, draw, said = FarSight(8, 12, 3, 0.3), np.random.default_rng(seed), []
        for _ in range(30):
            sight.held[:] = draw.integers(0, 2, 8 * 12).astype(np.uint8).data
            for layer in range(8):
                rows = min(reach(8, 12), 7 - layer)
                sight.observe(layer, draw.permutation(12)[:3].tolist(), draw.random((rows, 12), np.float32) if rows else None)
                said.append(sight.named(layer, 2))
        return [*said, sight.chance(2, 0), sight.chance(3, 1)]

    compiled = named()
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: ".of-another-python.so")
    assert named() == compiled and any(compiled[:-2])


@pytest.mark.parametrize(("state", "source"), [("MixState", "mix.c"), ("FarState", "far.c")])
def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, state: str, source: str) -> None:
    class Shorter(ctypes.Structure):
        _fields_ = getattr(native, state)._fields_[:-1]

    monkeypatch.setattr(native, state, Shorter)
    with pytest.raises(UserError, match=f"another version of {source}"):
        mix()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("layer", "experts"), [(0, [0, COUNT]), (0, [-1, 0]), (0, [0]), (LAYERS, [0, 1]), (-1, [0, 1])])
def test_a_visit_that_cannot_be_is_refused_and_leaves_no_mark(
    layer: int, experts: list[int], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr("sysconfig.get_config_var", lambda name: ".of-another-python.so")
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
