"""The embedded example must be what its users take for granted: models that know the word, and data without leaks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from gradiend_dist import demo
from gradiend_dist.errors import UserError

LABELS = {"M": "he", "F": "she", "N": "they"}
WEIGHTS = "model.safetensors"

builders = pytest.mark.parametrize("build", [demo.build_masked_lm, demo.build_causal_lm])


def held_out(frame: pd.DataFrame) -> tuple[list[str], str]:
    """Templates of the test rows and their one label."""
    rows = frame[frame["split"] == "test"]
    (label,) = rows["label"].unique()
    return list(rows["masked"]), label


def masked_accuracy(directory: Path, templates: list[str], label: str) -> float:
    """Share of the rows in which each piece of the label is the likeliest of the whole vocabulary at its mask."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForMaskedLM.from_pretrained(directory).eval()
    ids = tokenizer(label, add_special_tokens=False)["input_ids"]
    texts = [template.replace("[MASK]", " ".join(["[MASK]"] * len(ids))) for template in templates]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        best = model(**batch).logits.argmax(-1)
    guesses = best[batch["input_ids"] == tokenizer.mask_token_id].view(len(texts), len(ids))
    return (guesses == torch.tensor(ids)).all(1).float().mean().item()


def causal_accuracy(directory: Path, templates: list[str], label: str) -> float:
    """Share of the rows in which the label's first piece is the likeliest of the whole vocabulary after its prefix."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    first_id = tokenizer(f" {label}")["input_ids"][0]
    batch = tokenizer([template.split(" [MASK]")[0] for template in templates], padding=True, return_tensors="pt")
    with torch.no_grad():
        best = model(**batch).logits.argmax(-1)
    guesses = best.gather(1, batch["attention_mask"].sum(1, keepdim=True) - 1)
    return (guesses == first_id).float().mean().item()


def word_count(template: str) -> int:
    """Number of words, with the mask as one and the full stop as one."""
    return len(re.findall(r"\[MASK\]|\w+|\.", template))


# Models


@pytest.mark.parametrize("name", list(LABELS))
def test_masked_lm__knows_pronoun_of_test_sentences(
    masked_lm: Path, feature_frames: dict[str, pd.DataFrame], name: str
) -> None:
    """Fails when pre-training stops before the model has learnt to look at the subject: then it guesses, at a third."""
    assert masked_accuracy(masked_lm, *held_out(feature_frames[name])) > 0.95


@pytest.mark.parametrize("name", list(LABELS))
def test_causal_lm__knows_pronoun_of_test_sentences(
    causal_lm: Path, feature_frames: dict[str, pd.DataFrame], name: str
) -> None:
    assert causal_accuracy(causal_lm, *held_out(feature_frames[name])) > 0.9


@pytest.mark.parametrize("name", ["M", "F"])
def test_masked_lm__knows_all_pieces_of_reflexives(masked_lm: Path, name: str) -> None:
    assert masked_accuracy(masked_lm, *held_out(demo.reflexive_data()[name])) > 0.9


def test_masked_lm__subject_alone_decides(masked_lm: Path) -> None:
    """One new sentence, three subjects. Fails for a model that knows sentences by heart."""
    for subject, label in {"Mary": "she", "The king": "he", "The twins": "they"}.items():
        assert masked_accuracy(masked_lm, [f"{subject} knew that [MASK] had lost the train."], label) == 1


@builders
def test_builders__size_and_positions(build: Callable[..., Path], tmp_path: Path) -> None:
    """256 positions are what the reference package pads to; the size is what tests of n rely on."""
    directory = build(tmp_path, steps=1)
    auto = AutoModelForMaskedLM if build is demo.build_masked_lm else AutoModelForCausalLM
    model = auto.from_pretrained(directory)
    assert 100_000 <= sum(p.numel() for p in model.base_model.parameters()) <= 400_000
    assert model.config.max_position_embeddings >= 256
    assert len(AutoTokenizer.from_pretrained(directory)) == model.config.vocab_size


@builders
def test_builders__same_seed_same_bytes(build: Callable[..., Path], tmp_path: Path) -> None:
    """Fails when anything draws from a random state that is not seeded, or depends on the order of a set."""
    built = []
    for name, seed in (("first", 5), ("again", 5), ("other", 6)):
        torch.rand(1)  # the caller's random state moves on between the calls and must not matter
        built.append(build(tmp_path / name, seed=seed, steps=3))
    first, again, other = built
    assert (first / WEIGHTS).read_bytes() == (again / WEIGHTS).read_bytes()
    assert (first / "tokenizer.json").read_bytes() == (again / "tokenizer.json").read_bytes()
    assert (first / WEIGHTS).read_bytes() != (other / WEIGHTS).read_bytes()


@builders
def test_builders__leave_random_state_of_caller(build: Callable[..., Path], tmp_path: Path) -> None:
    before = torch.get_rng_state()
    build(tmp_path, steps=2)
    assert torch.equal(torch.get_rng_state(), before)


@builders
@pytest.mark.parametrize("wrong", [{"hidden_size": 30}, {"hidden_size": 0}, {"num_layers": 0}, {"steps": 0}])
def test_builders__wrong_size_is_named(build: Callable[..., Path], wrong: dict[str, int], tmp_path: Path) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(UserError, match=f"{name} is {value}: choose"):
        build(tmp_path, **wrong)


# Tokenizers


def test_masked_tokenizer__knows_all_words_and_cuts_reflexives(masked_lm: Path) -> None:
    """himself and herself must differ in length: then the factual and the alternative input do."""
    tokenizer = AutoTokenizer.from_pretrained(masked_lm)
    assert tokenizer.tokenize("Himself") == ["him", "##self"]
    assert tokenizer.tokenize("Herself") == ["hers", "##el", "##f"]
    assert tokenizer.tokenize("Themselves") == ["them", "##selves"]
    templates = [text for frame in demo.feature_data().values() for text in frame["masked"]]
    templates += [text for frame in demo.reflexive_data().values() for text in frame["masked"]]
    for text in templates + list(demo.neutral_data()["text"]):
        assert len(tokenizer.tokenize(text)) == word_count(text), text


def test_causal_tokenizer__marks_word_starts(causal_lm: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(causal_lm)
    assert tokenizer.tokenize("Mary knew she would win") == ["Mary", "Ġknew", "Ġshe", "Ġwould", "Ġwin"]
    for label in LABELS.values():
        assert {label, f"Ġ{label}"} <= set(tokenizer.get_vocab())
    for label in ("himself", "herself"):
        assert len(tokenizer.tokenize(f" {label}")) > 1
    assert tokenizer.decode(tokenizer("Zoë naïvely said 7.")["input_ids"]) == "Zoë naïvely said 7."


# Data


def test_feature_data__columns_classes_and_splits(feature_frames: dict[str, pd.DataFrame]) -> None:
    assert list(feature_frames) == ["M", "F", "N"]
    for name, frame in feature_frames.items():
        assert list(frame.columns) == ["masked", "label", "split"]
        assert set(frame["label"]) == {LABELS[name]}
        assert frame["split"].value_counts().to_dict() == {"train": 240, "validation": 80, "test": 80}
        assert frame["masked"].is_unique
        assert (frame["masked"].str.count(re.escape("[MASK]")) == 1).all()
        assert frame["masked"].map(word_count).between(6, 20).all()


def test_feature_data__odd_number_of_rows_is_kept() -> None:
    for frame in demo.feature_data(rows_per_class=13).values():
        assert frame["split"].value_counts().to_dict() == {"train": 9, "validation": 2, "test": 2}


def test_feature_data__depends_on_seed_only() -> None:
    first, again, other = (demo.feature_data(seed)["F"] for seed in (3, 3, 4))
    pd.testing.assert_frame_equal(first, again)
    assert set(first["masked"]) != set(other["masked"])


def test_feature_data__subject_stands_before_pronoun(feature_frames: dict[str, pd.DataFrame]) -> None:
    """Else a causal model could not know the pronoun."""
    for name, frame in feature_frames.items():
        for template in frame["masked"]:
            prefix = template.split("[MASK]")[0].lower()
            assert any(f"{subject.lower()} " in prefix for subject in demo.SUBJECTS[name]), template


def test_feature_data__text_around_pronoun_does_not_tell_class() -> None:
    """With the subject cut out, the sentences of all classes come from the same set: no leak by agreement."""
    without_subject = {}
    for name, frame in demo.feature_data(rows_per_class=5000).items():
        subjects = "|".join(sorted(demo.SUBJECTS[name], key=len, reverse=True))
        rest = frame["masked"].str.replace(rf"\b({subjects})\b", "_", regex=True, case=False)
        without_subject[name] = {word for text in rest for word in text.lower().rstrip(".").split()}
    assert without_subject["M"] == without_subject["F"] == without_subject["N"]


@pytest.mark.parametrize("data", [demo.feature_data, demo.reflexive_data])
def test_data__subjects_and_endings_are_held_out_between_splits(
    data: Callable[..., dict[str, pd.DataFrame]],
) -> None:
    """Fails when a name or an ending of the training rows comes back in validation or test."""
    for name, frame in data(rows_per_class=1000).items():
        subjects, endings = [], []
        for split in ("train", "validation", "test"):
            rows = frame[frame["split"] == split]["masked"]
            subjects.append({s for s in demo.SUBJECTS[name] for text in rows if f"{s.lower()} " in text.lower()})
            endings.append({text.split("[MASK]")[1] for text in rows})
        assert not subjects[0] & subjects[1] | subjects[0] & subjects[2] | subjects[1] & subjects[2]
        assert not endings[0] & endings[1] | endings[0] & endings[2] | endings[1] & endings[2]


def test_pretraining_text__has_no_held_out_sentence_but_all_words() -> None:
    """Fails when the models could know the test sentences by heart, or had to read a word for the first time there."""
    seen = set(demo._pretraining_text(0))
    words = {word for text in seen for word in text.lower().rstrip(".").split()}
    families = [*demo.feature_data(1, 5000).values(), *demo.reflexive_data(1, 2000, ("M", "F", "N")).values()]
    for frame in families:
        rows = frame[frame["split"] != "train"]
        texts = {text.replace("[MASK]", label) for text, label in zip(rows["masked"], rows["label"], strict=True)}
        assert not texts & seen
        assert {word for text in texts for word in text.lower().rstrip(".").split()} <= words
    assert not set(demo.neutral_data(1)["text"]) & seen


def test_neutral_data__names_nobody() -> None:
    """A neutral sentence with a pronoun or a gendered word would count as signal in the evaluation."""
    frame = demo.neutral_data()
    assert list(frame.columns) == ["text"]
    assert len(frame) == 300
    assert frame["text"].is_unique
    assert frame["text"].map(word_count).between(5, 20).all()
    people = {subject.lower().removeprefix("the ") for subjects in demo.SUBJECTS.values() for subject in subjects}
    gendered = people | set(LABELS.values()) | set(demo.REFLEXIVES.words.values())
    for text in frame["text"]:
        assert not gendered & set(re.findall(r"\w+", text.lower())), text
        assert "[MASK]" not in text


def test_reflexive_data__gives_the_classes_asked_for() -> None:
    assert {name: set(frame["label"]) for name, frame in demo.reflexive_data().items()} == {
        "M": {"himself"},
        "F": {"herself"},
    }
    assert list(demo.reflexive_data(classes=("N", "M"))) == ["N", "M"]


def test_data__wrong_argument_is_named() -> None:
    with pytest.raises(UserError, match="rows_per_class is 4: at least 5"):
        demo.feature_data(rows_per_class=4)
    with pytest.raises(UserError, match="rows_per_class asks for 10000 validation rows where only 4800 exist"):
        demo.feature_data(rows_per_class=50_000)
    with pytest.raises(UserError, match="classes names 'X': choose from M, F, N"):
        demo.reflexive_data(classes=("M", "X"))


# The whole example


@pytest.mark.parametrize(("kind", "model"), [("masked", "base_model"), ("causal", "base_model_causal")])
def test_main__writes_a_complete_example(
    kind: demo.Kind, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when run.yaml names a file that is not there, also when it is read from another directory."""
    monkeypatch.setitem(demo.PRETRAIN_STEPS, kind, 2)
    monkeypatch.chdir(tmp_path)
    assert demo.main(["out", "--kind", kind, "--seed", "3"]) == 0
    monkeypatch.chdir("/")
    settings = yaml.safe_load((tmp_path / "out" / "run.yaml").read_text())
    assert Path(settings["model"]) == tmp_path / "out" / model
    assert (Path(settings["model"]) / WEIGHTS).is_file()
    assert settings["seed"] == 3
    assert sorted(path.name for path in Path(settings["data"]).iterdir()) == ["F.csv", "M.csv", "N.csv"]
    for name, frame in demo.feature_data(3).items():
        pd.testing.assert_frame_equal(pd.read_csv(Path(settings["data"]) / f"{name}.csv"), frame)
    pd.testing.assert_frame_equal(pd.read_csv(settings["eval_neutral_data"]), demo.neutral_data(3))
    assert not Path(settings["experiment_dir"]).exists()


def test_run__fits_the_data() -> None:
    """The run must reach max_steps within the reference's three epochs, which max_steps does not extend there."""
    run = demo.RUN
    batches = sum(
        (frame["split"] == "train").sum() // run["train_batch_size"] for frame in demo.feature_data().values()
    )
    assert set(run["target_classes"]) < set(LABELS)
    assert run["max_steps"] <= 3 * batches
    assert run["max_steps"] % run["eval_steps"] == 0


def test_main__directory_that_is_a_file_gives_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("")
    assert demo.main([str(tmp_path / "taken" / "deeper")]) == 2
    assert "is or lies under a file: choose another one." in capsys.readouterr().err


def test_write_demo__unknown_kind_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="kind is 'seq2seq': choose from masked, causal"):
        demo.write_demo(tmp_path, kind="seq2seq")  # type: ignore[arg-type]
