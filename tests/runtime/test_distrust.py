"""What a checkpoint may not do: run its code, ask on the terminal, choose kernels, or end a program with a traceback."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.runtime.asked import prompts
from penstock.runtime.asked.prompts import read_vocabulary
from penstock.runtime.engine.validate import load_unstreamed
from penstock.runtime.model.skeleton import build_skeleton, import_model
from tests.support import save_tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny", layers=1)


@pytest.fixture
def own(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "own"))


def change(directory: Path, **keys: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def line_of(refused: pytest.ExceptionInfo[UserError]) -> str:
    line = str(refused.value)
    assert "\n" not in line
    return line


def test_code_in_a_checkpoint_is_neither_run_nor_asked_about(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own / "evil.py").write_text(
        "from pathlib import Path\nfrom transformers import LlamaConfig\nPath(__file__).with_name('ran').touch()\n"
        "class EvilConfig(LlamaConfig):\n    model_type = 'evil'\n"
    )
    change(own, model_type="evil", auto_map={"AutoConfig": "evil.EvilConfig"})
    (own / "tokenizer.json").write_text("{}")
    (own / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.EvilConfig", null]}}')
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    for read in (import_model, build_skeleton, lambda directory: read_vocabulary(directory, 300)):
        with pytest.raises(UserError) as refused:
            read(own)
        assert "code" in line_of(refused)
    assert sys.stdin.read() == "y\n" * 9 and not list(tmp_ran(own))


def tmp_ran(directory: Path) -> list[Path]:
    return [*directory.rglob("ran")]


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
@pytest.mark.parametrize("name", ["flash_attention_2", "evil/kernel", "evil/kernel:run"])
def test_a_config_does_not_choose_how_attention_is_computed(own: Path, key: str, name: str) -> None:
    change(own, **{key: name})
    import_model(own)
    assert build_skeleton(own).config._attn_implementation in ("sdpa", "eager")
    assert load_unstreamed(own, __import__("torch").device("cpu")).config._attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("head_dim", 0, "head_dim is 0"),
        ("hidden_size", 0, "hidden_size is 0"),
        ("num_attention_heads", 0, "num_attention_heads is 0"),
        ("pad_token_id", 10**9, "pad_token_id is 1000000000, and the vocabulary has ids 0 to 299"),
    ],
)
def test_sizes_by_which_no_model_can_be_built_are_refused_by_solve(own: Path, key: str, value: int, said: str) -> None:
    change(own, **{key: value})
    with pytest.raises(UserError, match=said):
        spec_from_checkpoint(own)


@pytest.mark.parametrize("keys", [{"hidden_act": "evil/kernel"}, {"rope_parameters": {"rope_type": "evil"}}, {"rms_norm_eps": "small"}])
def test_whatever_transformers_raises_of_a_config_is_one_line(own: Path, keys: dict[str, Any]) -> None:
    change(own, **keys)
    with pytest.raises(UserError, match="transformers cannot build this model") as refused:
        build_skeleton(own)
    assert str(own) in line_of(refused)


@pytest.mark.parametrize("window", [-1, "all", 2.5])
def test_a_window_that_is_no_number_of_tokens_is_one_line(own: Path, window: Any) -> None:
    change(own, sliding_window=window)
    with pytest.raises(UserError, match="sliding_window is .*, allowed is a whole number of 0 or more, or null") as refused:
        build_skeleton(own)
    assert str(own / "config.json") in line_of(refused)


@pytest.mark.parametrize("tokenizer", [True, False])
def test_a_config_that_transformers_refuses_is_not_blamed_on_the_tokenizer(own: Path, tokenizer: bool) -> None:
    if tokenizer:
        (own / "tokenizer.json").write_text("{}")
    (own / prompts.GENERATION).unlink(missing_ok=True)
    change(own, hidden_act=None)
    with pytest.raises(UserError, match="transformers cannot read it .*hidden_act.*restore the model's own config.json$") as refused:
        read_vocabulary(own, 300)
    assert line_of(refused).startswith(str(own / "config.json"))


def test_stop_tokens_that_are_none_are_one_line(own: Path) -> None:
    (own / prompts.GENERATION).write_text('{"eos_token_id": [[1]]}')
    with pytest.raises(UserError, match=f"{prompts.GENERATION} cannot be read"):
        read_vocabulary(own, 300)


def test_a_sentencepiece_tokenizer_reads_text_and_a_missing_package_is_named(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["the cat sat on the mat", "a dog sat on the log", "the log and the cat"] * 9)
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=trained, vocab_size=40, model_type="bpe", minloglevel=2)
    (own / "tokenizer.model").write_bytes(trained.getvalue())
    tokenizer = read_vocabulary(own, 300).tokenizer
    assert tokenizer is not None and tokenizer.decode(tokenizer("the cat").input_ids, skip_special_tokens=True).strip() == "the cat"
    (own / "tokenizer.model").write_bytes(b"\x00 no model")
    with pytest.raises(UserError, match="the tokenizer cannot be read .*; download its files again"):
        read_vocabulary(own, 300)
    monkeypatch.setattr(prompts, "distributions", lambda name: [] if name == "sentencepiece" else [name])
    with pytest.raises(UserError, match="pip install sentencepiece$"):
        read_vocabulary(own, 300)
