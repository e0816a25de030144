"""The public object: from data to a promoted model, and that how the work is done never changes what comes out."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerCallback

from gradiend_dist import PostPruneConfig, PrePruneConfig, TextPredictionTrainer, TrainingArguments, UserError
from gradiend_dist.demo import feature_data
from gradiend_dist.evaluation.encoder_report import EncoderReport
from gradiend_dist.model_with_gradiend import ModelWithGradiend
from gradiend_dist.training.history import SeedRun
from gradiend_dist.training.loop import TrainingLoop

PRUNE = PrePruneConfig(n_samples=8, topk=0.05, source="diff")


def make(masked_lm: Path, frames: Any, tmp_path: Path, **changes: Any) -> TextPredictionTrainer:
    defaults: dict[str, Any] = {
        "experiment_dir": str(tmp_path / "run"),
        "train_batch_size": 8,
        "train_max_size": 40,
        "encoder_eval_max_size": 6,
        "max_steps": 7,
        "eval_steps": 3,
        "learning_rate": 1e-3,
        "max_seeds": 2,
        "min_convergent_seeds": None,
        "pre_prune_config": PRUNE,
        "initialization": "random",  # whose numbers move with the seed and the steps
    }
    fields = {name: changes.pop(name) for name in ("run_id", "split_col") if name in changes}
    args = TrainingArguments(**{**defaults, **changes})
    return TextPredictionTrainer(str(masked_lm), data=frames, target_classes=["M", "F"], args=args, **fields)


def weights(trainer: TextPredictionTrainer) -> dict[str, torch.Tensor]:
    return load_file(str(trainer.model_path / "model.safetensors"))


def assert_same_weights(first: TextPredictionTrainer, second: TextPredictionTrainer) -> None:
    ours, theirs = weights(first), weights(second)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), f"{name} differs by {(tensor - theirs[name]).abs().max()}"


@pytest.fixture(scope="module")
def trained(masked_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> TextPredictionTrainer:
    trainer = make(
        masked_lm, feature_data(), tmp_path_factory.mktemp("trained"), keep_seed_runs=True,
        add_identity_for_other_classes=True,
    )  # fmt: skip
    return trainer.train()


def test_train__writes_what_the_documentation_promises(trained: TextPredictionTrainer) -> None:
    root = trained.experiment_dir
    assert root is not None
    for name in ("model/model.safetensors", "model/config.json", "model/gradiend_context.json", "model/training.json",
                 "model/tokenizer/tokenizer.json", "seeds/seed_report.json", "seeds/seed_0/model.safetensors",
                 "seeds/seed_1/model.safetensors", "training_stats.json"):  # fmt: skip
        assert (root / name).exists(), name
    assert not list(root.rglob("*partial*")) and not list(root.rglob("*_best"))
    report = trained.get_seed_report()
    assert {
        "convergence_metric", "threshold", "min_convergent_seeds", "max_seeds", "seeds_tried", "convergent_count",
        "best_seed", "best_selection_score", "early_stop_reason", "runs",
    } <= report.keys()  # fmt: skip
    assert {
        "seed", "output_dir", "trained", "used_cache", "training_score", "eval_correlation", "selection_score",
        "convergence_metric", "convergence_metric_value", "threshold", "converged",
    } <= report["runs"][0].keys()  # fmt: skip
    stats = trained.get_training_stats()
    assert len(stats["losses"]) == 7
    assert sorted(map(int, stats["training_stats"]["scores"])) == [0, 3, 6, 7]
    assert stats["training_stats"]["mean_by_class"]["3"].keys() == {"-1.0", "0.0", "1.0"}
    everything = json.loads((root / "training_stats.json").read_text())
    assert everything["seeds"].keys() == {"0", "1"} and everything["best_seed"] == report["best_seed"]


def test_train__promotes_the_best_checkpoint_of_the_best_seed(trained: TextPredictionTrainer) -> None:
    report = trained.get_seed_report()
    best = next(run for run in report["runs"] if run["seed"] == report["best_seed"])
    assert best["selection_score"] == max(run["selection_score"] for run in report["runs"])
    promoted, seed = weights(trained), load_file(str(Path(best["output_dir"]) / "model.safetensors"))
    assert all(torch.equal(promoted[name], seed[name]) for name in seed)
    scores = {int(step): score for step, score in trained.get_training_stats()["training_stats"]["scores"].items()}
    step = best["best_checkpoint_global_step"]
    assert abs(scores[step]) == max(abs(score) for at, score in scores.items() if at > 0)
    again = trained.evaluate_encoder("validation", neutral=False, use_cache=False)
    assert again["correlation"] == pytest.approx(best["selection_score"], abs=1e-6)


def test_train__one_process_two_hash_seeds_same_bytes(masked_lm: Path, tmp_path: Path) -> None:
    """Fails if a set or a dict of hashes decides an order anywhere."""
    script = (
        "import sys; from gradiend_dist import *; from gradiend_dist.demo import feature_data\n"
        "args = TrainingArguments(experiment_dir=sys.argv[2], train_batch_size=8, train_max_size=24, max_steps=3,"
        " eval_steps=2, encoder_eval_max_size=4, max_seeds=1, add_identity_for_other_classes=True,"
        " pre_prune_config=PrePruneConfig(n_samples=4, topk=0.05))\n"
        "TextPredictionTrainer(sys.argv[1], data=feature_data(), target_classes=['M', 'F'], args=args).train()"
    )
    # Both at the same time: most of it is the start of Python.
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(masked_lm), str(tmp_path / hash_seed)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )
        for hash_seed in ("1", "2")
    ]
    assert [process.wait(200) for process in started] == [0, 0]
    first, second = ((tmp_path / seed / "model" / "model.safetensors").read_bytes() for seed in ("1", "2"))
    assert first == second


def test_seeds__in_lockstep_equal_in_sequence(masked_lm: Path, feature_frames: Any, tmp_path: Path) -> None:
    both = [
        make(
            masked_lm, feature_frames, tmp_path / str(together), seeds_in_parallel=together, keep_seed_runs=True
        ).train()
        for together in (False, True)
    ]
    assert_same_weights(*both)
    reports = [trainer.get_seed_report() for trainer in both]
    for run in (run for report in reports for run in report["runs"]):
        run.pop("output_dir")
    assert reports[0] == reports[1]
    assert both[0].get_training_stats()["losses"] == both[1].get_training_stats()["losses"]


def test_seeds__lockstep_stops_where_the_sequence_stops(masked_lm: Path, feature_frames: Any, tmp_path: Path) -> None:
    """Seeds after the last needed one were trained along; reporting them would make memory decide the result."""
    easy = {"convergent_score_threshold": 0.0, "convergent_mean_by_class_threshold": None, "max_seeds": 3,
            "min_convergent_seeds": 1, "learning_rate": 1e-4}  # fmt: skip
    reports = []
    for together in (False, True):
        trainer = make(masked_lm, feature_frames, tmp_path / str(together), seeds_in_parallel=together, **easy)
        reports.append(trainer.train().get_seed_report())
        tried = [f"seed_{seed}" for seed in reports[-1]["seeds_tried"]]
        assert sorted(path.name for path in trainer.seed_runs_dir.glob("seed_[0-9]")) == tried
    assert reports[0]["seeds_tried"] == reports[1]["seeds_tried"]
    assert reports[0]["early_stop_reason"] == reports[1]["early_stop_reason"]


@pytest.mark.parametrize(
    "change",
    [{"gradient_store_gib": 0.0}, {"base_micro_batch_size": 3}, {"use_cached_gradients": True}],
    ids=lambda change: next(iter(change)),
)
def test_train__how_gradients_are_made_does_not_matter(
    masked_lm: Path, feature_frames: Any, tmp_path: Path, change: dict[str, Any]
) -> None:
    """Micro-batches differ in the order of float32 sums, the rest in nothing."""
    plain = make(masked_lm, feature_frames, tmp_path / "plain", max_seeds=1).train()
    changed = make(masked_lm, feature_frames, tmp_path / "changed", max_seeds=1, **change).train()
    tolerance = 1e-5 if "base_micro_batch_size" in change else 0.0
    for name, tensor in weights(plain).items():
        assert torch.allclose(tensor, weights(changed)[name], rtol=0, atol=tolerance), name


def test_use_cached_gradients__second_run_computes_none(
    masked_lm: Path, feature_frames: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make(masked_lm, feature_frames, tmp_path, max_seeds=1, use_cached_gradients=True, pre_prune_config=None)
    expected = weights(first.train())
    second = make(masked_lm, feature_frames, tmp_path, max_seeds=1, use_cached_gradients=True, pre_prune_config=None)
    monkeypatch.setattr(
        "gradiend_dist.gradients.base.BaseGradients.compute", lambda *_, **__: pytest.fail("computed again")
    )
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(second.train()).items())


def test_accumulation__equals_a_larger_gradiend_batch(masked_lm: Path, feature_frames: Any, tmp_path: Path) -> None:
    options = {"max_seeds": 1, "max_steps": 4}
    one = make(masked_lm, feature_frames, tmp_path / "one", gradiend_batch_size=6, **options).train()
    other = make(
        masked_lm, feature_frames, tmp_path / "other", gradiend_batch_size=2, gradient_accumulation_steps=3, **options
    ).train()
    first, second = (trainer.get_training_stats()["losses"] for trainer in (one, other))
    assert first == pytest.approx(second, rel=1e-5)
    for name, tensor in weights(one).items():
        assert torch.allclose(tensor, weights(other)[name], atol=1e-5), name


def test_max_steps__overrides_epochs_and_compat_caps_them(masked_lm: Path, feature_frames: Any, tmp_path: Path) -> None:
    options = {"max_seeds": 1, "train_max_size": 8, "num_train_epochs": 1, "max_steps": 5, "do_eval": False}
    ours = make(masked_lm, feature_frames, tmp_path / "ours", **options).train()
    reference = make(masked_lm, feature_frames, tmp_path / "compat", compat="gradiend-0.2", **options).train()
    assert len(ours.get_training_stats()["losses"]) == 5
    assert len(reference.get_training_stats()["losses"]) == 2


def test_without_evaluation__last_weights_are_kept(masked_lm: Path, feature_frames: Any, tmp_path: Path) -> None:
    """The reference keeps those of step 1."""
    options = {"max_seeds": 1, "do_eval": False, "max_steps": 4}
    kept = weights(make(masked_lm, feature_frames, tmp_path / "a", **options).train())
    last: dict[str, torch.Tensor] = {}

    class Remember(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            last.update({name: tensor.clone() for name, tensor in kwargs["model"].gradiend.state_dict().items()})

    make(masked_lm, feature_frames, tmp_path / "b", **options).train(callbacks=[Remember()])
    assert all(torch.equal(kept[name], tensor) for name, tensor in last.items()) and last


def test_scheduler__learning_rates_are_hugging_faces(masked_lm: Path, feature_frames: Any, tmp_path: Path) -> None:
    trainer = make(
        masked_lm, feature_frames, tmp_path, max_seeds=1, lr_scheduler_type="linear", warmup_steps=2, max_steps=6,
        learning_rate=0.1, do_eval=False,
    ).train()  # fmt: skip
    rates = list(trainer.get_training_stats()["training_stats"]["learning_rates"].values())
    assert rates == pytest.approx([0.0, 0.05, 0.1, 0.075, 0.05, 0.025])


@pytest.mark.parametrize("strategy", ["best", "steps", "no"])
def test_save_strategy__decides_which_directories_exist(
    masked_lm: Path, feature_frames: Any, tmp_path: Path, strategy: str
) -> None:
    trainer = make(masked_lm, feature_frames, tmp_path, max_seeds=1, save_strategy=strategy, save_steps=3).train()
    found = sorted(path.name for path in trainer.model_path.parent.iterdir() if path.is_dir())
    assert found == (["model", "model_step_3", "model_step_6"] if strategy == "steps" else ["model"])
    if strategy == "no":
        assert trainer.get_training_stats()["best_score_checkpoint"]["global_step"] == 7


def test_delete_models__leaves_the_promoted_one(masked_lm: Path, feature_frames: Any, tmp_path: Path) -> None:
    trainer = make(
        masked_lm,
        feature_frames,
        tmp_path,
        save_strategy="steps",
        save_steps=3,
        delete_models=True,
        keep_seed_runs=True,
    ).train()
    assert trainer.experiment_dir is not None
    found = [path.parent for path in trainer.experiment_dir.rglob("model.safetensors")]
    assert found == [trainer.model_path]


def test_save_only_best_false__keeps_epochs_and_promotes_the_last(
    masked_lm: Path, feature_frames: Any, tmp_path: Path
) -> None:
    trainer = make(
        masked_lm, feature_frames, tmp_path, max_seeds=1, save_only_best=False, max_steps=-1, num_train_epochs=2,
        train_max_size=16,
    ).train()  # fmt: skip
    names = sorted(path.name for path in trainer.model_path.parent.iterdir() if path.is_dir())
    assert {"model", "model_epoch_1", "model_epoch_2"} <= set(names)
    last = load_file(str(trainer.model_path.with_name("model_epoch_2") / "model.safetensors"))
    assert all(torch.equal(tensor, last[name]) for name, tensor in weights(trainer).items())


class Probe(TrainerCallback):
    """Counts what it is told."""

    seen: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.seen.append(f"step {state.global_step}")
        if state.global_step == 4:
            control.should_training_stop = True

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.seen.append("epoch")


def test_callbacks__see_every_step_and_can_stop(masked_lm: Path, feature_frames: Any, tmp_path: Path) -> None:
    Probe.seen = []
    trainer = make(masked_lm, feature_frames, tmp_path, max_seeds=1).train(callbacks=[Probe()])
    assert Probe.seen == ["epoch", "step 1", "step 2", "step 3", "step 4"]
    stats = trainer.get_training_stats()
    assert len(stats["losses"]) == 4
    assert sorted(map(int, stats["training_stats"]["scores"])) == [0, 3, 4]  # the last weights are evaluated


def test_callbacks__hugging_faces_early_stopping_works(masked_lm: Path, feature_frames: Any, tmp_path: Path) -> None:
    """With a learning rate of almost nothing the correlation does not improve by 0.5 after the first evaluation."""
    callback = EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.5)
    trainer = make(
        masked_lm, feature_frames, tmp_path, max_steps=30, eval_steps=2, learning_rate=1e-9, max_seeds=2
    ).train(callbacks=[callback])
    for seed in (0, 1):  # each seed with a counter of its own
        record = trainer.get_training_stats(trainer.seed_runs_dir / f"seed_{seed}")
        assert len(record["losses"]) == 6


def test_not_finite__stops_before_the_optimizer_and_names_the_item(
    masked_lm: Path, feature_frames: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_step, models = SeedRun.step, []

    def poisoned(self: SeedRun, step: int, batches: Any, *rest: Any) -> None:
        models.append({n: t.clone() for n, t in self.model.gradiend.state_dict().items()})
        if len(models) == 3:
            batches[0].target[0, 5] = float("nan")
            models.append(self.model)
        take_step(self, step, batches, *rest)

    monkeypatch.setattr(SeedRun, "step", poisoned)
    trainer = make(masked_lm, feature_frames, tmp_path, max_seeds=1, do_eval=False)
    with pytest.raises(UserError, match=r"not finite at step 3 of seed 0 .* item \d+ \((M→F|F→M), rows"):
        trainer.train()
    before, model = models[2], models[3]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.gradiend.state_dict().items())
    assert not trainer.model_path.exists()


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_supervised__trains_one_half_alone(masked_lm: Path, feature_frames: Any, tmp_path: Path, side: str) -> None:
    trainer = make(
        masked_lm, feature_frames, tmp_path, max_seeds=1, max_steps=12, eval_steps=6, learning_rate=1e-2,
        save_strategy="no", normalize_gradiend=False, **{f"supervised_{side}": True},
    ).train()  # fmt: skip
    start = trainer.session.new_model(trainer.get_model().gradiend.space, 0).gradiend.state_dict()
    for name, tensor in weights(trainer).items():
        assert torch.equal(tensor, start[name]) == (not name.startswith(side)), name
    losses = trainer.get_training_stats()["losses"]
    assert losses[-1] < losses[0]


def test_post_prune__keeps_the_largest_and_what_was_saved(masked_lm: Path, feature_frames: Any, tmp_path: Path) -> None:
    """As the argument does it, but in memory: the promoted model on disk is somebody's result."""
    plain = make(masked_lm, feature_frames, tmp_path / "plain", max_seeds=1).train()
    before = {path.name: path.read_bytes() for path in plain.model_path.iterdir() if path.is_file()}
    config = PostPruneConfig(topk=100, part="decoder-weight")
    pruned = make(masked_lm, feature_frames, tmp_path / "pruned", max_seeds=1, post_prune_config=config).train()
    assert plain.post_prune(post_cfg=config) is plain
    by_hand = plain.get_model()
    assert len(by_hand) == len(pruned.get_model()) == 100
    assert by_hand.gradiend.space == pruned.get_model().gradiend.space
    for name, tensor in by_hand.gradiend.state_dict().items():
        assert torch.equal(tensor, pruned.get_model().gradiend.state_dict()[name]), name
    loaded = ModelWithGradiend.from_pretrained(pruned.model_path)
    assert loaded.gradiend.space == by_hand.gradiend.space
    assert before == {path.name: path.read_bytes() for path in plain.model_path.iterdir() if path.is_file()}
    changed = plain.rewrite_base_model(target_class="F", learning_rate=0.1)
    moved = sum(
        int((new != old).sum()) for new, old in zip(changed.parameters(), by_hand.base_model.parameters(), strict=True)
    )
    assert 0 < moved <= 100, "a rewriting is about the pruned model"


def test_pre_prune__called_by_hand_equals_the_argument(masked_lm: Path, feature_frames: Any, tmp_path: Path) -> None:
    by_argument = make(masked_lm, feature_frames, tmp_path / "a", max_seeds=1).train()
    by_hand = make(masked_lm, feature_frames, tmp_path / "b", max_seeds=1, pre_prune_config=None)
    aside = by_hand.pre_prune(PRUNE, inplace=False)
    assert isinstance(aside, ModelWithGradiend) and by_hand.args.pre_prune_config is None
    assert by_hand.pre_prune(pre_cfg=PRUNE) is by_hand and len(by_hand.get_model()) == len(aside)
    assert_same_weights(by_argument, by_hand.train())


def test_use_cache__reuses_only_what_is_still_the_same(
    masked_lm: Path, feature_frames: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO)
    make(masked_lm, feature_frames, tmp_path).train()
    make(masked_lm, feature_frames, tmp_path, use_cache=True, learning_rate=2e-3).train()
    assert "not reused: learning_rate was 0.001, now 0.002" in caplog.text
    caplog.clear()
    fewer = {name: frame.iloc[1:].reset_index(drop=True) for name, frame in feature_frames.items()}
    make(masked_lm, fewer, tmp_path, use_cache=True, learning_rate=2e-3).train()
    assert "not reused: data was" in caplog.text
    monkeypatch.setattr(TrainingLoop, "run", lambda self: pytest.fail("trained again"))  # noqa: ARG005
    again = make(masked_lm, fewer, tmp_path, use_cache=True, learning_rate=2e-3)
    assert again.train().get_model() is not None
    anything = make(masked_lm, fewer, tmp_path, use_cache="always", learning_rate=7.0)
    anything.train()


def test_use_cache__finished_seeds_of_an_interrupted_run_are_kept(
    masked_lm: Path, feature_frames: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make(masked_lm, feature_frames, tmp_path / "whole", keep_seed_runs=True).train()
    run, calls = TrainingLoop.run, []

    def interrupted(self: TrainingLoop) -> None:
        calls.append(self.runs[0].seed)
        if calls == [0, 1]:
            raise KeyboardInterrupt
        run(self)

    monkeypatch.setattr(TrainingLoop, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(masked_lm, feature_frames, tmp_path / "cut", keep_seed_runs=True, use_cache=True).train()
    resumed = make(masked_lm, feature_frames, tmp_path / "cut", keep_seed_runs=True, use_cache=True).train()
    assert calls == [0, 1, 1]
    assert [entry["used_cache"] for entry in resumed.get_seed_report()["runs"]] == [True, False]
    assert_same_weights(whole, resumed)


def test_evaluate_encoder__cache_notices_another_model(
    masked_lm: Path, feature_frames: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(masked_lm, feature_frames, tmp_path, max_seeds=1).train()
    first = trainer.evaluate_encoder(use_cache=True)
    with monkeypatch.context() as patch:
        patch.setattr(EncoderReport, "table", lambda _: pytest.fail("encoded again"))
        assert trainer.evaluate_encoder(use_cache=True) == first
    trainer.get_model().gradiend.encoder_weight.mul_(-1)
    trainer.get_model().gradiend.encoder_bias.mul_(-1)
    second = trainer.evaluate_encoder(use_cache=True)
    assert second["correlation"] == pytest.approx(-first["correlation"])


def test_train__latent_dim_and_activations_of_the_arguments_are_honoured(
    masked_lm: Path, feature_frames: Any, tmp_path: Path
) -> None:
    trainer = make(
        masked_lm, feature_frames, tmp_path, max_seeds=1, latent_dim=2, activation_encoder="gelu",
        activation_decoder="tanh", bias_decoder=False,
    ).train()  # fmt: skip
    model = ModelWithGradiend.from_pretrained(trainer.model_path).gradiend
    assert (model.latent_dim, model.activation_encoder, model.activation_decoder) == (2, "gelu", "tanh")
    assert "decoder.0.linear.bias" not in weights(trainer)
    result = trainer.evaluate_encoder("validation", return_df=True)
    assert len(result["correlation_by_latent"]) == 2 and "encoded_1" in result["encoder_df"]


def test_train__params_restrict_the_space(masked_lm: Path, feature_frames: Any, tmp_path: Path) -> None:
    trainer = make(
        masked_lm, feature_frames, tmp_path, max_seeds=1, pre_prune_config=None, params=["*.layer.0.*"], max_steps=2
    ).train()
    names = trainer.get_model().gradiend.param_map
    assert names and all(".layer.0." in name for name in names)


def test_train__causal_model(causal_lm: Path, feature_frames: Any, tmp_path: Path) -> None:
    trainer = make(causal_lm, feature_frames, tmp_path, max_seeds=1).train()
    assert trainer.session.objective.name == "clm_next_token"
    assert len(trainer.get_training_stats()["losses"]) == 7
    assert abs(trainer.evaluate_encoder()["correlation"]) <= 1


def test_plot__is_a_file_in_the_experiment(trained: TextPredictionTrainer) -> None:
    pytest.importorskip("matplotlib")
    path = trained.plot_training_convergence(show=False, label_name_mapping={"M": "masc."})
    assert path.parent == trained.experiment_dir and path.stat().st_size > 5000


def test_get_model__after_training_a_given_model_is_the_trained_one(
    masked_lm: Path, feature_frames: Any, tmp_path: Path
) -> None:
    given = ModelWithGradiend.from_pretrained(masked_lm, param_map=["*.layer.1.*"], seed=4)
    args = TrainingArguments(experiment_dir=str(tmp_path), max_steps=2, max_seeds=1, train_batch_size=8, do_eval=False)
    trainer = TextPredictionTrainer(given, data=feature_frames, target_classes=["M", "F"], args=args)
    assert trainer.get_model() is given
    trained = trainer.train().get_model()
    assert trained is not given and trained.gradiend.space == given.gradiend.space
    assert torch.equal(trained.gradiend.encoder_weight, weights(trainer)["encoder.0.linear.weight"])


def test_store__gets_what_the_forecast_of_the_run_leaves(masked_lm, feature_frames, tmp_path, monkeypatch):
    """Fails if the memory for gradients is fixed before weights and moments are counted."""
    trainer = make(masked_lm, feature_frames, tmp_path, max_seeds=1, pre_prune_config=None)
    session = trainer.session
    entries = session.space.size
    for free, expected in ((10**9, None), (12 * entries, 0)):
        monkeypatch.setattr("gradiend_dist.session.free_bytes", lambda _device, free=free: free)
        store = session.store_bytes()
        # Encoder, decoder and bias with two moments each, and the gradients of a step.
        assert store == expected if expected is not None else 0 < store <= (free - 36 * entries - 8 * entries) / 2
