"""What can go wrong in a training that somebody should be told of, and what to do about it."""

from __future__ import annotations

ALERTS = {
    "loss_flat": (
        "The loss has not moved since step 1.",
        "Raise `learning_rate`, or lower `adam_epsilon` where gradients are tiny.",
    ),
    "not_finite": (
        "A loss or a gradient is no number; the run stops before a weight is changed by it.",
        "Lower `learning_rate`, set `max_grad_norm`, or take bfloat16 or float32 in place of float16.",
    ),
    "validation_diverging": (
        "The correlation on the evaluation rows has fallen far below its best.",
        "Lower `learning_rate`, or stop earlier (`max_steps`); the best checkpoint is kept.",
    ),
    "grad_norm_spike": (
        "The gradient norm has jumped to many times its median.",
        "Set `max_grad_norm`, or lower `learning_rate`.",
    ),
    "learning_rate_zero": (
        "The learning rate is almost zero long before the end.",
        "Choose another `lr_scheduler_type`, or check `warmup_steps` and `max_steps`.",
    ),
    "low_utilisation": (
        "A GPU waits most of the time.",
        "Raise `train_batch_size` or `base_micro_batch_size`, or use fewer GPUs.",
    ),
}
