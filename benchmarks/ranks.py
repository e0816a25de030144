"""What more ranks bring: the same runs on 1 and 2 ranks with one thread each, in the regimes that users meet.

    python benchmarks/ranks.py [--ranks 1 2] [--launch sliced fsdp2]

    pruned     1 % of the weights, three seeds: nearly all work is in the base model, of which every rank does its share
               (a whole item each, since the gradients are kept), and steps are as short as their three small sums
    unpruned   all weights, one seed, two epochs with gradients that are kept: the step itself is cut over the ranks
    streamed   all weights, nothing kept (gradient_store_gib=0): rows of each item are split, evaluation goes in rounds

Times are those of train()'s own clock by what they were spent on, of rank 0: data_preparation is the base model's
gradients, model_with_gradiend the optimizer steps. Run it on an otherwise idle machine with as many cores as ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from vs_reference import BATCH_SIZE, Workload, prepare

ROOT = Path(__file__).resolve().parents[1]
REGIMES: dict[str, dict[str, Any]] = {
    "pruned": {
        "pre_prune_config": {"n_samples": 16, "topk": 0.01, "source": "diff"},
        "max_seeds": 3,
        "min_convergent_seeds": None,
    },
    "unpruned": {"max_seeds": 1, "gradient_store_gib": 12},
    "streamed": {"max_seeds": 1, "gradient_store_gib": 0},
}
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
}


def run(regime: str, ranks: int, launch: str, root: Path) -> dict[str, float]:
    """Seconds by what they were spent on, over all seeds."""
    output = root / f"{regime}_{launch}_{ranks}"
    values = {
        "model": str(root / "base_model"),
        "data": str(root / "rows.csv"),
        "target_classes": ["M", "F"],
        "experiment_dir": str(output),
        "train_batch_size": BATCH_SIZE,
        "max_steps": 40,
        "eval_steps": 20,
        "learning_rate": 1e-4,
        **REGIMES[regime],
    }
    config = root / f"{output.name}.yaml"
    config.write_text(yaml.safe_dump(values))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    if launch == "fsdp2":
        environment.update(FSDP)
    subprocess.run(
        [*command, "-m", "gradiend_dist.train", "--config", str(config)],
        env=environment,
        check=True,
        capture_output=True,
        timeout=1800,
    )
    stats = json.loads((output / "training_stats.json").read_text())
    spent = [seed["time"] for seed in stats["seeds"].values()]
    found = {name: sum(times[name] for times in spent) for name in spent[0]}
    return {**found, "last loss": stats["losses"][-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--launch", nargs="+", choices=("sliced", "fsdp2"), default=["sliced"])
    parser.add_argument("--hidden", type=int, default=256, help="of the base model; 256 are 11 million weights")
    options = parser.parse_args()
    names = ("data_preparation", "model_with_gradiend", "eval", "save", "total")
    print(f"{'regime':10} {'launch':8} ranks  " + "  ".join(f"{name:>20}" for name in names) + "   last loss")
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        prepare(Workload("ranks", options.hidden, 4, (20, 40), True, steps=40, epochs=2, expected=1), root)
        for regime in REGIMES:
            for launch in options.launch:
                for ranks in options.ranks:
                    found = run(regime, ranks, launch if ranks > 1 else "sliced", root)
                    seconds = "  ".join(f"{found[name]:18.2f} s" for name in names)
                    print(f"{regime:10} {launch:8} {ranks:5}  {seconds}   {found['last loss']:.4e}", flush=True)


if __name__ == "__main__":
    main()
