"""What the command prints: the plan of a run, and at its end the table of seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gradiend_dist.commands.plan import Forecast, check_memory, gib
from gradiend_dist.commands.tables import table
from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.distributed.devices import free_bytes, sharing
from gradiend_dist.engines.spread import Spread
from gradiend_dist.forecast import left_for_store, need_of, need_with_seeds
from gradiend_dist.memory import Need, Run
from gradiend_dist.report.records import Seed
from gradiend_dist.storage.layout import SEED_REPORT
from gradiend_dist.trainer.text_prediction import TextPredictionTrainer
from gradiend_dist.training.history import StepPlan
from gradiend_dist.training.seeds import judge


def need_and_room(args: TrainingArguments, needs: Forecast) -> tuple[Spread, Need, float]:
    """What a process of this launch needs on its base model's device, and what is free there. All ranks call this."""
    spread = Spread.of(args)
    device = spread.placement.base_model
    free = free_bytes(device) / sharing(device, spread.comm.local_world_size)

    def need(run: Run) -> Need:
        return need_of(run, spread.launch, spread.placement, args.base_micro_batch_size, free)

    beside_base = free - need(needs.run).base
    return spread, need_with_seeds(need, needs.run, args, beside_base), free


def require_room(args: TrainingArguments, needs: Forecast) -> None:
    """Before a weight is loaded: is there room for what has to be there at once? All ranks call this."""
    spread, need, free = need_and_room(args, needs)
    check_memory(needs, need, args, free, str(spread.placement.base_model))


def plan(trainer: TextPredictionTrainer, needs: Forecast) -> str:
    """What `--dry_run` shows. All ranks call this."""
    args, data = trainer.args, trainer.data
    schedule = trainer.training_rows.schedule
    steps = StepPlan.of(args, schedule)
    spread, need, free = need_and_room(args, needs)
    device = spread.placement.base_model
    where = str(spread.placement) if trainer.comm.is_alone else f"{spread.launch}, rank 0 on {spread.placement.encoder}"

    lines = [
        ("model", trainer.base_model_name),
        ("target classes", f"{data.target_classes[0]} (+1), {data.target_classes[1]} (-1)"),
        *((f"rows of {split}", counts(data.rows(split)["transition"])) for split in data.splits()),
        ("gradient items per epoch", f"{len(schedule)} of up to {args.train_batch_size} rows"),
        ("optimizer steps per seed", f"{steps.total_steps} in {steps.num_epochs} epochs"),
        ("seeds", f"up to {args.max_seeds}, from {args.first_seed}"),
        *needs.lines(need),
        ("memory: gradients that are kept, at most", gib(_for_store(args, free, need.peak, device))),
        ("memory needed, with the longest rows / free", f"{gib(need.peak)} / {gib(free)}"),
        ("placement", where),
        ("results", str(trainer.experiment_dir or args.output_dir or "a temporary directory")),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(["The plan (nothing was trained):", *(f"  {name:<{width}}  {value}" for name, value in lines)])


def _for_store(args: TrainingArguments, free: float, coming: int, device: torch.device) -> int:
    """Before the base model is there; a run looks again when it is."""
    if args.gradient_store_gib is not None:
        return int(args.gradient_store_gib * 2**30)
    return left_for_store(free, coming, device)


def counts(transitions: Any) -> str:
    found = transitions.value_counts(sort=False)
    return ", ".join(f"{name}: {count}" for name, count in found.items())


def results(trainer: TextPredictionTrainer, plot: Path | None) -> str:
    """The table of seeds, the selected one marked, and where everything is."""
    record = trainer.get_training_stats()
    selected, report = record["seed"], trainer.seed_runs_dir / SEED_REPORT
    has_report = trainer.args.max_seeds > 1 and report.exists()
    if has_report:
        entries = trainer.get_seed_report()["runs"]
        paths = {entry["seed"]: trainer.places.seed(entry["seed"], trainer.args) for entry in entries}
        seeds = [Seed.of_record(number, trainer.get_training_stats(path)) for number, path in paths.items()]
        rows = [_row(entry["converged"], seed, selected) for entry, seed in zip(entries, seeds, strict=True)]
    else:
        verdict = judge(record, trainer.args, among_seeds=False)
        rows = [_row(verdict.converged, Seed.of_record(selected, record), selected)]
    out = [table(_header(Seed.of_record(selected, record)), rows), "", f"  model        {trainer.model_path}"]
    if has_report:
        out.append(f"  seed report  {report}")
    if plot is not None:
        out.append(f"  plot         {plot}")
    return "\n".join(out)


def one_seed(trainer: TextPredictionTrainer) -> str:
    """What a task of a job array has to show: its seed."""
    number = trainer.args.only_seed
    assert number is not None
    path = trainer.places.seed(number, trainer.args)
    record = trainer.get_training_stats(path)
    seed = Seed.of_record(number, record)
    rows = [_row(judge(record, trainer.args, among_seeds=True).converged, seed, None)]
    where = f"  model of seed {number}  {path}\n  --select_only true promotes the best seed"
    return f"{table(_header(seed), rows)}\n\n{where}"


def _header(seed: Seed) -> tuple[str, ...]:
    classes = " / ".join(seed.means)
    return ("seed", "converged", "best step", "correlation", "explains", f"mean encoding {classes}", "last loss", "")


def _row(converged: bool, seed: Seed, selected: int | None) -> tuple[str, ...]:
    return (
        str(seed.number),
        "yes" if converged else "no",
        "-" if seed.best_step is None else str(seed.best_step),
        "-" if seed.correlation is None else f"{seed.correlation:.4f}",
        seed.explained_words().replace("−", "-") or "-",
        " / ".join(f"{mean:+.3f}" for mean in seed.means_at_best().values()) or "-",
        "-" if seed.last_loss is None else f"{seed.last_loss:.3e}",
        "<- selected" if seed.number == selected else "",
    )
