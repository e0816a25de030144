"""The base model of a session as one that answers questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradiend_dist.evaluation.questions import Answers, Questions
from gradiend_dist.gradients.cloze import Cloze
from gradiend_dist.session import Session


class Asker:
    """Asks the model in the state that it is in. Over a sharded base model all ranks ask together."""

    def __init__(self, session: Session, batch_size: int) -> None:
        self.session = session
        base = session.base_gradients(session.space)
        model: Any = session.base_model
        self.vocabulary = int(model.get_input_embeddings().num_embeddings)
        self._asking: dict[str, Any] = {
            "pad_id": base.pad_id,
            "device": base.device,
            "batch_size": batch_size,
            "vocabulary": self.vocabulary,
        }
        self._logits_at, self._precision = base.logits_at, base.precision
        self._comm = session.comm if base.is_sharded else None

    def questions(self, clozes: Sequence[Cloze]) -> Questions:
        return Questions(clozes, **self._asking)

    def prepare(self, questions: Questions) -> None:
        """Once, while the model is sound."""
        questions.prepare(self._logits_at, self._precision())

    def ask(self, questions: Questions, *, predict: bool = False) -> Answers:
        return questions.ask(self._logits_at, predict=predict, precision=self._precision(), comm=self._comm)
