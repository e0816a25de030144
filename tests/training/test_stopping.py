"""Whatever takes long looks whether the process was told to stop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradiend_dist import PrePruneConfig, TextPredictionTrainer, TrainingArguments
from gradiend_dist.distributed.interrupt import Interrupt, Preempted
from gradiend_dist.gradients.cloze import LogitsAt
from gradiend_dist.training.spectral import SpectralStart


def closed_form(trainer: TextPredictionTrainer) -> Any:
    session = trainer.session
    items, labels = trainer.inputs.spectral_items(0)
    return SpectralStart(session.args, session.gradients(session.space), items, labels).solve()


PHASES: dict[str, Callable[[TextPredictionTrainer], Any]] = {
    "tokenizing": lambda trainer: trainer.inputs.training_items().item([0, 1]),
    "pruning": lambda trainer: trainer.inputs.pre_pruned(PrePruneConfig(n_samples=4), 0),
    "closed form": closed_form,
    "encoder evaluation": lambda trainer: trainer.evaluate_encoder(max_size=2, use_cache=False),
    "search": lambda trainer: trainer.evaluate_decoder(max_size=4, use_cache=False),
    "grid": lambda trainer: trainer.evaluate_decoder(lrs=[0.1], max_size=4, use_cache=False),
}


@pytest.mark.parametrize("phase", PHASES)
def test_phase__ends_where_it_was_told_to(
    masked_lm: Path, feature_frames: Any, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """Fails if a phase goes on to its end: a scheduler kills what does not stop in time."""
    args = TrainingArguments(max_seeds=1, max_steps=0, train_batch_size=4, spectral_items=4)
    trainer = TextPredictionTrainer(str(masked_lm), data=feature_frames, target_classes=["M", "F"], args=args)
    _ = trainer.session  # loaded before anybody asks
    told = Interrupt()
    monkeypatch.setattr(Interrupt, "current", told)
    if phase == "tokenizing":
        told.signum = 15
    prepare = LogitsAt.prepare

    def tell(self: LogitsAt, batch: Any) -> None:
        """In the first pass of the base model: the second is one too many."""
        assert not told.signum, "the base model was asked again"
        told.signum = 15
        prepare(self, batch)

    monkeypatch.setattr(LogitsAt, "prepare", tell)
    with pytest.raises(Preempted):
        PHASES[phase](trainer)
