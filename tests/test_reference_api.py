"""What users of the reference write: the same names, keywords and files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gradiend_dist import MissingFile, ModelWithGradiend, TextPredictionTrainer, TrainingArguments, UserError
from gradiend_dist.demo import feature_data
from gradiend_dist.model_with_gradiend import create_model_with_gradiend
from gradiend_dist.storage.files import read_json, write_json
from gradiend_dist.trainer import PostPruneConfig, PrePruneConfig
from gradiend_dist.trainer.text.prediction.model_with_gradiend import TextPredictionModelWithGradiend


@pytest.fixture(scope="module")
def trained(masked_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> TextPredictionTrainer:
    args = TrainingArguments(
        experiment_dir=str(tmp_path_factory.mktemp("run")), max_seeds=1, max_steps=0, per_device_train_batch_size=8
    )
    return TextPredictionTrainer(str(masked_lm), data=feature_data(), target_classes=["M", "F"], args=args).train()


def test_documented_paths__lead_to_our_objects(masked_lm: Path) -> None:
    assert PrePruneConfig().topk == 0.1 and PostPruneConfig().topk == 0.01
    model = create_model_with_gradiend(
        str(masked_lm), param_map=["*.layer.0.*"], model_class=TextPredictionModelWithGradiend
    )
    assert isinstance(model, TextPredictionModelWithGradiend) and all(
        ".layer.0." in n for n in model.gradiend.param_map
    )


def test_training__leaves_the_convergence_plot(trained: TextPredictionTrainer) -> None:
    assert trained.experiment_dir is not None
    assert trained.plot_path == trained.experiment_dir / "training_convergence.png" and trained.plot_path.is_file()


def test_save_model__can_be_loaded(trained: TextPredictionTrainer, tmp_path: Path) -> None:
    path = trained.save_model(tmp_path / "model")
    again = ModelWithGradiend.from_pretrained(path, base_model_device="cpu")
    assert torch.equal(again.gradiend.encoder_weight, trained.get_model().gradiend.encoder_weight)
    assert trained.get_training_stats(path)["training_args"]["train_batch_size"] == 8
    assert trained.save_model() == trained.model_path


def test_get_model__is_kept_loaded_again_or_another_one(trained: TextPredictionTrainer, tmp_path: Path) -> None:
    model = trained.get_model()
    assert trained.get_model() is model and trained.get_model(use_cache=False) is not model
    other = trained.get_model(load_directory=trained.save_model(tmp_path / "other"))
    assert other is not trained.get_model()
    trained.unload_model()
    assert trained.loaded_model is None and trained.get_model() is not model
    assert trained.cpu() is trained and trained.get_model().to("cpu").cpu() is trained.get_model()


def test_plot_kwargs__are_those_of_the_plot(trained: TextPredictionTrainer, tmp_path: Path) -> None:
    output = tmp_path / "encodings.pdf"
    found = trained.evaluate_encoder(max_size=3, plot=True, plot_kwargs={"output": output, "img_format": "pdf"})
    assert found["plot_path"] == output and output.is_file()
    with pytest.raises(UserError, match="colour is not a known argument"):
        trained.evaluate_encoder(plot_kwargs={"colour": 1})
    with pytest.raises(UserError, match="max_size=0"):
        trained.evaluate_encoder(max_size=0)


def test_resume_from_checkpoint__is_about_this_run(trained: TextPredictionTrainer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not in experiment_dir.*pass that directory"):
        trained.train(resume_from_checkpoint=tmp_path)
    assert trained._resumes(True) and not trained._resumes(False)
    assert trained.experiment_dir is not None and trained._resumes(trained.experiment_dir / "state")


def test_missing_files__are_told_as_such(trained: TextPredictionTrainer, tmp_path: Path) -> None:
    for ask in (
        lambda: trained.get_training_stats(tmp_path),
        lambda: ModelWithGradiend.from_pretrained(tmp_path / "no"),
    ):
        with pytest.raises(UserError):
            ask()
    with pytest.raises(FileNotFoundError) as error:
        trained.get_training_stats(tmp_path)
    assert isinstance(error.value, MissingFile) and "check the path" in str(error.value)


def test_models_without_biases__load_with_biases_of_zero(trained: TextPredictionTrainer, tmp_path: Path) -> None:
    """Checkpoints of the reference's next version: no encoder bias, and keys that this version does not know."""
    path = trained.save_model(tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    for name in ("encoder.0.linear.bias", "decoder.0.linear.bias"):
        del tensors[name]
    save_file(tensors, path / "model.safetensors")
    config = read_json(path / "config.json")
    del config["architecture"]["bias_decoder"]
    config["architecture"] |= {"bias_encoder": False, "init_fan_in_floor": 0}
    write_json(path / "config.json", {**config, "components": None})
    gradiend = ModelWithGradiend.from_pretrained(path).gradiend
    assert not gradiend.encoder_bias.any() and gradiend.decoder_bias_vector is None
    assert torch.equal(gradiend.encoder_weight, tensors["encoder.0.linear.weight"])


def test_pickled_weights__are_refused_in_one_line(trained: TextPredictionTrainer, tmp_path: Path) -> None:
    path = trained.save_model(tmp_path / "model")
    (path / "model.safetensors").unlink()
    for content in (b"garbage", b"cos\nsystem\n(S'touch mark'\ntR."):
        (path / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(UserError, match="pytorch_model.bin cannot be read"):
            ModelWithGradiend.from_pretrained(path)


def test_models_with_numbers_that_are_none__are_not_written(trained: TextPredictionTrainer, tmp_path: Path) -> None:
    model = trained.get_model(use_cache=False)
    model.gradiend.decoder_weight[3] = float("nan")
    with pytest.raises(UserError, match="not finite, so no model is written"):
        trained.save_model(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    trained.unload_model()


@pytest.mark.parametrize(("metadata", "mode"), [({}, 0o044), ({"note": "mine"}, 0)], ids=["nothing free", "free facts"])
def test_record__with_free_facts_is_for_its_owner(
    trained: TextPredictionTrainer, tmp_path: Path, metadata: dict[str, str], mode: int
) -> None:
    """Fails if what may hold a secret that does not look like one can be read by others."""
    model, record = trained.get_model(), trained.get_training_stats()
    record["training_args"]["metadata"] = metadata
    model.save_pretrained(tmp_path / "model", training=record)
    assert (tmp_path / "model" / "training.json").stat().st_mode & 0o077 == mode
