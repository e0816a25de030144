"""Peak host memory of loading a base model on several CPU ranks, against what each rank then holds.

    python benchmarks/loading.py [--ranks 2 3 4] [--ways shards whole replicated] [--layers 20]

    shards       fsdp2.yaml: each rank reads its own rows of each weight
    whole        fsdp2.yaml with fsdp_cpu_ram_efficient_loading: false: each rank reads all files, and keeps its shards
    replicated   multi_gpu.yaml: the base model whole on every rank

The base model is a random Llama of 323M weights in bfloat16 (20 layers), in several files. `peak` is by how much the
anonymous memory of a rank grows in loading at most (RssAnon, looked at every millisecond), `ratio` the same less the
largest weight, to what a rank then holds; `with files` adds the pages of the mapped files (VmHWM), which ranks of a
host share and which the kernel drops when memory is wanted. Of all ranks the largest.
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

from ranks import FSDP

ROOT = Path(__file__).resolve().parents[1]
WAYS: dict[str, dict[str, str]] = {
    "shards": FSDP,
    "whole": {**FSDP, "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"},
    "replicated": {},
}
MIB = 2**20


# --- on each rank


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
            time.sleep(0.001)

    def __exit__(self, *_: object) -> None:
        self._is_open = False
        self._thread.join()


def work(models: Path, results: Path) -> None:
    import torch
    from torch.distributed.tensor import DTensor

    from gradiend_dist import TrainingArguments
    from gradiend_dist.engines.spread import Spread

    torch.set_num_threads(1)
    spread = Spread.of(TrainingArguments(torch_dtype="bfloat16", ddp_timeout=600))
    load(spread, models / "small")  # code that is loaded with the first model
    before, anonymous = resident("VmRSS"), resident("RssAnon")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    start = time.monotonic()
    with Watch() as watch:
        base = load(spread, models / "large")
    seconds = time.monotonic() - start
    shards = [p.to_local() if isinstance(p, DTensor) else p for p in base.requires_grad_(False).parameters()]
    # Pages that nobody has looked at yet are not resident: a rank that trains looks at all of them.
    touched = sum(float(local.sum(dtype=torch.float32)) for local in shards)
    found = {
        "held": sum(local.numel() * local.element_size() for local in shards),
        "largest": max(p.numel() * p.element_size() for p in base.parameters()),
        "grown": resident("VmHWM") - before,
        "peak": max(watch.peak, resident("RssAnon")) - anonymous,
        "seconds": seconds,
        "sum": touched,
    }
    (results / f"rank_{spread.comm.rank}.json").write_text(json.dumps(found))
    spread.comm.leave()
    os._exit(0)


def load(spread: Any, model: Path) -> Any:
    """As a session does it."""
    from gradiend_dist.model.base import load_base_model
    from gradiend_dist.space import ParameterSpace

    device, cut = spread.placement.base_model, spread.cut_of(None)
    base, _ = load_base_model(str(model), torch_dtype="bfloat16", device=device, cut=cut)
    return spread.place_base_model(base, ParameterSpace.of_model(base))[1]


# --- the launches


def save_models(models: Path, layers: int) -> None:
    save_model(models / "small", 1, hidden_size=16, intermediate_size=16)
    save_model(models / "large", layers, hidden_size=1024, intermediate_size=2816)


def save_model(path: Path, layers: int, **sizes: int) -> None:
    import torch
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(**sizes, num_hidden_layers=layers, num_attention_heads=16, vocab_size=32000)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config).save_pretrained(path, max_shard_size="300MB")
    words = {f"w{number}": number for number in range(100)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", unk_token="w0").save_pretrained(path)


def measure(models: Path, way: str, ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as results:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command += [__file__, "--rank_of", str(models), results]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
            "TQDM_DISABLE": "1",
            "PYTHONPATH": str(ROOT),
        }
        subprocess.run(command, env={**environment, **WAYS[way]}, check=True, cwd=ROOT)
        found = [json.loads(path.read_text()) for path in Path(results).glob("rank_*.json")]
    return {name: max(rank[name] for rank in found) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--rank_of", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        work(*map(Path, options.rank_of))
        return
    with tempfile.TemporaryDirectory() as scratch:
        models = Path(scratch)
        saving = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); import loading, pathlib; "
        saving += f"loading.save_models(pathlib.Path({scratch!r}), {options.layers})"
        subprocess.run([sys.executable, "-c", saving], check=True)  # its memory is not that of a rank
        print("| loading | ranks | a rank holds | peak | with files | ratio | seconds |\n|---|---|---|---|---|---|---|")
        for way in options.ways:
            for ranks in options.ranks:
                found = measure(models, way, ranks)
                ratio = (found["peak"] - found["largest"]) / found["held"]
                sizes = " | ".join(f"{found[name] / MIB:.0f} MiB" for name in ("held", "peak", "grown"))
                print(f"| {way} | {ranks} | {sizes} | {ratio:.2f} | {found['seconds']:.1f} |", flush=True)


if __name__ == "__main__":
    main()
