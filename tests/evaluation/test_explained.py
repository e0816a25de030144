"""What the decoder explains of held-out targets, and what one latent could: equal to a dense computation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradiend_dist import PrePruneConfig, TextPredictionTrainer, TrainingArguments, UserError
from gradiend_dist.distributed.comm import Comm
from gradiend_dist.evaluation.explained import HeldOut, unexplained_by_class_means
from gradiend_dist.gradients.items import Item
from gradiend_dist.model.gradiend import GradiendModel
from gradiend_dist.space import Slices

N = 211


class Given:
    """Gradients that are there already."""

    def __init__(self, sources: Tensor, targets: Tensor, *, kept: bool = True) -> None:
        self.sources, self.targets, self.calls, self.kept = sources, targets, 0, kept
        part = Slices.whole(sources.shape[1])
        self.base = SimpleNamespace(comm=Comm(), slices=part, device=torch.device("cpu"))

    def will_keep(self, _items: Any, _kinds: Any) -> bool:
        return self.kept

    def hand_out(self, items: list[Item], kinds: list[str], deliver: Any, *, complete: bool) -> None:
        """In two pieces, but for those that are zero."""
        assert complete and not self.kept
        for number, item in enumerate(items):
            for kind, vector in self.get(item, kinds, keep=True).items():
                for where in (slice(0, 101), slice(101, len(vector))):
                    if vector[where].any():
                        deliver(number, [(kind, 1.0)], where, vector[where])

    def get(self, item: Item, kinds: list[str], *, keep: bool) -> dict[str, Tensor]:
        assert keep
        self.calls += 1
        number = int(item.name)
        both = {"alternative": self.sources[number], "diff": self.targets[number]}
        return {kind: both[kind] for kind in kinds}


def held_out(
    sources: Tensor, targets: Tensor, labels: Any, source: str | None = "alternative", *, kept: bool = True
) -> HeldOut:
    items = [Item((), str(number)) for number in range(len(sources))]
    return HeldOut(Given(sources, targets, kept=kept), items, list(labels), source, "diff")  # type: ignore[arg-type]


def test_measure__of_one_kind_for_both_counts_it_once() -> None:
    """Fails if source and target of the same kind are handed out twice."""
    torch.manual_seed(0)
    targets, labels = torch.randn(4, N), [1.0, -1.0, 1.0, -1.0]
    model = GradiendModel(N)
    items = [Item((), str(number)) for number in range(4)]
    found = [
        HeldOut(Given(targets, targets, kept=kept), items, labels, "diff", "diff").measure(model)["explained"]  # type: ignore[arg-type]
        for kept in (True, False)
    ]
    assert found[0] == pytest.approx(found[1], abs=1e-5)


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "streamed"])
@pytest.mark.parametrize("activation", ["id", "tanh"])
@pytest.mark.parametrize("latent_dim", [1, 2])
def test_measure__is_the_dense_computation(activation: str, latent_dim: int, kept: bool) -> None:
    """Fails if what a backward pass leaves out, which is zero, has no error."""
    torch.manual_seed(0)
    sources, targets = torch.randn(6, N), torch.randn(6, N) + 0.5
    targets[:, :101] = 0.0
    model = GradiendModel(N, latent_dim, activation_decoder=activation)
    found = held_out(sources, targets, [1, -1, 1, -1, 1, -1], kept=kept).measure(model)
    error = float((model(sources) - targets).detach().square().sum())
    size, around = float(targets.square().sum()), float((targets - targets.mean(0)).square().sum())
    assert found["held_out_loss"] == pytest.approx(error / (6 * N), rel=1e-5)
    assert found["explained"] == pytest.approx(1 - error / size, abs=1e-5)
    assert found["explained_centred"] == pytest.approx(1 - error / around, abs=1e-5)


def test_measure__of_a_decoder_without_encoder_starts_from_labels() -> None:
    torch.manual_seed(0)
    targets = torch.randn(4, N)
    labels = torch.tensor([1.0, -1.0, 1.0, -1.0])
    model = GradiendModel(N)
    found = held_out(targets, targets, labels, source=None).measure(model)
    error = (model.forward_decoder(labels.unsqueeze(1)).detach() - targets).square().mean()
    assert found["held_out_loss"] == pytest.approx(float(error), rel=1e-5)


def test_limit__is_reached_by_class_means_and_not_passed() -> None:
    """Two classes: their true means explain what the limit says, though it was measured on four items of each."""
    torch.manual_seed(1)
    mean, noise = torch.randn(N), 0.5
    labels = torch.tensor([1.0, -1.0] * 4)
    limits, shares = [], []
    for _ in range(50):
        targets = labels.unsqueeze(1) * mean + noise * torch.randn(8, N)
        model = GradiendModel(N)
        model.decoder_weight[:, 0], model.decoder_bias_vector[:] = mean, 0.0  # type: ignore[index]
        found = held_out(targets, targets, labels, source=None).measure(model)
        limits.append(found["explained_limit"])
        shares.append(found["explained"])
    assert sum(limits) / 50 == pytest.approx(sum(shares) / 50, abs=0.005)
    assert sum(shares) / 50 == pytest.approx(1 - noise**2 / (float(mean.square().mean()) + noise**2), abs=0.02)


def test_limit__one_latent_reaches_a_line() -> None:
    """Three class means in a triangle: one latent cannot have them all, two can."""
    labels = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0, 0.0])
    means = torch.eye(3, dtype=torch.float64)
    vectors = torch.stack([means[0], means[0], means[1], means[1], means[2], means[2]])
    products = vectors @ vectors.T
    assert unexplained_by_class_means(products, labels, 2) == pytest.approx(0.0, abs=1e-9)
    # Two points of each class, half of the triangle.
    assert unexplained_by_class_means(products, labels, 1) == pytest.approx(2.0)
    on_a_line = torch.stack([means[0], means[0], -means[0], -means[0], 0 * means[0], 0 * means[0]])
    assert unexplained_by_class_means(on_a_line @ on_a_line.T, labels, 1) == pytest.approx(0.0, abs=1e-9)


def test_shares__are_none_where_they_have_no_meaning() -> None:
    zeros = torch.zeros(4, N)
    found = held_out(zeros + 1, zeros, [1, -1, 1, -1]).measure(GradiendModel(N))
    assert found["explained"] is None and found["explained_limit"] is None and found["held_out_loss"] > 0
    alone = held_out(torch.randn(2, N), torch.randn(2, N), [1, -1]).measure(GradiendModel(N))
    assert alone["explained"] is not None and alone["explained_limit"] is None


def test_measure__a_target_that_is_not_finite_is_named() -> None:
    targets = torch.randn(6, N)
    targets[4, 7] = torch.nan
    with pytest.raises(UserError, match="The diff gradient of 4 is not finite"):
        held_out(torch.randn(6, N), targets, [1, -1, 0, 1, -1, 0]).measure(GradiendModel(N))


def make(model: Path, frames: Any, directory: Path, **changes: Any) -> TextPredictionTrainer:
    defaults: dict[str, Any] = {
        "experiment_dir": str(directory), "train_batch_size": 8, "train_max_size": 40, "encoder_eval_max_size": 6,
        "max_steps": 4, "eval_steps": 2, "learning_rate": 1e-3, "max_seeds": 1,
        "pre_prune_config": PrePruneConfig(n_samples=8, topk=0.05, source="diff"),
    }  # fmt: skip
    args = TrainingArguments(**{**defaults, **changes})
    return TextPredictionTrainer(str(model), data=frames, target_classes=["M", "F"], args=args)


@pytest.mark.parametrize(
    ("changes", "steps"),
    [({}, {"0", "2", "4"}), ({"supervised_decoder": True}, {"4"}), ({"supervised_encoder": True}, None),
     ({"do_eval": False}, None), ({"compat": "gradiend-0.2"}, {"0", "2", "4"})],
)  # fmt: skip
def test_runs__say_what_the_decoder_explains(
    masked_lm: Path, feature_frames: Any, tmp_path: Path, changes: dict[str, Any], steps: set[str] | None
) -> None:
    trainer = make(masked_lm, feature_frames, tmp_path, **changes).train()
    stats = trainer.get_training_stats()["training_stats"]
    if steps is None:
        assert "explained" not in stats
        return
    assert stats["explained"].keys() == stats["explained_centred"].keys() == stats["held_out_loss"].keys() == steps
    assert 0.5 < stats["explained_limit"] <= 1.0
    # The limit answers all items of a class alike; a latent that differs among them may explain a little more.
    assert stats["explained"]["4"] < stats["explained_limit"] + 0.01


def test_items__are_of_the_validation_split_and_enough(masked_lm: Path, feature_frames: Any, tmp_path: Path) -> None:
    """With few rows items are smaller, so that there are several of each direction."""
    few = {name: frame.groupby("split").head(9) for name, frame in feature_frames.items()}
    for frames, size in ((feature_frames, 8), (few, 2)):
        found = make(masked_lm, frames, tmp_path, pre_prune_config=None).inputs
        measured = found.held_out(found.session.space)
        assert measured is not None
        assert [int((measured.labels == side).sum()) for side in (1, -1)] == [4, 4]
        assert max(len(item.rows) for item in measured.items) <= size
        training = {row for number in range(len(found.training.schedule.batches))
                    for row in found.training_items().item(found.training.schedule.batches[number]).rows}  # fmt: skip
        assert not training & {row for item in measured.items for row in item.rows}
