"""What can go wrong in a training: the only place that says what each alert means and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Alert:
    meaning: str
    remedy: str
    """Arguments in backquotes; `{clip}` stands for the measured value of max_grad_norm."""


ALERTS = {
    "loss_flat": Alert(
        "The loss has not moved since step 1.",
        "use `initialization=spectral`, raise `learning_rate`, or lower `adam_epsilon` if the gradients are tiny",
    ),
    "not_finite": Alert(
        "A loss or a gradient is no number; the run stops before a weight is changed by it.",
        "lower `learning_rate`, set `max_grad_norm`, use bfloat16 or float32 in place of float16, or check these rows",
    ),
    "validation_diverging": Alert(
        "The correlation on the evaluation rows has fallen far below its best.",
        "lower `learning_rate`, or stop earlier (`max_steps`); the best checkpoint is kept",
    ),
    "grad_norm_spike": Alert(
        "The gradient norm has jumped to many times its median.",
        "set `max_grad_norm` to about {clip}, or lower `learning_rate`",
    ),
    "learning_rate_zero": Alert(
        "The learning rate is almost zero long before the end.",
        "choose another `lr_scheduler_type`, or check `warmup_steps` and `max_steps`",
    ),
    "low_utilisation": Alert(
        "A GPU waits most of the time.",
        "raise `train_batch_size` or `base_micro_batch_size`, or use fewer GPUs",
    ),
}


def alert_text(kind: str, observed: str, clip: float | None = None) -> str:
    """What was observed and the remedy, for a log: no backquotes."""
    remedy = ALERTS[kind].remedy.replace("`", "")
    return f"{observed}: {remedy if clip is None else remedy.format(clip=f'{clip:.1g}')}"


def alert_table() -> str:
    """All alerts as a table in Markdown."""
    rows = []
    for kind, alert in ALERTS.items():
        remedy = alert.remedy.format(clip="twice the median")
        rows.append(f"| `{kind}` | {alert.meaning} | {remedy[0].upper()}{remedy[1:]}. |")
    return "\n".join(["| alert | what it means | what to do |", "|---|---|---|", *rows])
