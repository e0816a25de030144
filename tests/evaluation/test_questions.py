"""Questions in batches = each question alone, from a plain forward pass; whatever the lengths, batches and ranks."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch

from gradiend_dist.evaluation import questions as module
from gradiend_dist.evaluation.questions import Questions
from gradiend_dist.gradients.cloze import CausalObjective, Cloze, LogitsAt, MaskedObjective

TEMPLATES = [
    "the man said that [MASK] was tired .",
    "today [MASK] left home early and the old doctor said that it was ( old ) .",
    "[MASK] was old",
    "the woman said [MASK] .",
]
WORDS = ["he", "she", "themselves", "herself"]


def naive(model, cloze: Cloze) -> tuple[list[float], list[int]]:
    """One row, unpadded, all logits."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([cloze.input_ids])).logits[0].double()
    logs = logits.log_softmax(-1)
    places = list(zip(cloze.positions, cloze.labels, strict=True))
    return [logs[p, label].item() for p, label in places], [int(logits[p].argmax()) for p, _ in places]


def asked(family: str) -> tuple[torch.nn.Module, list[Cloze], int]:
    if family == "bert":
        tokenizer = tiny.wordpiece_tokenizer()
        objective = MaskedObjective(tokenizer, 40, "[MASK]")
        templates = TEMPLATES
    else:
        tokenizer = tiny.byte_level_tokenizer() if family == "gpt2" else tiny.metaspace_tokenizer()
        objective = CausalObjective(tokenizer, 40, "[MASK]", as_reference=False)
        templates = [template for template in TEMPLATES if not template.startswith("[MASK]")]
    words = WORDS if family != "llama" else ["he", "she", "they", "said man"]
    clozes = [objective.whole_word(template, word) for template in templates for word in words]
    return tiny.base_model(family, len(tokenizer)), clozes, len(tokenizer)


def options(vocabulary: int, batch_size: int) -> dict[str, object]:
    return {"pad_id": 0, "device": torch.device("cpu"), "batch_size": batch_size, "vocabulary": vocabulary}


@pytest.mark.parametrize("batch_size", [1, 3, 100])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_ask__equals_one_row_at_a_time(family, batch_size):
    """A wrong place, padding that is read, or an answer given to another question fails."""
    model, clozes, vocabulary = asked(family)
    assert any(len(cloze.labels) > 1 for cloze in clozes), "words of several tokens"
    found = Questions(clozes, **options(vocabulary, batch_size)).ask(LogitsAt(model), predict=True)
    expected = [naive(model, cloze) for cloze in clozes]
    np.testing.assert_allclose(found.log_probability, [v for values, _ in expected for v in values], rtol=2e-5)
    assert found.predicted.tolist() == [token for _, tokens in expected for token in tokens]


def test_sums__are_those_of_each_question():
    model, clozes, vocabulary = asked("bert")
    questions = Questions(clozes, **options(vocabulary, 4))
    sums = questions.sums(questions.ask(LogitsAt(model)).log_probability)
    np.testing.assert_allclose(sums, [sum(naive(model, cloze)[0]) for cloze in clozes], rtol=2e-5)
    broken = questions.ask(LogitsAt(model)).log_probability
    broken[0] = np.nan  # of the first question alone
    assert np.isfinite(questions.sums(broken)[1:]).all() and len(sums) == len(clozes)


def test_ask__reads_the_same_input_once(monkeypatch):
    """Four words at four blanks, two of them of one token: their inputs are the same."""
    model, clozes, vocabulary = asked("bert")
    rows = []
    plain = LogitsAt.__call__
    monkeypatch.setattr(
        LogitsAt, "__call__", lambda self, batch: rows.append(len(batch.input_ids)) or plain(self, batch)
    )
    Questions(clozes, **options(vocabulary, 100)).ask(LogitsAt(model))
    assert sum(rows) == len({(cloze.input_ids, cloze.positions) for cloze in clozes}) < len(clozes)


def test_ask__keeps_the_logits_of_a_batch_small(monkeypatch):
    model, clozes, vocabulary = asked("gpt2")
    expected = Questions(clozes, **options(vocabulary, 100)).ask(LogitsAt(model)).log_probability
    monkeypatch.setattr(module, "LOGITS_BYTES", 4 * vocabulary * 3)
    questions = Questions(clozes, **options(vocabulary, 100))
    assert max(len(batch.inputs.rows) for batch in questions._batches) <= max(3, max(len(c.labels) for c in clozes))
    np.testing.assert_allclose(questions.ask(LogitsAt(model)).log_probability, expected, rtol=2e-5)
