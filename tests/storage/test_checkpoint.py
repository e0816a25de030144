"""Model directories: what is saved is what is loaded, byte for byte; and damage is named, not computed with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from gradiend_dist.errors import UserError
from gradiend_dist.model_with_gradiend import ModelWithGradiend, create_model_with_gradiend
from gradiend_dist.storage import model_dir as checkpoint
from gradiend_dist.storage.model_dir import is_model_directory, load_gradiend

TEXT = "the man said [MASK] left"


@pytest.fixture(scope="module")
def base_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"), "bert")


def save_base(path: Path, family: str, seed: int = 0) -> Path:
    tokenizer = tiny.wordpiece_tokenizer() if family == "bert" else tiny.byte_level_tokenizer()
    tiny.base_model(family, len(tokenizer), seed=seed).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


# By weight: complete, sparse, dense, without any entry, and a mixture of them all.
SELECTIONS: dict[str, Callable[[int], torch.Tensor | None]] = {
    "all": lambda _: None,
    "indices": lambda size: torch.arange(1, size, 97),
    "mask": lambda size: torch.arange(0, size, 2),
    "mixed": lambda size: torch.cat([torch.arange(0, 492), torch.arange(500, 900, 3), torch.arange(900, size, 61)]),
    "one entry": lambda size: torch.tensor([size - 1]),
}


def make_model(base_path: Path, selection: str = "indices", **options: Any) -> ModelWithGradiend:
    model = create_model_with_gradiend(str(base_path), seed=4, **options)
    keep = SELECTIONS[selection](len(model))
    if keep is not None:
        model.gradiend.keep_entries(keep)
    return model


def files_of(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def change_config(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


# --- round trips


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("latent_dim", [1, 2])
def test_save_and_load__give_the_same_model_and_the_same_bytes(base_path, tmp_path, selection, latent_dim):
    options = {"latent_dim": latent_dim, "activation_encoder": "smht", "activation_decoder": "elu"}
    model = make_model(base_path, selection, **options)
    model.feature_class_encoding_direction = {"M": 1, "F": -1}
    model.save_pretrained(tmp_path / "one", training={"training_args": {"source": "alternative"}, "losses": [0.5]})
    loaded = ModelWithGradiend.from_pretrained(tmp_path / "one")

    assert loaded.gradiend.space == model.gradiend.space
    assert loaded.gradiend.architecture() == model.gradiend.architecture()
    ours, theirs = model.gradiend.state_dict(), loaded.gradiend.state_dict()
    assert list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (loaded.source, loaded.target) == ("alternative", "diff")
    assert loaded.feature_class_encoding_direction == {"M": 1, "F": -1}
    assert torch.equal(loaded.encode(TEXT, "he"), model.encode(TEXT, "he"))
    with torch.no_grad():
        for a, b in zip(
            model.rewrite_base_model(0.1).parameters(), loaded.rewrite_base_model(0.1).parameters(), strict=True
        ):
            assert torch.equal(a, b)

    loaded.save_pretrained(tmp_path / "two", training=json.loads((tmp_path / "one" / "training.json").read_text()))
    assert files_of(tmp_path / "two") == files_of(tmp_path / "one")


@pytest.mark.parametrize(
    ("selection", "kinds", "files"),
    [
        ("all", {"all"}, []),
        ("indices", {"indices", "all"}, ["mapping_indices.safetensors"]),
        ("mask", {"mask", "all"}, ["mapping_masks.safetensors"]),
        ("mixed", {"all", "indices", "mask"}, ["mapping_indices.safetensors", "mapping_masks.safetensors"]),
        ("one entry", {"indices"}, ["mapping_indices.safetensors"]),
    ],
)
def test_save__the_map_is_in_the_references_format(base_path, tmp_path, selection, kinds, files):
    """Fails if an entry, a key, a type or a shape is not what the reference reads."""
    model = make_model(base_path, selection)
    space = model.gradiend.space
    model.save_pretrained(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    mapping = config["mapping"]
    assert {entry["repr"] for entry in mapping["param_map"]} <= kinds
    assert [w.name for w in space.weights] == [entry["name"] for entry in mapping["param_map"]]
    assert sorted(path.name for path in (tmp_path / "m").glob("mapping*")) == files
    stored = {
        kind: load_file(tmp_path / "m" / mapping[key]) if key in mapping else {}
        for kind, key in (("indices", "indices_file"), ("mask", "masks_file"))
    }
    for number, (weight, entry) in enumerate(zip(space.weights, mapping["param_map"], strict=True)):
        assert entry["shape"] == list(weight.shape) and entry["num_selected"] == weight.num_selected
        assert ("key" in entry) == (entry["repr"] != "all") and entry.get("key", f"L{number}") == f"L{number}"
        if entry["repr"] == "indices":
            tensor = stored["indices"].pop(entry["key"])
            assert tensor.dtype == torch.int32 and tensor.tolist() == weight.flat_indices().tolist()
        elif entry["repr"] == "mask":
            tensor = stored["mask"].pop(entry["key"])
            assert tensor.dtype == torch.uint8 and tuple(tensor.shape) == weight.shape
            assert tensor.reshape(-1).nonzero().squeeze(1).tolist() == weight.flat_indices().tolist()
    assert not stored["indices"] and not stored["mask"], "nothing else is stored"
    present = {entry["repr"] for entry in mapping["param_map"]}
    assert mapping["mode"] == (present.pop() if len(present) == 1 else "mixed")
    assert config["architecture"]["input_dim"] == space.size and config["format_version"] == 0
    assert set(config["metadata"]) == {"base_model", "prediction_objective"}
    assert json.loads((tmp_path / "m" / "gradiend_context.json").read_text()) == {
        "source": "alternative",
        "target": "diff",
    }


@tiny.without_onednn()
def test_save_and_load__keep_bfloat16(base_path, tmp_path):
    model = make_model(base_path)
    model.gradiend.to(torch.bfloat16)
    model.save_pretrained(tmp_path / "m")
    assert {t.dtype for t in load_file(tmp_path / "m" / "model.safetensors").values()} == {torch.bfloat16}
    loaded = ModelWithGradiend.from_pretrained(tmp_path / "m")
    assert loaded.gradiend.torch_dtype == torch.bfloat16
    assert all(
        torch.equal(a, b) for a, b in zip(model.gradiend.parameters(), loaded.gradiend.parameters(), strict=True)
    )
    assert torch.equal(loaded.encode(TEXT, "he"), model.encode(TEXT, "he"))


@pytest.mark.parametrize("early", [True, False])
def test_save_and_load__keep_how_a_causal_model_is_asked(tmp_path, early):
    base = save_base(tmp_path / "base", "gpt2")
    model = make_model(base, reference_labels=early, mask_placeholder="<blank>", max_length=9)
    text = "the doctor and the nurse and the man said <blank> left"
    model.save_pretrained(tmp_path / "m")
    loaded = ModelWithGradiend.from_pretrained(tmp_path / "m")
    assert vars(loaded.objective).keys() == vars(model.objective).keys()
    assert loaded.objective.cloze(text, "he") == model.objective.cloze(text, "he")
    assert torch.equal(loaded.encode(text, "he"), model.encode(text, "he"))
    # A directory of the reference does not say: it was trained with the early label.
    change_config(tmp_path / "m", lambda config: config.pop("gradiend_dist"))
    foreign = ModelWithGradiend.from_pretrained(tmp_path / "m")
    assert foreign.objective.as_reference and foreign.objective.max_length == 40


def test_save_and_load__keep_the_tokenizer_and_use_it(base_path, tmp_path):
    """Fails if the base model's own tokenizer is used although another was trained with."""
    model = make_model(base_path)
    model.tokenizer.add_tokens(["zebra"])
    model.tokenizer.add_special_tokens({"additional_special_tokens": ["<x>"]})
    model.save_pretrained(tmp_path / "m")
    loaded = ModelWithGradiend.from_pretrained(tmp_path / "m")
    assert loaded.tokenizer.get_vocab() == model.tokenizer.get_vocab()
    assert loaded.tokenizer("a zebra <x> .")["input_ids"] == model.tokenizer("a zebra <x> .")["input_ids"]
    given = tiny.wordpiece_tokenizer()
    assert ModelWithGradiend.from_pretrained(tmp_path / "m", tokenizer=given).tokenizer is given
    model.save_pretrained(tmp_path / "bare", with_tokenizer=False)
    assert not (tmp_path / "bare" / "tokenizer").exists()
    assert "zebra" not in ModelWithGradiend.from_pretrained(tmp_path / "bare").tokenizer.get_vocab()


def test_load__takes_a_loaded_base_model_with_the_saved_tokenizer(base_path, tmp_path):
    model = make_model(base_path)
    model.save_pretrained(tmp_path / "m")
    loaded = ModelWithGradiend.from_pretrained(tmp_path / "m", base_model=model.base_model)
    assert loaded.base_model is model.base_model
    assert torch.equal(loaded.encode(TEXT, "he"), model.encode(TEXT, "he"))
    model.save_pretrained(tmp_path / "bare", with_tokenizer=False)
    with pytest.raises(UserError, match="pass tokenizer="):
        ModelWithGradiend.from_pretrained(tmp_path / "bare", base_model=model.base_model)


def test_load__training_json_outranks_the_context(base_path, tmp_path):
    model = make_model(base_path, source="factual", target="alternative")
    model.save_pretrained(tmp_path / "m", training={"training_args": {"source": "diff"}})
    loaded = ModelWithGradiend.from_pretrained(tmp_path / "m")
    assert (loaded.source, loaded.target) == ("diff", "alternative")
    (tmp_path / "m" / "training.json").unlink()
    loaded = ModelWithGradiend.from_pretrained(tmp_path / "m")
    assert (loaded.source, loaded.target) == ("factual", "alternative")
    (tmp_path / "m" / "gradiend_context.json").unlink()
    loaded = ModelWithGradiend.from_pretrained(tmp_path / "m")
    assert (loaded.source, loaded.target) == ("factual", "diff")


def test_load__needs_little_of_a_foreign_directory(base_path, tmp_path):
    """What the reference itself needs, and nothing more; weights may be one level below or in torch's format."""
    model = make_model(base_path)
    model.save_pretrained(tmp_path / "m", with_tokenizer=False)

    def strip(config: dict[str, Any]) -> None:
        del config["format_version"], config["gradiend_dist"], config["mapping"]["mode"]
        config["architecture"] = {"input_dim": len(model), "torch_dtype": "torch.float32"}
        config["metadata"] = {"base_model": str(base_path), "is_training": False}
        for entry in config["mapping"]["param_map"]:
            del entry["num_selected"]

    change_config(tmp_path / "m", strip)
    (tmp_path / "m" / "model").mkdir()
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    torch.save(tensors, tmp_path / "m" / "model" / "pytorch_model.bin")
    (tmp_path / "m" / "model.safetensors").unlink()
    loaded = ModelWithGradiend.from_pretrained(tmp_path / "m")
    assert torch.equal(loaded.encode(TEXT, "he"), model.encode(TEXT, "he"))


def test_load__of_a_plain_base_model_makes_a_new_one(base_path):
    model = ModelWithGradiend.from_pretrained(base_path, seed=4, latent_dim=2)
    expected = make_model(base_path, "all", latent_dim=2)
    assert all(
        torch.equal(a, b) for a, b in zip(model.gradiend.parameters(), expected.gradiend.parameters(), strict=True)
    )
    assert not is_model_directory(base_path) and not is_model_directory(base_path / "nowhere")


# --- whole or not at all


@pytest.mark.parametrize("failing", ["write_weights", "save_file", "write_json", "_save_tokenizer", "_save_mapping"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["disk", "Ctrl-C"])
def test_save__a_failure_in_the_middle_leaves_the_old_directory_complete(
    base_path, tmp_path, failing, error, monkeypatch
):
    """Fails if the old model is touched before the new one is complete, or if a part of the new one is left."""
    old, new = make_model(base_path), make_model(base_path, "mask")
    old.save_pretrained(tmp_path / "m", training={"losses": [1.0]})
    before = files_of(tmp_path)
    plain, calls = getattr(checkpoint, failing), []

    def fail(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == (2 if failing == "write_json" else 1):
            raise error
        return plain(*args, **options)

    monkeypatch.setattr(checkpoint, failing, fail)
    expected = UserError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        new.save_pretrained(tmp_path / "m", training={"losses": [2.0]})
    assert files_of(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    monkeypatch.undo()
    assert ModelWithGradiend.from_pretrained(tmp_path / "m").gradiend.space == old.gradiend.space


def test_save__replaces_a_model_with_all_its_files(base_path, tmp_path):
    """Fails if the map of the old model survives beside a model that has none."""
    make_model(base_path, "mixed").save_pretrained(tmp_path / "m", training={"losses": []})
    make_model(base_path, "all").save_pretrained(tmp_path / "m", with_tokenizer=False)
    assert sorted(files_of(tmp_path / "m")) == ["config.json", "gradiend_context.json", "model.safetensors"]


def test_save__never_replaces_what_is_not_a_model(base_path, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="holds something else"):
        make_model(base_path).save_pretrained(tmp_path / "precious")
    assert files_of(tmp_path) == {"precious/thesis.txt": b"years of work"}


# --- damage


def truncate(name: str, size: int) -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:size])


def remove(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def configure(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda path: change_config(path, change)


def retensor(name: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        tensors = load_file(path / name)
        change(tensors)
        save_file(tensors, path / name)

    return damage


def entry(config: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(e for e in config["mapping"]["param_map"] if e["repr"] == kind and e["num_selected"] > 3)


def first_indices(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return next(tensor for tensor in tensors.values() if tensor.numel() > 3)


INDICES, MASKS, WEIGHTS = "mapping_indices.safetensors", "mapping_masks.safetensors", "model.safetensors"

DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "weights truncated": (truncate(WEIGHTS, 500), "model.safetensors cannot be read"),
    "weights cut in the header": (truncate(WEIGHTS, 11), "model.safetensors cannot be read"),
    "weights empty": (truncate(WEIGHTS, 0), "model.safetensors cannot be read"),
    "weights missing": (remove(WEIGHTS), "holds no model.safetensors"),
    "weight renamed": (
        retensor(WEIGHTS, lambda t: t.update(x=t.pop("encoder.0.linear.bias"))),
        "does not fit config.json",
    ),
    "weight of another size": (
        retensor(WEIGHTS, lambda t: t.update({"decoder.0.linear.bias": torch.zeros(3)})),
        "does not fit config.json",
    ),
    "indices truncated": (truncate(INDICES, 300), "mapping_indices.safetensors cannot be read"),
    "indices missing": (remove(INDICES), "mapping_indices.safetensors cannot be read"),
    "masks missing": (remove(MASKS), "mapping_masks.safetensors cannot be read"),
    "indices not named": (configure(lambda c: c["mapping"].pop("indices_file")), "lacks 'indices_file'"),
    "masks not named": (configure(lambda c: c["mapping"].pop("masks_file")), "lacks 'masks_file'"),
    "key missing in the file": (
        retensor(INDICES, lambda t: t.pop(sorted(t)[0])),
        "lacks 'L",
    ),
    "key missing in the map": (configure(lambda c: entry(c, "mask").pop("key")), "lacks 'key'"),
    "name missing in the map": (configure(lambda c: entry(c, "indices").pop("name")), "lacks 'name'"),
    "map missing": (configure(lambda c: c["mapping"].pop("param_map")), "lacks 'param_map'"),
    "mapping missing": (configure(lambda c: c.pop("mapping")), "no architecture and mapping"),
    "index too large": (
        retensor(INDICES, lambda t: first_indices(t)[-1:].fill_(10**6)),
        "points outside the weight",
    ),
    "index negative": (retensor(INDICES, lambda t: first_indices(t)[:1].fill_(-1)), "points outside the weight"),
    "index too large in the middle": (
        retensor(INDICES, lambda t: first_indices(t)[1:2].fill_(10**6)),
        "not ascending",
    ),
    "indices twice": (
        retensor(INDICES, lambda t: first_indices(t)[1:2].copy_(first_indices(t)[:1])),
        "not ascending",
    ),
    "indices unsorted": (
        retensor(INDICES, lambda t: first_indices(t)[:2].copy_(first_indices(t)[:2].flip(0))),
        "not ascending",
    ),
    "indices outside the directory": (
        configure(lambda c: c["mapping"].update(indices_file="../other/" + INDICES)),
        "outside its directory: do not trust it",
    ),
    "indices at an absolute path": (
        configure(lambda c: c["mapping"].update(indices_file="/etc/passwd")),
        "outside its directory: do not trust it",
    ),
    "masks outside the directory": (
        configure(lambda c: c["mapping"].update(masks_file="../../" + MASKS)),
        "outside its directory: do not trust it",
    ),
    "input_dim wrong": (configure(lambda c: c["architecture"].update(input_dim=5)), "says input_dim=5 but maps"),
    "input_dim missing": (configure(lambda c: c["architecture"].pop("input_dim")), "lacks 'input_dim'"),
    "a weight left out": (configure(lambda c: c["mapping"]["param_map"].remove(entry(c, "mask"))), "but maps"),
    "base model not named": (configure(lambda c: c["metadata"].pop("base_model")), "does not name its base model"),
    "base model gone": (configure(lambda c: c["metadata"].update(base_model="/nowhere/at/all")), "/nowhere/at/all"),
    "config truncated": (truncate("config.json", 100), "config.json is no valid JSON"),
    "context without source": (
        lambda path: (path / "gradiend_context.json").write_text('{"source": "sideways", "target": "diff"}'),
        "source='sideways'",
    ),
    "trained with the reference's constant encoder": (
        retensor(WEIGHTS, lambda t: t.update({"encoder.1.weight": torch.ones(1)})),
        "activation_encoder=id",
    ),
}


@pytest.fixture(scope="module")
def sound(base_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("sound") / "m"
    make_model(base_path, "mixed").save_pretrained(path, with_tokenizer=False)
    return files_of(path)


@pytest.mark.parametrize("damage", DAMAGE)
def test_load__names_the_damage(sound, tmp_path, damage):
    """Fails by a traceback of another kind, or by a model that was loaded from what is not one."""
    path = tmp_path / "m"
    path.mkdir()
    for name, data in sound.items():
        (path / name).write_bytes(data)
    ModelWithGradiend.from_pretrained(path)
    do, message = DAMAGE[damage]
    do(path)
    with pytest.raises(UserError, match=message) as caught:
        ModelWithGradiend.from_pretrained(path)
    assert "\n" not in str(caught.value)


def test_load__names_a_base_model_that_does_not_fit(base_path, tmp_path):
    make_model(base_path).save_pretrained(tmp_path / "m")
    other = save_base(tmp_path / "gpt2", "gpt2")
    with pytest.raises(UserError, match="pass the base model that it was trained on"):
        ModelWithGradiend.from_pretrained(tmp_path / "m", base_model=str(other))


def test_load__names_an_option_it_does_not_take(base_path, tmp_path):
    make_model(base_path).save_pretrained(tmp_path / "m")
    with pytest.raises(UserError, match="does not take latent_dim"):
        ModelWithGradiend.from_pretrained(tmp_path / "m", latent_dim=2)


def test_load_gradiend__needs_no_base_model(base_path, tmp_path):
    model = make_model(base_path)
    model.save_pretrained(tmp_path / "m")
    change_config(tmp_path / "m", lambda config: config["metadata"].update(base_model="/nowhere/at/all"))
    loaded = load_gradiend(tmp_path / "m")
    assert loaded.space == model.gradiend.space
    assert loaded.get_topk_weights(topk=9) == model.get_topk_weights(topk=9)
