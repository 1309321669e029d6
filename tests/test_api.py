"""The Python API: a plan is solved without torch, and a model that is opened by it says what transformers says."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import penstock
from penstock.planner.cli import PROGRAM
from penstock.planner.contract.plan.planfile import write_plan
from penstock.planner.solver.planning import make_plan
from penstock.runtime.asked.prompts import read_vocabulary
from penstock.runtime.told.piecewise import PieceByPiece
from tests.cli import ROOT
from tests.support import save_tiny, with_tokenizer

WORK: dict[str, Any] = {"workload.prompt_tokens": 24, "workload.new_tokens": 8, "workload.batch": 2, "workload.dram_reserve_bytes": 0}
PROMPTS = [[5, 9, 200, 31, 7], [17, 250, 3], [88] * 20]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert {thread for thread in threading.enumerate() if type(thread).__name__ != "TMonitor"} <= before, "beside the one of progress bars"


def solved(checkpoint: Path, **keys: Any) -> penstock.Plan:
    return penstock.solve(checkpoint, "cpu", dram="2GiB", **(WORK | keys))


def expected(checkpoint: Path, prompts: list[list[int]], new_tokens: int) -> tuple[torch.Tensor, list[list[int]]]:
    """The unstreamed model's logits behind each prompt, and its greedy continuation, each prompt alone."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto").eval()
    with torch.inference_mode():
        logits = torch.cat([model(torch.tensor([ids])).logits[:, -1] for ids in prompts])
        said = [model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=new_tokens, pad_token_id=0) for ids in prompts]
    return logits, [out[0, len(ids) :].tolist() for ids, out in zip(prompts, said, strict=True)]


def test_importing_and_solving_import_neither_torch_nor_transformers(checkpoint: Path) -> None:
    code = (
        "import sys, penstock\n"
        "assert 'penstock.planner' not in sys.modules\n"
        f"plan = penstock.solve(model={str(checkpoint)!r}, hardware='cpu')\n"
        "assert plan.prediction.decode_tokens_per_s > 0\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["set()"]


def test_solve_is_what_the_command_line_solves(checkpoint: Path) -> None:
    words = ["hardware=rtx4090", "model=hf", f"model.checkpoint={checkpoint}", "hardware.vram_bytes=2GiB", "workload.batch=4"]
    words += ["force.page_tokens=32", "hardware.dram_bytes=4GiB"]
    plan = penstock.solve(
        str(checkpoint), "rtx4090", vram="2GiB", dram=4 << 30, overrides=["force.page_tokens=32"], **{"workload.batch": 4}
    )
    assert plan == make_plan(PROGRAM.configuration("solve", words))
    assert plan.decisions.batch == 4 and plan.hardware.vram_bytes == 2 << 30 and plan.decisions.kv.page_tokens == 32


def test_a_plan_file_is_loaded(checkpoint: Path, tmp_path: Path) -> None:
    plan = solved(checkpoint)
    write_plan(plan, tmp_path / "plan.yaml")
    assert penstock.load_plan(tmp_path / "plan.yaml").decisions == plan.decisions
    with pytest.raises(penstock.UserError, match="missing.yaml"):
        penstock.load_plan(str(tmp_path / "missing.yaml"))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"model": "llama9b"}, "model=llama9b: no such model; choose one of .*did you mean llama8b"),
        ({"hardware": "local"}, "hardware=local: this machine has no measured profile .*planner probe"),
        ({"vram": "6 parrots"}, "hardware.vram_bytes=6 parrots: must be"),
        ({"overrides": ["nonsense"]}, "nonsense: expected key=value"),
        ({"overrides": "workload.batch=4"}, "must be a list of texts"),
        ({"overrides": [3]}, "must be a list of texts"),
        ({"model": 3}, "model=3: must be a path"),
        ({"model": ""}, "model='': must be a path"),
        ({"workload.batch": -1}, "workload.batch"),
        ({"dram": "1GiB"}, "no plan fits: DRAM is short by"),
        ({"model": "no/such/directory"}, "no/such/directory"),
    ],
)
def test_a_mistake_is_one_line(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(penstock.UserError, match=said) as refused:
        penstock.solve(**({"model": "llama8b", "hardware": "cpu"} | keys))
    assert "\n" not in str(refused.value)


def test_a_directory_called_as_a_preset_is_a_checkpoint_only_with_a_config(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama8b").mkdir()
    keys: dict[str, Any] = {"hardware": "cpu", "overrides": ["calibration=off", "workload.context_tokens=0"]}
    assert penstock.solve("llama8b", **keys).model.layers == 32
    for file in checkpoint.iterdir():
        (tmp_path / "llama8b" / file.name).symlink_to(file)
    assert penstock.solve("llama8b", **keys).model.checkpoint == str(tmp_path / "llama8b")


def test_a_hydra_application_around_it_stays_as_it_was(checkpoint: Path) -> None:
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    with initialize_config_module("penstock.conf", version_base="1.3"):
        around = GlobalHydra.instance().hydra
        solved(checkpoint)
        assert GlobalHydra.instance().hydra is around


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_opened_model_says_what_transformers_says(tmp_path: Path, dtype: torch.dtype) -> None:
    checkpoint = save_tiny(tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).save_pretrained(checkpoint)
    logits, said = expected(checkpoint, PROMPTS, 8)
    plan = solved(checkpoint, **{"force.cap_layers": 1, "force.hwm_layers": 4})
    assert plan.placement.ssd_layers, "nothing is streamed"
    with penstock.open(plan) as model:
        alone = torch.cat([model.logits([ids]) for ids in PROMPTS])
        together = model.logits(PROMPTS)
        assert [made.tokens for made in model.generate(PROMPTS)] == said
        assert [token.id for token in model.stream(PROMPTS[0])] == said[0]
        assert torch.equal(model.logits(torch.tensor(PROMPTS[:1])), alone[:1])
    assert alone.shape == (3, 300) and alone.dtype == dtype
    if dtype is torch.bfloat16:
        assert torch.equal(alone, logits)
    assert torch.allclose(alone, logits, atol=1e-5, rtol=0)
    assert torch.allclose(together, logits, atol=1e-5 if dtype is torch.float32 else 0.05, rtol=0)


@pytest.mark.parametrize("left", ["break", "close", "another call"])
def test_a_stream_that_was_left_leaves_a_session_that_goes_on(checkpoint: Path, left: str) -> None:
    _, said = expected(checkpoint, PROMPTS, 8)
    with penstock.open(solved(checkpoint)) as model:
        stream = model.stream(PROMPTS[1])
        for number, _ in enumerate(stream):
            if number == 2:
                break
        if left == "close":
            stream.close()
        elif left == "break":
            del stream
        assert [made.tokens for made in model.generate(PROMPTS)] == said
        if left == "another call":
            assert list(stream) == []


@pytest.mark.parametrize("at", [1, 3])
def test_an_interrupt_is_heard_between_two_passes(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """It comes in the middle of one: in a prompt's second piece, or in a step."""
    _, said = expected(checkpoint, PROMPTS, 8)
    passes, over = [], []
    with penstock.open(solved(checkpoint, **{"force.prefill_chunk_tokens": 16})) as model:
        layer = model._session.engine.model.model.layers[2]

        def interrupt(*_: object) -> None:
            passes.append(None)
            if len(passes) == at + 1:
                signal.raise_signal(signal.SIGINT)

        hooks = [layer.register_forward_hook(interrupt), model._session.engine.model.register_forward_hook(lambda *_: over.append(None))]
        with pytest.raises(KeyboardInterrupt):
            list(model.stream(PROMPTS[2]))
        assert len(passes) == len(over) == at + 1, "the pass was not ended"
        for hook in hooks:
            hook.remove()
        assert [made.tokens for made in model.generate(PROMPTS)] == said


def test_a_pass_that_fails_says_so_once_and_closes_the_model_to_more(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with penstock.open(solved(checkpoint)) as model:
        layer = model._session.engine.model.model.layers[2]
        hook = layer.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(model.stream(PROMPTS[0]))
        hook.remove()
        with pytest.raises(penstock.UserError, match="a pass failed .*division by zero.*; open it again"):
            model.logits(PROMPTS)
    with pytest.raises(penstock.UserError, match="it is closed; open it again"):
        model.generate(PROMPTS)


def test_what_cannot_be_asked_is_one_line(checkpoint: Path) -> None:
    plan = solved(checkpoint)
    with penstock.open(plan) as model:
        room = model.capacity_tokens
        for asked, said in [
            (lambda: model.generate(["a text"]), "prompt 0: the checkpoint has no tokenizer"),
            (lambda: model.generate([[5], [300]]), "prompt 1 has the token 300: .* ids, of 0 to 299"),
            (lambda: model.generate([[5], []]), "prompt 1 has no tokens"),
            (lambda: model.generate([[5], "a\udc80"]), "prompt 1 holds half a character"),
            (lambda: model.generate("a text"), "must be a list of texts"),
            (lambda: model.generate([5, 9]), "must be a list of texts"),
            (lambda: model.generate([]), "must be a list of texts"),
            (lambda: model.stream([5] * room), f"prompt 0 has {room} tokens"),
            (lambda: model.stream([5], room), f"max_new_tokens={room}: the plan holds KV for {room} together"),
            (lambda: model.stream([5], temperature=-1), "temperature=-1"),
            (lambda: model.stream([5], stop="x"), "stop="),
            (lambda: model.stream([5], stop=3), "stop=3: must be a list"),  # type: ignore[arg-type]
            (lambda: model.stream(3), "prompt 0 is 3: must be a text or a list"),  # type: ignore[arg-type]
            (lambda: model.generate(3), "prompts=3: must be a list"),  # type: ignore[arg-type]
            (lambda: model.stream([5], 1.5), "max_new_tokens=1.5: must be a whole number"),  # type: ignore[arg-type]
            (lambda: model.stream([5], -3), "max_new_tokens=-3: must be a whole number, 1 or more"),
        ]:
            with pytest.raises(penstock.UserError, match=said):
                asked()
        assert len(model.generate([[5] * (room - 3)])[0].tokens) == 3
    for keys, said in [
        ({"prompt": "hello"}, "prompt=hello: a model is opened by"),
        ({"kv.foo": 1}, "kv.foo"),
        ({"checkpoint": "x"}, "x"),
        ({"checkpoint": ""}, "checkpoint='': "),
    ]:
        with pytest.raises(penstock.UserError, match=said):
            penstock.open(plan, **keys)
    for nothing in (None, 3, ""):
        with pytest.raises(penstock.UserError, match="plan=.*must be a path"):
            penstock.load_plan(nothing)  # type: ignore[arg-type]


def test_a_model_that_cannot_be_opened_leaves_nothing_open(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise penstock.UserError("the card is broken; replace it")

    monkeypatch.setattr("penstock.runtime.engine.engine.bind_fixtures", broken)
    with pytest.raises(penstock.UserError, match="the card is broken"):
        penstock.open(solved(checkpoint))


def test_a_character_of_several_tokens_comes_with_the_last_of_them(tmp_path: Path) -> None:
    save_tiny(tmp_path, layers=2)
    vocabulary = read_vocabulary(with_tokenizer(tmp_path), 300)
    text = "Zoë's 🙂 naïve"
    told = PieceByPiece(vocabulary.text)
    pieces = [told.add(token) for token in vocabulary.tokenizer(text)["input_ids"]]
    assert "".join(pieces) == text and len(pieces) == len(text.encode())
    assert "ë" in pieces and "🙂" in pieces and pieces.count("") == 1 + 3 + 1


def test_the_pages_example_runs_word_for_word(
    tmp_path: Path, clean_environment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_tokenizer(save_tiny(tmp_path / "Llama-3.1-8B"))
    (clean_environment / "hardware").mkdir()
    shutil.copy(ROOT / "conf" / "hardware" / "cpu.yaml", clean_environment / "hardware" / "local.yaml")
    monkeypatch.chdir(tmp_path)
    cells = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(cells) == 4
    names: dict[str, Any] = {}
    for cell in cells:
        exec(compile(cell, "docs/python.md", "exec"), names)
    said = capsys.readouterr().out
    assert re.search(r"tokens/s, bound by \w+", said) and "torch.Size([2, 300])" in said


def test_texts_come_in_pieces_that_make_the_whole(shared_models: Path) -> None:
    plan = penstock.solve(shared_models / "tiny-llama", "cpu", **(WORK | {"workload.prompt_tokens": 16, "workload.new_tokens": 40}))
    with penstock.open(plan) as model:
        (whole,) = model.generate(["def main():"])
        pieces = list(model.stream("def main():"))
        assert "".join(map(str, pieces)) == str(whole) and [token.id for token in pieces] == whole.tokens
        word = next(str(token).strip() for token in pieces[5:] if str(token).strip())
        (short,) = model.generate(["def main():"], stop=[word])
        assert word in short.text and whole.tokens[: len(short.tokens)] == short.tokens
        drawn = [model.generate(["def main():"], temperature=1.0, seed=seed)[0].tokens for seed in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2]


def test_by_a_servers_plan_a_prompt_alone_has_the_tokens_that_the_server_gives_one(checkpoint: Path) -> None:
    asked = {"workload": "serve", "workload.prompt_tokens": 24, "workload.new_tokens": 8, "workload.context_tokens": 256}
    plan = penstock.solve(checkpoint, "cpu", dram="2GiB", **asked, **{"workload.clients": 4, "workload.dram_reserve_bytes": 0})
    assert plan.decisions.batch > 1
    prompt = [(7 * k + 3) % 290 for k in range(150)]
    with penstock.open(plan, checkpoint) as model:
        alone = model.capacity_tokens
        assert alone == 256
        found, (made,) = model.logits([prompt]), model.generate([prompt], 8, greedy=True)
        many = plan.decisions.batch
        together = model.generate([[5, 9, 200]] * many, 4, greedy=True)
        assert len(together) == many
        with pytest.raises(penstock.UserError, match=rf"the plan holds KV for {alone} together"):
            model.generate([prompt], alone, greedy=True)
        with pytest.raises(penstock.UserError, match="prompt 0 has 150 tokens and max_new_tokens=4: the plan holds KV for 128 together"):
            model.generate([prompt] * many, 4, greedy=True)
    logits, said = expected(checkpoint, [prompt], 1)
    assert made.tokens[:1] == said[0] and len(made.tokens) == 8
    assert torch.allclose(found.float(), logits.float(), atol=0.02 * logits.abs().max().item(), rtol=0), "in passes of a prompt's part"
