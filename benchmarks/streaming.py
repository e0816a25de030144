"""Peak memory above the loaded base model where gradients and vectors are not kept, by what is done.

    python benchmarks/streaming.py [--layers 20] [--hidden 2048] [--ways kept streamed offloaded] [--tasks prune ...]
                                   [--root CHECKOUT] [--threads 1]

    prune        pre-pruning to 1 % by the items of the closed form, and the closed form (max_steps=0)
    closed       the closed form of all weights, into its file
    encode       evaluate_encoder of that model, 16 rows
    rewrite      evaluate_decoder of that model (search with scaling=curvature), and its rewritten base model, saved

    kept         defaults: gradients are kept in what memory is free
    streamed     gradient_store_gib: 0
    offloaded    gradient_store_gib: 0 and offload: true

The base model is a random Llama in bfloat16 (20 layers of width 2048: 1.1e9 weights of the backbone); 16 items of 4
rows of 8 tokens. `peak` is by how much the anonymous memory of the process grows at most beside the loaded base model
(RssAnon, looked at every 20 ms), in GB; pages of mapped files, which the kernel drops when memory is wanted, are in
`with files` (VmHWM). `seconds` are of the task alone. --root measures another checkout, for what is older.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TASKS = ("prune", "closed", "encode", "rewrite")
WAYS: dict[str, dict[str, Any]] = {
    "kept": {},
    "streamed": {"gradient_store_gib": 0.0},
    "offloaded": {"gradient_store_gib": 0.0, "offload": True},
}
NAMES = {"M": "Carl Paul Peter Hugo Otto Emil".split(), "F": "Anna Paula Ida Emma Clara Lisa".split()}
WORDS = {"M": "he", "F": "she"}
ENDS = "house garden river street school market forest harbour".split()
GB = 1e9


def sentences(split: str) -> list[dict[str, str]]:
    return [
        {
            "masked": f"{name} was tired near the {end} because [MASK]",
            "label": WORDS[kind],
            "label_class": kind,
            "split": split,
        }
        for kind, names in NAMES.items()
        for name in (names[:4] if split == "train" else names[4:])
        for end in (ENDS if split == "train" else ENDS[:4])
    ]


def neutral() -> list[str]:
    return [
        f"the {one} near the {other} was old and the {one} was left" for one in ENDS for other in ENDS if one != other
    ]


# --- in a process of its own


def resident(name: str) -> int:
    """Bytes of this process, as the kernel counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


class Watch:
    """The largest anonymous memory while it is open."""

    def __enter__(self) -> Watch:
        self.peak, self._is_open = 0, True
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def _look(self) -> None:
        while self._is_open:
            self.peak = max(self.peak, resident("RssAnon"))
            time.sleep(0.02)

    def __exit__(self, *_: object) -> None:
        self._is_open = False
        self._thread.join()


def save_model(path: Path, layers: int, hidden: int) -> None:
    import torch
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    texts = [
        row["masked"].replace("[MASK]", row["label"]) for row in sentences("train") + sentences("test")
    ] + neutral()
    words = sorted({word for text in texts for word in text.split()})
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(["<unk>", "<s>", *words])}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=hidden // 128, vocab_size=32000, bos_token_id=1, eos_token_id=1, initializer_range=0.05,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config).save_pretrained(path)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>", unk_token="<unk>"
    ).save_pretrained(path)


def work(task: str, way: str, model: Path, results: Path, threads: int) -> dict[str, float]:
    import pandas as pd
    import torch

    from gradiend_dist import PrePruneConfig, TextPredictionTrainer, TrainingArguments

    torch.set_num_threads(threads)
    pruned = {"pre_prune_config": PrePruneConfig(n_samples=16, topk=0.01)} if task == "prune" else {}
    args = TrainingArguments(
        experiment_dir=str(results / ("pruned" if task == "prune" else f"all_{way}")), torch_dtype="bfloat16",
        train_batch_size=4, initialization="spectral", max_steps=0, max_seeds=1, do_eval=False, **pruned, **WAYS[way],
    )  # fmt: skip
    data = pd.DataFrame(sentences("train") + sentences("validation") + sentences("test"))
    trainer = TextPredictionTrainer(
        str(model), data=data, target_classes=["M", "F"], args=args, eval_neutral_data=pd.DataFrame({"text": neutral()})
    )
    base = trainer.session.base_model
    for parameter in base.parameters():
        parameter.sum()  # pages of the files that nobody has looked at yet are not resident
    before, anonymous = resident("VmRSS"), resident("RssAnon")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    start = time.monotonic()
    with Watch() as watch:
        if task in ("prune", "closed"):
            trainer.train()
        elif task == "encode":
            trainer.evaluate_encoder(split="test", max_size=8, use_cache=False)
        else:
            found = trainer.evaluate_decoder(split="test", max_size=8, max_size_neutral=16, use_cache=False)
            trainer.rewrite_base_model(found, "M", output_dir=str(results / f"rewritten_{way}"), force=True)
    seconds = time.monotonic() - start
    size = sum(parameter.numel() * parameter.element_size() for parameter in base.parameters())
    return {
        "base": size,
        "n": trainer.session.space.size,
        "peak": watch.peak - anonymous,
        "with_files": resident("VmHWM") - before,
        "seconds": seconds,
    }


# --- one after the other


def measure(options: argparse.Namespace, task: str, way: str, scratch: Path) -> dict[str, float] | None:
    command = [sys.executable, __file__, "--task_of", task, way, str(scratch), "--threads", str(options.threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(options.root)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=options.root)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["streamed", "offloaded"])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--task_of", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task_of:
        task, way, scratch = options.task_of
        print(json.dumps(work(task, way, Path(scratch) / "model", Path(scratch), options.threads)))
        return
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        saving = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); import streaming, pathlib; "
        saving += f"streaming.save_model(pathlib.Path({str(scratch / 'model')!r}), {options.layers}, {options.hidden})"
        subprocess.run([sys.executable, "-c", saving], check=True)
        print(
            "| task | way | n | base | peak | of the base | with files | seconds |\n|---|---|---|---|---|---|---|---|"
        )
        for way in options.ways:
            for task in options.tasks:
                found = measure(options, task, way, scratch)
                if found is None:
                    print(f"| {task} | {way} | | | did not end | | | |", flush=True)
                    continue
                sizes = " | ".join(f"{found[name] / GB:.2f}" for name in ("n", "base", "peak"))
                share = f"{100 * found['peak'] / found['base']:.0f} %"
                print(
                    f"| {task} | {way} | {sizes} | {share} | {found['with_files'] / GB:.2f} | {found['seconds']:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
