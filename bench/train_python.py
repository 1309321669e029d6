"""Train a model of about 0.5B on the Python source of this machine, and a small one that drafts for it, with one tokenizer.

    python bench/train_python.py out=/dev/shm/penstock/python                 # a card with 80 GB: at most 8 minutes
    python bench/train_python.py out=tiny size=tiny steps=20 corpus_mb=4      # tries the script on a CPU

The corpus: the files `*.py` of the standard library and of the installed packages, or of `packages` alone, in an order that `seed`
draws. One of ten is held out, its text in `out/held.jsonl`. Writes `out/target` and `out/draft`, checkpoints in BF16, and
`out/train.json` with losses, seconds and the tokens of a sequence. Training ends with `steps`, or when `minutes` are over. Needs
transformers and tokenizers.
"""

from __future__ import annotations

import json
import math
import random
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.keys import given_of  # noqa: E402
from penstock.planner.common.errors import UserError  # noqa: E402

VOCAB, CONTEXT = 16384, 1024
END = "<|end|>"
HELD = 10
"""Of so many files one is held out."""
GEOMETRY = {
    "usual": {"target": (1536, 4096, 20, 24, 8), "draft": (512, 1408, 4, 8, 4)},
    "tiny": {"target": (256, 512, 3, 4, 2), "draft": (128, 256, 1, 2, 1)},
}
"""Size -> model -> hidden, FFN, layers, heads, KV heads."""
RATE = {"target": 6e-4, "draft": 2e-3}
SHARE = {"target": 0.78, "draft": 1.0}
"""Of the time: when each ends, at the latest."""
KEYS = ("out", "seed", "steps", "minutes", "corpus_mb", "size", "batch", "micro", "packages")


@dataclass(frozen=True)
class Asked:
    """The command's keys."""

    out: Path
    seed: int = 0
    steps: int = 2600
    minutes: float = 7.5
    corpus_mb: int = 160
    packages: str = "transformers,torch"
    """Whose files, by commas; all that there are where it is empty. Few packages are read more than once in the time: what is then learnt
    of them goes on for longer without repeating itself."""
    size: str = "usual"
    batch: int = 16
    """Sequences of a step."""
    micro: int = 16
    """Sequences that are computed together."""

    @classmethod
    def of(cls, arguments: list[str]) -> Asked:
        given = given_of(arguments, KEYS)
        if "out" not in given or given.get("size", "usual") not in GEOMETRY:
            raise UserError("train_python.py: out=DIR is needed; size is one of " + ", ".join(GEOMETRY))
        numbers = {
            key: float(given[key]) if key == "minutes" else int(given[key]) for key in given if key not in ("out", "size", "packages")
        }
        words = {"size": given.get("size", "usual"), "packages": given.get("packages", cls.packages)}
        return cls(Path(given["out"]).expanduser(), **words, **numbers)  # type: ignore[arg-type]


def corpus(seed: int, megabytes: int, packages: str = "") -> list[str]:
    """Texts of the machine's Python files, each once."""
    places = {Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib", "platlib")}
    named = [place / one for place in places for one in packages.split(",")]
    files = sorted({file for place in named for file in place.rglob("*.py") if file.is_file()})
    random.Random(seed).shuffle(files)
    texts: dict[str, None] = {}
    left = megabytes * 1_000_000
    for file in files:
        text = file.read_text(encoding="utf-8", errors="ignore")
        if 400 < len(text) < 200_000 and text not in texts:
            texts[text] = None
            left -= len(text)
        if left < 0:
            break
    return list(texts)


def tokenizer_of(texts: list[str], vocab: int) -> Tokenizer:
    """Bytes in pairs, as GPT-2 has them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab, special_tokens=[END], initial_alphabet=alphabet))
    return tokenizer


def config_of(size: str, name: str, vocab: int) -> LlamaConfig:
    hidden, ffn, layers, heads, kv_heads = GEOMETRY[size][name]
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )


def batches(tokens: torch.Tensor, asked: Asked) -> Iterator[torch.Tensor]:
    """[batch, CONTEXT + 1] from places that the seed draws."""
    draw = torch.Generator().manual_seed(asked.seed)
    while True:
        starts = torch.randint(0, len(tokens) - CONTEXT - 1, (asked.batch,), generator=draw)
        yield torch.stack([tokens[at : at + CONTEXT + 1] for at in starts.tolist()])


def rate_at(done: float) -> float:
    """Of the highest rate, when the share ``done`` of the training is over: up in a twentieth of it, then down to a hundredth."""
    return min(1.0, 0.04 + done / 0.05) * (0.505 + 0.495 * math.cos(math.pi * done))


def train(
    name: str, tokens: torch.Tensor, asked: Asked, vocab: int, end_s: float, device: str
) -> tuple[LlamaForCausalLM, dict[str, float]]:
    """AdamW, a warm-up, a cosine over the steps or the time, whichever ends first: the last steps are small ones on any card. Takes 16
    bytes a weight, and a micro-batch's activations."""
    torch.manual_seed(asked.seed)
    model = LlamaForCausalLM(config_of(asked.size, name, vocab)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE[name], betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda")
    begun, loss_of, step = time.perf_counter(), 0.0, 0
    for step, batch in zip(range(1, asked.steps + 1), batches(tokens, asked), strict=False):
        done = max((step - 1) / asked.steps, (time.perf_counter() - begun) / max(1.0, end_s - begun))
        for group in optimizer.param_groups:
            group["lr"] = RATE[name] * rate_at(min(1.0, done))
        loss_of = 0.0
        for part in batch.to(device).split(asked.micro):
            with torch.autocast(device, dtype=torch.bfloat16):
                logits = model(input_ids=part[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten()) * len(part) / asked.batch
            loss.backward()
            loss_of += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0 or step == 1:
            print(f"{name}: step {step}, loss {float(loss_of):.3f}, {time.perf_counter() - begun:.0f} s", flush=True)
        if time.perf_counter() > end_s:
            break
    seconds = time.perf_counter() - begun
    return model, {"steps": step, "loss": float(loss_of), "seconds": seconds, "weights": sum(p.numel() for p in model.parameters())}


def main(asked: Asked) -> None:
    begun, device = time.perf_counter(), "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    texts = corpus(asked.seed, asked.corpus_mb, asked.packages)
    held, seen = texts[::HELD], [text for k, text in enumerate(texts) if k % HELD]
    tokenizer = tokenizer_of(seen[: max(1, len(seen) // 6)], VOCAB)
    encoded = tokenizer.encode_batch_fast(seen) if hasattr(tokenizer, "encode_batch_fast") else tokenizer.encode_batch(seen)
    tokens = torch.cat([torch.tensor([0, *one.ids], dtype=torch.int32) for one in encoded]).long()
    vocab, facts = tokenizer.get_vocab_size(), {"tokens": len(tokens), "files": len(seen), "context": CONTEXT}
    facts["prepare_s"] = time.perf_counter() - begun
    print(json.dumps(facts), flush=True)
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "held.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in held))
    for name in ("target", "draft"):
        model, facts[name] = train(name, tokens, asked, vocab, begun + 60 * asked.minutes * SHARE[name], device)  # type: ignore[assignment]
        model.to(torch.bfloat16).save_pretrained(asked.out / name)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(asked.out / name)
        del model
        torch.cuda.empty_cache()
    facts["seconds"] = time.perf_counter() - begun
    (asked.out / "train.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts))


if __name__ == "__main__":
    try:
        main(Asked.of(sys.argv[1:]))
    except UserError as error:
        raise SystemExit(str(error)) from None
