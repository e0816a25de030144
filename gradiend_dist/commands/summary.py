"""What the command prints: the plan of a run, and at its end the table of seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradiend_dist.commands.plan import Forecast
from gradiend_dist.commands.tables import percent, table
from gradiend_dist.engines.spread import Spread
from gradiend_dist.storage.files import read_json
from gradiend_dist.storage.layout import SEED_REPORT
from gradiend_dist.trainer import TextPredictionTrainer
from gradiend_dist.training.history import StepPlan
from gradiend_dist.training.seeds import explained_at_best, judge


def plan(trainer: TextPredictionTrainer, needs: Forecast) -> str:
    """What `--dry_run` shows."""
    from gradiend_dist.distributed.devices import free_bytes

    args, data = trainer.args, trainer.data
    schedule = trainer.training_rows.schedule
    steps = StepPlan.of(args, schedule)
    from gradiend_dist.commands.plan import gib

    spread = Spread.of(args)
    where = str(spread.placement) if trainer.comm.is_alone else f"{spread.launch}, rank 0 on {spread.placement.encoder}"

    lines = [
        ("model", trainer.base_model_name),
        ("target classes", f"{data.target_classes[0]} (+1), {data.target_classes[1]} (-1)"),
        *((f"rows of {split}", counts(data.rows(split)["transition"])) for split in data.splits()),
        ("gradient items per epoch", f"{len(schedule)} of up to {args.train_batch_size} rows"),
        ("optimizer steps per seed", f"{steps.total_steps} in {steps.num_epochs} epochs"),
        ("seeds", f"up to {args.max_seeds}, from {args.first_seed}"),
        *needs.lines(),
        ("memory needed / free", f"{gib(needs.memory)} / {gib(free_bytes(spread.placement.encoder))}"),
        ("placement", where),
        ("results", str(trainer.experiment_dir or args.output_dir or "a temporary directory")),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(["The plan (nothing was trained):", *(f"  {name:<{width}}  {value}" for name, value in lines)])


def counts(transitions: Any) -> str:
    found = transitions.value_counts(sort=False)
    return ", ".join(f"{name}: {count}" for name, count in found.items())


def results(trainer: TextPredictionTrainer, plot: Path | None) -> str:
    """The table of seeds, the selected one marked, and where everything is."""
    record = trainer.get_training_stats()
    report = trainer.seed_runs_dir / SEED_REPORT
    runs = read_json(report)["runs"] if trainer.args.max_seeds > 1 and report.exists() else None
    selected = record["seed"]
    seed_dirs = [trainer.places.seed(entry["seed"], trainer.args) for entry in runs or ()]
    records = [read_json(path / "training.json") for path in seed_dirs]
    rows = [_row(entry["converged"], found, selected) for entry, found in zip(runs or (), records, strict=True)]
    if runs is None:
        rows = [_row(judge(record, trainer.args, among_seeds=False).converged, record, selected)]
    out = [table(_header(record), rows), ""]
    out.append(f"  model        {trainer.model_path}")
    if runs is not None:
        out.append(f"  seed report  {report}")
    if plot is not None:
        out.append(f"  plot         {plot}")
    return "\n".join(out)


def one_seed(trainer: TextPredictionTrainer) -> str:
    """What a task of a job array has to show: its seed."""
    seed = trainer.args.only_seed
    assert seed is not None
    path = trainer.places.seed(seed, trainer.args)
    record = read_json(path / "training.json")
    rows = [_row(judge(record, trainer.args, among_seeds=True).converged, record, None)]
    where = f"  model of seed {seed}  {path}\n  --select_only true promotes the best seed"
    return f"{table(_header(record), rows)}\n\n{where}"


def _header(record: dict[str, Any]) -> tuple[str, ...]:
    names = record["training_stats"].get("label_value_to_class_name", {})
    classes = " / ".join(str(names.get(label, label)) for label in sorted(names, key=float, reverse=True))
    return ("seed", "converged", "best step", "correlation", "explains", f"mean encoding {classes}", "last loss", "")


def _row(converged: bool, record: dict[str, Any], selected: int | None) -> tuple[str, ...]:
    best = record["best_score_checkpoint"]
    means = record["training_stats"].get("mean_by_class", {}).get(str(best["global_step"]), {})
    ordered = sorted(means.items(), key=lambda pair: float(pair[0]), reverse=True)
    correlation = best["correlation"]
    return (
        str(record["seed"]),
        "yes" if converged else "no",
        "-" if best["global_step"] is None else str(best["global_step"]),
        "-" if correlation is None else f"{correlation:.4f}",
        _explains(record),
        " / ".join(f"{mean:+.3f}" for _, mean in ordered) or "-",
        f"{record['losses'][-1]:.3e}" if record["losses"] else "-",
        "<- selected" if record["seed"] == selected else "",
    )


def _explains(record: dict[str, Any]) -> str:
    """What the decoder explains of the target, of what one latent can: 78 % of 81 %."""
    found = explained_at_best(record)
    share, limit = found["explained"], found["explained_limit"]
    if share is None:
        return "-"
    return percent(share) if limit is None else f"{percent(share)} of {percent(limit)}"
