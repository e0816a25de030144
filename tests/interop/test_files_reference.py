"""Model directories go both ways: what one package wrote, the other opens, encodes and rewrites with, and saves again.

Both sides then hold the same float32 weights, so encodings and rewritten weights are compared up to a few last bits
(sums over n entries may be cut differently); everything else is compared exactly.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from safetensors.torch import load_file

gradiend = pytest.importorskip("gradiend")

from gradiend.trainer.core.cache_policy import should_reuse_training_cache  # noqa: E402
from gradiend.trainer.text.prediction.model_with_gradiend import TextPredictionModelWithGradiend  # noqa: E402
from side_by_side import (  # noqa: E402
    our_trainer,
    read,
    reference_trainer,
    rows,
    save_causal_model,
    save_masked_model,
)

import gradiend_dist  # noqa: E402
from gradiend_dist import ModelWithGradiend  # noqa: E402

PARTS = ("decoder", "decoder-weight", "decoder-bias", "decoder-sum", "encoder-weight")
ARGUMENTS: dict[str, Any] = {
    "train_batch_size": 4,
    "learning_rate": 1e-2,
    "max_steps": 8,
    "eval_steps": 4,
    "max_seeds": 2,
    "seed": 5,
    "convergent_score_threshold": 0.2,
    "convergent_mean_by_class_threshold": 0.01,
}
# How to prune, and which representations of selected weights are then in the map.
SPACES: dict[str, tuple[dict[str, Any] | None, set[str]]] = {
    "whole": (None, {"all"}),
    "sparse": ({"topk": 0.01, "n_samples": 4}, {"indices"}),
    "dense": ({"topk": 0.95, "n_samples": 8}, {"mask"}),
    "mixed": ({"topk": 0.3, "n_samples": 8}, {"all", "indices", "mask"}),
}
OURS = [("masked", mode, space) for mode in ("default", "compat") for space in SPACES]
OURS += [("causal", "default", "sparse"), ("causal", "compat", "mixed")]
THEIRS = [("masked", "whole"), ("masked", "sparse"), ("masked", "mixed"), ("causal", "mixed")]
TEXTS = [
    ("the doctor said that [MASK] would win .", "he"),
    ("the nurse said that [MASK] would walk away and sing .", "queen"),
    ("then a dog said that [MASK] would not come back to the old town .", "they"),
]


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """The reference collects garbage often, each time through all modules."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("bases")
    return {"masked": save_masked_model(root / "masked"), "causal": save_causal_model(root / "causal")}


def pruning(package: Any, name: str) -> dict[str, Any]:
    config = SPACES[name][0]
    return {} if config is None else {"pre_prune_config": package.PrePruneConfig(seed=1, **config)}


@pytest.fixture(scope="module")
def ours(bases: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], Path]:
    """Experiments that we trained, by base model, mode and space."""
    found = {}
    for base, mode, space in OURS:
        root = tmp_path_factory.mktemp(f"{base}_{mode}_{space}")
        compat = "gradiend-0.2" if mode == "compat" else None
        options = {**ARGUMENTS, **pruning(gradiend_dist, space), "compat": compat}
        if compat is None:
            options["initialization"] = "random"  # a closed form leaves the embeddings of unseen words at 0
        our_trainer(bases[base], root, rows(), {}, **options).train()
        found[base, mode, space] = root
    return found


@pytest.fixture(scope="module")
def theirs(bases: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Experiments that the reference trained, by base model and space."""
    found = {}
    for base, space in THEIRS:
        root = tmp_path_factory.mktemp(f"reference_{base}_{space}")
        options = {**ARGUMENTS, **pruning(gradiend, space), "source": "factual" if space == "whole" else "alternative"}
        reference_trainer(bases[base], root, rows(), {}, **options).train()
        found[base, space] = root
    return found


def open_both(path: Path) -> tuple[Any, ModelWithGradiend]:
    return TextPredictionModelWithGradiend.from_pretrained(str(path)), ModelWithGradiend.from_pretrained(path)


def assert_same_model(reference: Any, model: ModelWithGradiend) -> None:
    """Source, directions, selected weights; encodings of the same gradients; weights that every part rewrites."""
    assert (reference.source, reference.target) == (model.source, model.target)
    assert reference.feature_class_encoding_direction == model.feature_class_encoding_direction
    assert list(reference.gradiend.param_map) == model.gradiend.param_map
    assert (len(reference), reference.unpruned_length()) == (len(model), model.gradiend.space.full_size)
    vectors = torch.randn(3, len(model), generator=torch.Generator().manual_seed(0)) * 0.1
    expected = torch.stack([reference.encode(vector) for vector in vectors])
    encoded = torch.stack([model.encode(vector) for vector in vectors])
    largest = max(rewritten_difference(reference, model, part) for part in PARTS)
    print(f"largest differences: encodings {(encoded - expected).abs().max():.1e}, rewritten weights {largest:.1e}")
    torch.testing.assert_close(encoded, expected, rtol=1e-5, atol=1e-6)
    assert largest < 1e-7


def rewritten_difference(reference: Any, model: ModelWithGradiend, part: str) -> float:
    """Largest difference of any weight after a rewrite, which must have changed as many weights as are selected."""
    before = dict(model.base_model.named_parameters())
    one, two = (dict(m.rewrite_base_model(0.7, -1.0, part=part).named_parameters()) for m in (reference, model))
    changed = sum(int((parameter != before[name]).sum()) for name, parameter in two.items())
    assert 0.95 * len(model) < changed <= len(model), "almost no entry of a trained vector is 0"
    return max((one[name] - two[name]).detach().abs().max().item() for name in before)


def gradients(reference: Any, model: ModelWithGradiend, text: str, label: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the same word in both; the reference wants the text before the blank where a model reads no more."""
    read_there = text.split("[MASK]")[0] if reference.is_decoder_only_model else text
    return reference.create_gradients(read_there, label).reshape(-1), model.create_gradients(text, label)


# Ours, opened by the reference


@pytest.mark.parametrize("key", OURS, ids=" ".join)
def test_our_model__is_the_same_model_in_the_reference(
    key: tuple[str, str, str], ours: dict[tuple[str, str, str], Path]
) -> None:
    path = ours[key] / "model"
    reference, model = open_both(path)
    assert {entry["repr"] for entry in read(path / "config.json")["mapping"]["param_map"]} >= SPACES[key[2]][1]
    assert_same_model(reference, model)


@pytest.mark.parametrize("key", OURS, ids=" ".join)
def test_our_model__has_the_same_gradients_and_encodings_of_texts_in_the_reference(
    key: tuple[str, str, str], ours: dict[tuple[str, str, str], Path]
) -> None:
    """All but a causal model of the default mode, which asks for the word at another place than the reference."""
    reference, model = open_both(ours[key] / "model")
    same = key[:2] != ("causal", "default")
    for text, label in TEXTS:
        one, two = gradients(reference, model, text, label)
        assert torch.allclose(one, two, rtol=1e-4, atol=1e-6) == same
        if same:
            assert model.encode(text, label, return_float=True) == pytest.approx(
                reference.encode(one, return_float=True), abs=1e-5
            )


@pytest.mark.parametrize("key", OURS, ids=" ".join)
def test_our_model__saved_again_by_the_reference_is_the_same_files(
    key: tuple[str, str, str], ours: dict[tuple[str, str, str], Path], tmp_path: Path
) -> None:
    """All that is ours but the tokenizer and our own notes, which the reference does not know."""
    path = ours[key] / "model"
    TextPredictionModelWithGradiend.from_pretrained(str(path)).save_pretrained(str(tmp_path / "again"))
    names = {file.name for file in path.iterdir() if file.is_file()}
    assert {file.name for file in (tmp_path / "again").iterdir()} == names
    for name in sorted(name for name in names if name.endswith(".safetensors")):
        one, two = load_file(path / name), load_file(tmp_path / "again" / name)
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) and one[key].dtype == two[key].dtype for key in one), name
    config, again = read(path / "config.json"), read(tmp_path / "again" / "config.json")
    for part in ("format_version", "architecture", "mapping"):
        assert again[part] == config[part]
    assert config["metadata"].items() <= again["metadata"].items()
    assert read(tmp_path / "again" / "gradiend_context.json") == read(path / "gradiend_context.json")
    reread = ModelWithGradiend.from_pretrained(tmp_path / "again")
    assert reread.gradiend.space == ModelWithGradiend.from_pretrained(path).gradiend.space


@pytest.mark.parametrize("mode", ["default", "compat"])
def test_our_model__is_evaluated_by_the_reference_with_our_numbers(
    mode: str, bases: dict[str, str], ours: dict[tuple[str, str, str], Path], tmp_path: Path
) -> None:
    """Its trainer reads source and classes from our files. Class sizes differ in the default order, so words count."""
    path = ours["masked", mode, "mixed"]
    args = {**ARGUMENTS, **pruning(gradiend, "mixed")}
    trainer = reference_trainer(str(path / "model"), tmp_path / "run", rows(), {}, **args)
    result = trainer.evaluate_encoder(split="test", return_df=True)
    compat = {"compat": "gradiend-0.2"} if mode == "compat" else {}
    own = our_trainer(bases["masked"], path, rows(), {}, **{**ARGUMENTS, **pruning(gradiend_dist, "mixed"), **compat})
    expected = own.evaluate_encoder(split="test", use_cache=False)
    for name, words in expected["mean_by_target"].items():
        assert result["mean_by_target"][name].keys() == words.keys()
    if mode == "compat":
        assert result["correlation"] == pytest.approx(expected["correlation"], abs=1e-5)
        for name, words in expected["mean_by_target"].items():
            assert result["mean_by_target"][name] == pytest.approx(words, abs=1e-5)


# Our records, read by the reference


@pytest.mark.parametrize("mode", ["default", "compat"])
def test_our_record__is_read_by_the_reference(mode: str, ours: dict[tuple[str, str, str], Path]) -> None:
    path = ours["masked", mode, "whole"] / "model"
    stats, record = gradiend.load_training_stats(str(path)), read(path / "training.json")
    assert stats["losses"] == record["losses"] and len(stats["losses"]) == 8
    assert stats["best_score_checkpoint"] == record["best_score_checkpoint"]
    for name in ("scores", "mean_by_class", "mean_by_feature_class", "encoder_norms"):
        expected = record["training_stats"][name]
        assert [int(step) for step in stats["training_stats"][name]] == [int(step) for step in expected]
    assert list(stats["training_stats"]["scores"].values()) == list(record["training_stats"]["scores"].values())
    assert stats["abs_mean_by_type"]["training"] > 0


@pytest.mark.parametrize("mode", ["default", "compat"])
def test_our_record__is_drawn_by_the_reference(
    mode: str, ours: dict[tuple[str, str, str], Path], tmp_path: Path
) -> None:
    """The convergence plot of a finished experiment of ours: our scores and the names of our classes."""
    path = ours["masked", mode, "whole"] / "model"
    trainer = reference_trainer(str(path), tmp_path / "run", rows(), {}, **ARGUMENTS)
    del trainer.plot_training_convergence  # the real one
    figure, axes = trainer.plot_training_convergence(show=False, class_spread="iqr", return_fig_ax=True)
    lines = [[float(y) for y in line.get_ydata()] for axis in axes for line in axis.get_lines()]
    assert list(read(path / "training.json")["training_stats"]["scores"].values()) in lines
    labels = [label for axis in axes for label in axis.get_legend_handles_labels()[1]]
    assert {"M", "F"} <= set(labels)
    assert len([axis for axis in axes if axis.collections]) > 0, "no bands"
    plt.close(figure)


@pytest.mark.parametrize("key", [key for key in OURS if key[0] == "masked"], ids=" ".join)
@pytest.mark.parametrize("use_cache", [True, "only_convergent", "always"])
def test_our_experiment__is_reused_by_the_reference(
    use_cache: bool | str, key: tuple[str, str, str], bases: dict[str, str], ours: dict[tuple[str, str, str], Path]
) -> None:
    """A run of the reference with our arguments takes our result, also if only a converged one will do."""
    root = ours[key]
    info = read(root / "model" / "training.json")["convergence_info"]
    args = {**ARGUMENTS, **pruning(gradiend, key[2]), "use_cache": use_cache}
    trainer = reference_trainer(bases["masked"], root, rows(), {}, **args)
    before = (root / "model" / "model.safetensors").read_bytes()
    reused = should_reuse_training_cache(
        use_cache, str(root / "model"), min_convergent_seeds=1, training_args=trainer.training_args
    )
    assert reused == (use_cache != "only_convergent" or info["converged"])
    if reused:
        trainer.train()
        assert trainer._last_train_used_cache
        assert (root / "model" / "model.safetensors").read_bytes() == before
        assert trainer.get_seed_report()["seeds_tried"] == read(root / "seeds" / "seed_report.json")["seeds_tried"]


def test_our_experiment__is_not_reused_by_the_reference_for_other_arguments(
    bases: dict[str, str], ours: dict[tuple[str, str, str], Path]
) -> None:
    root = ours["masked", "default", "mixed"]
    for change in ({"source": "factual"}, {"pre_prune_config": gradiend.PrePruneConfig(topk=0.29, seed=1)}):
        args = {**ARGUMENTS, **pruning(gradiend, "mixed"), **change}
        trainer = reference_trainer(bases["masked"], root, rows(), {}, **args)
        assert not should_reuse_training_cache(
            True, str(root / "model"), min_convergent_seeds=1, training_args=trainer.training_args
        )


# Theirs, opened here


@pytest.mark.parametrize("key", THEIRS, ids=" ".join)
def test_their_model__is_the_same_model_here(key: tuple[str, str], theirs: dict[tuple[str, str], Path]) -> None:
    reference, model = open_both(theirs[key] / "model")
    assert_same_model(reference, model)
    for text, label in TEXTS:
        one, two = gradients(reference, model, text, label)
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("key", THEIRS, ids=" ".join)
def test_their_model__saved_again_here_is_the_same_files(
    key: tuple[str, str], theirs: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    path = theirs[key] / "model"
    ModelWithGradiend.from_pretrained(path).save_pretrained(tmp_path / "again")
    config, again = read(path / "config.json"), read(tmp_path / "again" / "config.json")
    assert (again["architecture"], again["mapping"]) == (config["architecture"], config["mapping"])
    for name in ("model.safetensors", *(config["mapping"][k] for k in config["mapping"] if k.endswith("_file"))):
        one, two = load_file(path / name), load_file(tmp_path / "again" / name)
        assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    assert read(tmp_path / "again" / "gradiend_context.json") == read(path / "gradiend_context.json")


@pytest.mark.parametrize("key", [("masked", "mixed"), ("causal", "mixed")], ids=" ".join)
def test_their_model__is_evaluated_here_with_their_numbers(
    key: tuple[str, str], bases: dict[str, str], theirs: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    args = {**ARGUMENTS, **pruning(gradiend, "mixed")}
    trainer = reference_trainer(bases[key[0]], theirs[key], rows(), {}, **args, use_cache="always")
    expected = trainer.train().evaluate_encoder(split="test", use_cache=False)
    own = our_trainer(str(theirs[key] / "model"), tmp_path / "run", rows(), {}, compat="gradiend-0.2")
    result = own.evaluate_encoder(split="test")
    assert result["correlation"] == pytest.approx(expected["correlation"], abs=1e-5)
    for name, words in expected["mean_by_target"].items():
        assert result["mean_by_target"][name] == pytest.approx(words, abs=1e-5)
    json.dumps(result)


def test_manual_inversion__keeps_the_directions_true(ours: dict[tuple[str, str, str], Path]) -> None:
    """As in the reference: an inverted model says so; its directions would otherwise point to the wrong class."""
    reference, model = open_both(ours["masked", "default", "sparse"] / "model")
    reference.invert_encoding()
    model.invert_encoding()
    assert model.feature_class_encoding_direction == reference.feature_class_encoding_direction == {"M": -1, "F": 1}
