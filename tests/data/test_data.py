"""From every input form to the same table, with alternatives from the row's own split, and errors that say where."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from gradiend_dist import TextPredictionTrainer, demo
from gradiend_dist.data import readers
from gradiend_dist.data.config import TextPredictionConfig
from gradiend_dist.data.readers import read_neutral
from gradiend_dist.data.table import FeatureData, _cased, _reference_cased, load_feature_data
from gradiend_dist.errors import UserError

SPLITS = ["train", "train", "train", "val", "test"]


def frame(name: str, words: list[str], n: int = 20, splits: list[str] | None = SPLITS) -> pd.DataFrame:
    """Rows whose words say in which split they are, so that a word from elsewhere shows."""
    given = [splits[row % len(splits)] if splits else "" for row in range(n)]
    columns = {
        "masked": [f"{name} {row}: [MASK] is here." for row in range(n)],
        "label": [f"{words[row % len(words)]}{given[row]}" for row in range(n)],
    }
    return pd.DataFrame({**columns, "split": given} if splits else columns)


def frames() -> dict[str, pd.DataFrame]:
    """Classes in alphabetical order, as a directory has them."""
    return {
        "a": frame("a", ["ax", "ay", "az"]),
        "b": frame("b", ["bw", "bx", "by", "bz"], 25),
        "c": frame("c", ["cx"], 15),
    }


def load(data: object, seed: int = 0, identity: bool = False, **config: object) -> FeatureData:
    return load_feature_data(
        TextPredictionConfig(data=data, **config), seed=seed, add_identity_for_other_classes=identity
    )


def pair_rows(data: FeatureData) -> pd.DataFrame:
    return data.table[data.table["feature_class_id"] < 2]


def merged(given: dict[str, pd.DataFrame]) -> pd.DataFrame:
    return pd.concat([rows.assign(label_class=name) for name, rows in given.items()], ignore_index=True)


def write(table: pd.DataFrame, path: Path) -> Path:
    if path.suffix == ".csv":
        table.to_csv(path, index=False)
    elif path.suffix == ".parquet":
        table.to_parquet(path, index=False)
    else:
        table.to_json(path, orient="records", lines=True)
    return path


# --- input forms


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl", ".json"])
def test_load__gives_the_same_table_for_every_form(tmp_path, suffix):
    """Fails if a form reads a cell differently, orders classes differently, or draws from another stream."""
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    (tmp_path / "table").mkdir()
    (tmp_path / "classes").mkdir()
    file = write(merged(frames()), tmp_path / "table" / f"training{suffix}")
    for name, rows in frames().items():
        write(rows, tmp_path / "classes" / f"{name}{suffix}")
    want = load(frames(), target_classes=["b", "a"], identity=True).fingerprint()
    for data in (
        merged(frames()),
        file,
        str(file),
        tmp_path / "table",
        str(tmp_path / "table"),
        str(tmp_path / "classes"),
    ):
        assert load(data, target_classes=["b", "a"], identity=True).fingerprint() == want


def test_table__has_both_directions_labels_and_ids():
    data = load(frames(), target_classes=["b", "a"], identity=True)
    assert data.target_classes == ("b", "a") and data.all_classes == ("a", "b", "c")
    table = data.table
    assert table.index.equals(pd.RangeIndex(60))
    kinds = table.groupby("transition", sort=False)[["feature_class_id", "label"]].agg(["first", "nunique", "size"])
    assert kinds.to_numpy().tolist() == [[1, 1, 20, -1.0, 1, 20], [0, 1, 25, 1.0, 1, 25], [2, 1, 15, 0.0, 1, 15]]
    assert table["transition"].unique().tolist() == ["a→b", "b→a", "c→c"]
    assert set(table["split"]) == {"train", "validation", "test"}


def test_table__takes_the_two_classes_in_alphabetical_order_if_none_are_named():
    given = frames()
    assert load({"b": given["b"], "a": given["a"]}).target_classes == ("a", "b")


def test_table__uses_columns_named_like_classes():
    given = frames()
    given["a"]["b"] = ["BB" if row % 2 else None for row in range(20)]
    table = load(given, target_classes=["a", "b"]).table
    assert table.loc[table["factual_class"] == "a", "alternative"].tolist() == ["bb"] * 10
    drawn = load(given, target_classes=["a", "b"], use_class_names_as_columns=False).table
    assert (drawn["factual_class"] == "a").sum() == 20 and "bb" not in set(drawn["alternative"])


def test_table__uses_written_alternatives_and_leaves_out_rows_without():
    table = merged({name: frames()[name] for name in "ab"})
    table["other"] = ["written"] * 44 + [None]
    table["other_class"] = ["b"] * 20 + ["a"] * 25
    data = load(table, alternative_col="other", alternative_class_col="other_class")
    assert set(data.table["alternative"]) == {"written"} and len(data.table) == 44


def test_table__reads_frames_of_source_and_target_tokens():
    given = frames()["a"].rename(columns={"label": "source"}).assign(target="tt")
    data = load({"a_to_b": given, "b_to_a": given}, target_classes=["a", "b"])
    assert data.table["transition"].tolist() == ["a→b"] * 20 + ["b→a"] * 20


# --- alternatives


def test_alternatives__come_from_the_split_of_their_row():
    """Fails if a test word can be an alternative in training, which is what the reference does."""
    table = pair_rows(load(frames(), target_classes=["a", "b"]))
    for split, alternative in zip(table["split"], table["alternative"], strict=True):
        assert alternative.lower().endswith({"validation": "val"}.get(split, split))


def test_alternatives__need_a_token_in_the_same_split():
    given = {"a": frame("a", ["ax"]), "b": frame("b", ["bx"], splits=["train", "test"])}
    with pytest.raises(UserError, match="Class 'b' has no token in split 'validation'.*for class 'a'"):
        load(given)


def test_alternatives__are_drawn_by_frequency():
    given = {"a": frame("a", ["x"], 3000, ["train"]), "b": frame("b", ["p", "p", "p", "q"], 40, ["train"])}
    table = load(given).table
    share = (table.loc[table["factual_class"] == "a", "alternative"] == "ptrain").mean()
    assert 0.72 < share < 0.78


def test_alternatives__follow_the_seed_and_random_state_alone():
    tables = [load(frames(), seed=seed, target_classes=["a", "b"], random_state=state).fingerprint()
              for seed, state in ((0, None), (0, None), (1, None), (5, 0), (6, 0))]  # fmt: skip
    assert tables[0] == tables[1] == tables[3] == tables[4] != tables[2]


@pytest.mark.parametrize("split_col", ["split", None])
def test_alternatives__of_the_pair_do_not_depend_on_other_classes(split_col):
    """Each direction has its own random stream: asking for identity rows or more classes must not change the pair."""
    two = {name: frames()[name] for name in "ab"}
    want = pair_rows(load(two, split_col=split_col))
    data = load(frames(), target_classes=["a", "b"], identity=True, split_col=split_col)
    assert pair_rows(data).equals(want)
    for split in data.splits():
        rows = data.rows(split, include_other_classes=True)
        same = rows[rows["feature_class_id"] < 2].reset_index(drop=True)
        assert same.equals(want[want["split"] == split].reset_index(drop=True))


def test_alternatives__several_per_sentence_are_different():
    table = load(frames(), target_classes=["a", "b"], max_counterfactuals_per_sentence=2).table
    assert table.groupby("masked")["alternative"].agg(["size", "nunique"]).to_numpy().tolist() == [[2, 2]] * 45
    table = load(frames(), target_classes=["a", "b"], max_counterfactuals_per_sentence=9).table
    assert Counter(table.groupby("masked")["alternative"].nunique()) == {4: 20, 3: 25}  # the whole vocabulary


@pytest.mark.parametrize(
    ("factual", "alternative", "want", "reference"),
    [
        ("he", "They", "they", "they"),
        ("HE", "they", "THEY", "THEY"),
        ("He", "they", "They", "They"),
        ("I", "we", "we", "WE"),
        ("He", "they're", "They're", "They'Re"),
        ("He", "NASA", "NASA", "Nasa"),
        ("McCoy", "they", "they", "they"),
        ("12", "they", "they", "they"),
    ],
)
def test_casing__follows_the_factual_token(factual, alternative, want, reference):
    assert _cased(factual, alternative) == want
    assert _reference_cased(factual, alternative) == reference


def test_alternatives__have_their_most_frequent_spelling():
    given = {
        "one": pd.DataFrame({"masked": ["[MASK]"] * 4, "label": "I"}),
        "many": pd.DataFrame({"masked": ["[MASK]"] * 4, "label": ["We", "we", "we", "WE"]}),
    }
    table = load(given).table
    assert set(table.loc[table["factual_class"] == "one", "alternative"]) == {"we"}


# --- merging


def bases() -> dict[str, pd.DataFrame]:
    return {name: frame(name, [f"{name}x", f"{name}y"], 20) for name in ("s1", "p1", "s3", "p3", "n")}


MERGE = {"many": ["p3", "p1"], "one": ["s1", "s3"]}
GROUPS = [["s1", "p1"], ["s3", "p3"]]


def base_of(table: pd.DataFrame, column: str) -> list[str]:
    return [word.lower()[:2] for word in table[column]]


@pytest.mark.parametrize("form", ["frames", "table", "columns", "alternatives"])
def test_merging__limits_transitions_to_groups_in_every_form(form):
    """Fails where groups are ignored, as by the reference for all but the last form."""
    data: object = bases()
    if form in ("table", "alternatives"):
        data = merged(bases())
    if form == "columns":
        data = {name: rows.assign(**{other: f"{other}w" for other in bases()}) for name, rows in bases().items()}
    if form == "alternatives":
        data["alternative_class"] = ["p1", "s1", "p3", "s3", "n"] * 20
        data["alternative"] = [f"{name}w" for name in data["alternative_class"]]
    result = load(data, class_merge_map=MERGE, class_merge_transition_groups=GROUPS)
    assert result.target_classes == ("many", "one")
    pairs = Counter(zip(base_of(result.table, "factual"), base_of(result.table, "alternative"), strict=True))
    assert sorted(pairs) == [("p1", "s1"), ("p3", "s3"), ("s1", "p1"), ("s3", "p3")]
    assert set(pairs.values()) == {4 if form == "alternatives" else 20}


def test_merging__keeps_the_listed_order():
    data = load(bases(), class_merge_map=MERGE, target_classes=["one", "many"], identity=True)
    assert base_of(data.table, "masked") == [name for name in ("p3", "p1", "s1", "s3", "n ") for _ in range(20)]
    assert data.all_classes == ("many", "n", "one")
    assert data.table["transition"].tolist() == ["many→one"] * 40 + ["one→many"] * 40 + ["n→n"] * 20


def test_groups__limit_transitions_without_merging():
    table = load(bases(), target_classes=["s1", "p1"], class_merge_transition_groups=[["s1", "p1"]]).table
    assert len(table) == 40
    with pytest.raises(UserError, match="no row for s1→p1"):
        load(bases(), target_classes=["s1", "p1"], class_merge_transition_groups=[["s1", "p3"]])


# --- identity and other classes


def test_identity__rows_are_the_other_classes_unchanged():
    data = load(frames(), target_classes=["a", "b"], identity=True)
    last = data.table.tail(15)
    assert (last["factual"] == last["alternative"]).all() and (last["label"] == 0).all()
    assert (data.rows("test")["transition"] == "c→c").sum() == 3
    assert "c→c" not in set(load(frames(), target_classes=["a", "b"]).table["transition"])


def test_identity__counts_a_sentence_with_several_alternatives_once():
    rows = [
        (f"{name} [MASK]", f"{name}x", name, f"{other}x", other) for name in "abc" for other in "abc" if other != name
    ]
    table = pd.DataFrame(rows, columns=["masked", "label", "label_class", "alternative", "alternative_class"])
    data = load(table, target_classes=["a", "b"], identity=True)
    assert data.table["transition"].tolist() == ["a→b", "b→a", "c→c"]
    assert len(data.rows("train", include_other_classes=True)) == 7


def test_identity__rows_get_a_split_of_their_own():
    """Fails if identity rows are in every split, as with the reference when it makes the splits."""
    data = load(frames(), target_classes=["a", "b"], identity=True, split_col=None)
    neutral = data.table[data.table["transition"] == "c→c"]
    assert len(neutral) == 15 and Counter(neutral["split"]) == {"train": 12, "validation": 2, "test": 1}


def test_rows__have_the_same_ids_in_every_split():
    """Fails if ids are counted anew for the rows of a split: class d alone in a split would get the id of class c."""
    given = {**frames(), "d": frame("d", ["dx"], 5)}
    given["c"] = given["c"][given["c"]["split"] != "test"]
    data = load(given, target_classes=["a", "b"], identity=True)
    ids = {split: dict(zip(rows["transition"], rows["feature_class_id"], strict=True))
           for split in data.splits() for rows in [data.rows(split)]}  # fmt: skip
    assert ids["train"] == {"a→b": 0, "b→a": 1, "c→c": 2, "d→d": 3}
    assert ids["test"] == {"a→b": 0, "b→a": 1, "d→d": 3}


def test_rows__of_other_classes_are_all_transitions():
    data = load(frames(), target_classes=["a", "b"])
    rows = data.rows("val", include_other_classes=True)
    assert sorted(set(rows["transition"])) == ["a→b", "a→c", "b→a", "b→c", "c→a", "c→b"]
    labels = rows.groupby("factual_class")["label"].unique().map(list).to_dict()
    assert labels == {"a": [1.0], "b": [-1.0], "c": [0.0]}
    limited = load(frames(), target_classes=["a", "b"], all_classes=["b", "a"])
    assert len(limited.rows("val", include_other_classes=True)) == len(data.rows("val"))


# --- splits


def test_rows__are_those_of_the_split_in_order():
    data = load(frames(), target_classes=["a", "b"])
    assert data.rows("val").equals(data.rows("Validation"))
    want = data.table[data.table["split"] == "train"].reset_index(drop=True)
    assert data.rows("train").equals(want)
    with pytest.raises(UserError, match="'dev', only in train, validation, test"):
        data.rows("dev")


@pytest.mark.parametrize(
    ("given", "splits", "evaluation"),
    [
        (["test", "zeta", "train", "alpha"], ("train", "test", "alpha", "zeta"), "test"),
        (["val", "test", "train"], ("train", "validation", "test"), "validation"),
        (None, ("train",), "train"),
    ],
)
def test_splits__are_ordered_and_choose_the_evaluation_split(given, splits, evaluation):
    data = load({"a": frame("a", ["x"], splits=given), "b": frame("b", ["y"], splits=given)})
    assert data.splits() == splits and data.evaluation_split() == evaluation


def test_evaluation_split__must_have_a_known_name():
    with pytest.raises(UserError, match="only the splits dev"):
        load({name: frame(name, [name], splits=["dev"]) for name in "ab"}).evaluation_split()


@pytest.mark.parametrize(
    ("n", "ratios", "counts"),
    [
        (20, None, [16, 2, 2]),
        (4, None, [2, 1, 1]),
        (5, (0.9, 0.1, 0.0), [4, 1, 0]),
        (10, {"train": 0.5, "val": 0.3, "test": 0.2}, [5, 3, 2]),
    ],
)
def test_random_split__fills_every_split_and_keeps_the_order(n, ratios, counts):
    given = {name: frame(name, ["x", "y"], n, None) for name in "ab"}
    table = load(given, split_col=None, split_ratios=ratios).table
    for _, rows in table.groupby("factual_class"):
        found = Counter(rows["split"])
        assert [found[name] for name in ("train", "validation", "test")] == counts
    assert table["masked"].tolist() == [text for name in "ab" for text in given[name]["masked"]]


def test_random_split__follows_the_seed():
    given = {name: frame(name, [f"{name}x"], 20, None) for name in "ab"}
    splits = [load(given, split_col=None, random_state=1, seed=seed).table["split"].tolist() for seed in (0, 0, 1)]
    assert splits[0] == splits[1] != splits[2]


def test_random_split__keeps_the_alternatives_of_a_sentence_together():
    given = {name: frame(name, ["x", "y", "z"], 40, None) for name in "ab"}
    table = load(given, split_col=None, max_counterfactuals_per_sentence=3).table
    assert (table.groupby("masked")["split"].nunique() == 1).all()


def words_by_split(table: pd.DataFrame) -> dict[tuple[str, str], set[str]]:
    """Where each word of a class occurs, as token or as alternative."""
    found: dict[tuple[str, str], set[str]] = {}
    for side in ("factual", "alternative"):
        for name, word, split in zip(table[f"{side}_class"], table[side], table["split"], strict=True):
            found.setdefault((name, word.casefold()), set()).add(split)
    return found


WORDS = {"a": [f"a{number}" for number in range(9)], "b": [f"B{number}" for number in range(7)]}


@pytest.mark.parametrize("form", ["drawn", "written"])
def test_heldout_split__shows_no_word_in_two_splits(form):
    """As the token or as the alternative: both feed gradients."""
    data: object = {name: frame(name, words, 63, None) for name, words in WORDS.items()}
    if form == "written":
        data = merged(data)
        data["alternative_class"] = [{"a": "b", "b": "a"}[name] for name in data["label_class"]]
        data["alternative"] = [WORDS[name][row % 5] for row, name in enumerate(data["alternative_class"])]
    table = load(data, split_col="heldout").table
    assert all(len(splits) == 1 for splits in words_by_split(table).values())
    assert set(table["split"]) == {"train", "validation", "test"} and len(table) == 126
    if form == "written":
        kept = sum(table["alternative"].str.casefold() == pd.Series(data["alternative"]).str.casefold())
        assert 40 < kept < 126  # what was written stays where it may


def test_heldout_split__keeps_word_pairs_together():
    pairs = [("king", "queen"), ("uncle", "aunt"), ("boy", "girl"), ("son", "daughter")]
    rows = [
        (f"row {row} [MASK].", *(pairs[row % 4] if row % 3 else pairs[row % 4][::-1]), row % 3 > 0) for row in range(48)
    ]
    table = pd.DataFrame(rows, columns=["masked", "label", "alternative", "male"])
    table["label_class"] = table["male"].map({True: "m", False: "f"})
    table["alternative_class"] = table["male"].map({True: "f", False: "m"})
    out = load(table, split_col="heldout").table
    assert out["alternative"].tolist() == table["alternative"].tolist()
    assert all(len(splits) == 1 for splits in words_by_split(out).values())
    assert set(out["split"]) == {"train", "validation", "test"}


def test_heldout_split__may_group_by_a_key():
    given = {name: frame(name, words, 63, None) for name, words in WORDS.items()}
    table = load(given, split_col="heldout", split_group_key=[str.lower, lambda word: str(int(word[1]) // 2)]).table
    splits = table.groupby(["factual_class", table["factual"].str[1].astype(int) // 2])["split"].nunique()
    assert (splits == 1).all()


def test_heldout_split__needs_words_for_every_split():
    given = {"a": frame("a", ["x", "y", "z"], 20, None), "b": frame("b", ["u", "U "], 20, None)}
    with pytest.raises(UserError, match=r"3 different 'factual' values in class 'b'.*there are 1 \('u'\)"):
        load(given, split_col="heldout")


# --- determinism


def test_fingerprint__notices_every_change():
    data = load(frames(), target_classes=["a", "b"])
    seen = {data.fingerprint()}
    for column in data.table.columns:
        changed = data.table.copy()
        changed.loc[7, column] = (
            changed.loc[7, column] * 2 + 1 if column in ("feature_class_id", "label") else "changed"
        )
        seen.add(FeatureData(data.target_classes, data.all_classes, changed).fingerprint())
    seen.add(FeatureData(data.target_classes, data.all_classes, data.table.iloc[::-1]).fingerprint())
    seen.add(FeatureData(("b", "a"), data.all_classes, data.table).fingerprint())
    assert len(seen) == 3 + len(data.table.columns)


SCRIPT = """
import sys
sys.path[:0] = {path!r}
from test_data import GROUPS, MERGE, bases, load
for split_col in ("split", None):
    merging = dict(class_merge_map=MERGE, class_merge_transition_groups=GROUPS)
    data = load(bases(), identity=True, split_col=split_col, **merging)
    print(data.fingerprint())
"""


def test_table__does_not_depend_on_the_hash_seed():
    """Fails if a set is walked anywhere: the ranks of a job would hold different data."""
    here = Path(__file__).parent
    # Both at the same time: most of it is the start of Python.
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT.format(path=[str(here.parents[i]) for i in range(2)] + [str(here)])],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for hash_seed in ("1", "2")
    ]
    outputs = [process.communicate(timeout=200)[0] for process in started]
    assert outputs[0] == outputs[1] and len(outputs[0].split()) == 2


# --- errors


def changed(row: int, column: str, value: object, name: str = "a") -> dict[str, pd.DataFrame]:
    given = frames()
    given[name][column] = given[name][column].astype(object)
    given[name].loc[row, column] = value
    return given


def table_with(column: str, value: object) -> pd.DataFrame:
    table = merged(frames()).astype(object)
    table.loc[33, column] = value
    return table


ERRORS = {
    "no token": (changed(3, "label", None), {}, ["'label'", "row 3", "class 'a'"]),
    "blank token": (changed(3, "label", "  ", "b"), {}, ["'label'", "row 3", "class 'b'"]),
    "no sentence": (changed(4, "masked", None), {}, ["'masked'", "row 4", "class 'a'"]),
    "no placeholder": (changed(5, "masked", "[mask]"), {}, ["Row 5", "class 'a'", "'[MASK]'", "'[mask]'"]),
    "no split": (changed(6, "split", None), {}, ["'split'", "row 6", "class 'a'"]),
    "no token in a table": (table_with("label", None), {}, ["'label'", "row 33", "class 'b'"]),
    "no class in a table": (table_with("label_class", None), {}, ["'label_class'", "row 33"]),
    "no placeholder in a table": (table_with("masked", "nothing"), {}, ["Row 33", "class 'b'", "'nothing'"]),
    "no sentence column": (frames(), {"masked_col": "text"}, ["class 'a'", "no column 'text'", "'masked'"]),
    "no token column": ({**frames(), "a": frames()["a"].drop(columns="label")}, {}, ["class 'a'", "'label'"]),
    "no class column": (frames()["a"], {}, ["no column 'label_class'"]),
    "no such split column": (frames(), {"split_col": "fold"}, ["no column 'fold'", "class 'a'"]),
    "split in one class only": ({**frames(), "b": frame("b", ["x"], splits=None)}, {}, ["Class 'b'", "'split'"]),
    "column twice": ({**frames(), "a": pd.concat([frames()["a"]] * 2, axis=1)}, {}, ["class 'a'", "2 times"]),
    "half of the alternatives": (merged(frames()).assign(alternative="x"), {}, ["'alternative_class'", "neither"]),
    "renamed alternatives": (merged(frames()), {"alternative_col": "other"}, ["'other'", "alternative_col"]),
    "empty alternatives": (merged(frames()).assign(alternative=None, alternative_class=None), {}, ["'alternative'"]),
    "unknown target": (frames(), {"target_classes": ["a", "z"]}, ["target class 'z'", "'a', 'b', 'c'"]),
    "unnamed targets": (frames(), {"target_classes": None}, ["target_classes is needed", "'a', 'b', 'c'"]),
    "unknown class": (frames(), {"all_classes": ["a", "b", "y"]}, ["'y'", "all_classes"]),
    "empty class": ({**frames(), "b": frames()["b"][:0]}, {}, ["no rows for class 'b'"]),
    "empty table": (merged(frames())[:0], {}, ["no rows"]),
    "empty dict": ({}, {}, ["empty dict"]),
    "no frames": ({"a": [1]}, {}, ["dict"]),
    "nothing": (None, {}, ["data or hf_dataset"]),
    "unknown base": (frames(), {"class_merge_map": {"a": ["a"], "b": ["b", "x"]}}, ["class_merge_map", "'x'"]),
    "merged into a class": (
        frames(), {"class_merge_map": {"c": ["a"], "b": ["b"]}, "target_classes": ["c", "b"]}, ["class 'c'", "member"],
    ),
    "one direction": (
        merged({"a": frames()["a"]}).assign(alternative="x", alternative_class="b"), {}, ["no row for b→a"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("data", "config", "words"), ERRORS.values(), ids=ERRORS.keys())
def test_errors__say_where(data, config, words):
    with pytest.raises(UserError) as error:
        load(data, **{"target_classes": ["a", "b"], **config})
    assert all(word in str(error.value) for word in words), error.value


CONFIG_ERRORS = [
    {"data": "x", "hf_dataset": "y"},
    {"hf_subset": "x"},
    {"mask_placeholder": ""},
    {"target_classes": ["a"]},
    {"target_classes": ["a", "a"]},
    {"target_classes": "ab"},
    {"target_classes": ["a", "b"], "all_classes": ["a", "c"]},
    {"class_merge_map": {"a": ["x"], "b": ["x"]}},
    {"class_merge_map": {"a": []}},
    {"class_merge_transition_groups": [["a"]]},
    {"max_counterfactuals_per_sentence": 0},
    {"eval_neutral_max_rows": 0},
    {"img_dpi": 0},
    {"split_ratios": (0.5, 0.5)},
    {"split_ratios": (0.5, 0.2, 0.2)},
    {"split_ratios": (1.2, -0.1, -0.1)},
    {"split_ratios": {"train": 0.9, "test": 0.1}},
    {"split_train_ratio": 0.9},
    {"split_group_col": "factual"},
    {"split_group_col": "label", "split_col": "heldout"},
    {"split_group_key": "lower", "split_col": "heldout"},
]


@pytest.mark.parametrize("config", CONFIG_ERRORS, ids=str)
def test_config__rejects_what_cannot_be(config):
    with pytest.raises(UserError) as error:
        TextPredictionConfig(**config)
    assert any(name.removesuffix("_ratios").removesuffix("_ratio") in str(error.value) for name in [*config, "shares"])


# --- files


@pytest.fixture
def no_hub(monkeypatch):
    def fail(*_arguments: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(readers, "_import_datasets", fail)


@pytest.mark.parametrize("name", ["nowhere.csv", "nowhere/x.jsonl", "./nowhere", "a/b/c", "/nowhere", "here/nowhere"])
@pytest.mark.usefixtures("no_hub")
def test_data__that_looks_like_a_path_must_exist(name, tmp_path, monkeypatch):
    """Fails if a mistyped path is looked up on the hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    for data in (name, Path(name)):
        with pytest.raises(UserError, match=f"data='{name.removeprefix('./')}'|data='{name}'.*does not exist"):
            load(data)


def test_data__wrong_files_are_named(tmp_path):
    for file, text, message in [
        ("x.tsv", "", "suffix '.tsv'"),
        ("x.csv", "", "not a csv file"),
        ("x.jsonl", '{"masked": 1}\n\nnonsense\n', "line 3 is not JSON"),
        ("y.jsonl", "[1]\n", "line 1 is a JSON list"),
    ]:
        path = tmp_path / file
        path.write_text(text)
        with pytest.raises(UserError, match=message) as error:
            load(path)
        assert file in str(error.value)


def test_data__directory_must_be_unambiguous(tmp_path):
    with pytest.raises(UserError, match="neither training.csv nor <class>.csv"):
        load(tmp_path)
    for suffix in (".csv", ".jsonl"):
        write(frames()["a"], tmp_path / f"a{suffix}")
    with pytest.raises(UserError, match="two files for class 'a'"):
        load(tmp_path)


def test_data__incomplete_class_is_explained(tmp_path):
    path = write(merged({name: frames()[name] for name in "ab"}), tmp_path / "training.csv")
    write(pd.DataFrame({"label_class": ["c"]}), tmp_path / "training_incomplete_classes.csv")
    for data in (path, tmp_path):
        with pytest.raises(UserError, match="target class 'c' is not in the data .*incomplete"):
            load(data, target_classes=["a", "c"])


def test_data__class_files_are_all_files_but_lists_of_incomplete_classes(tmp_path):
    for name in ("a", "b", "x_incomplete_classes"):
        write(frame(name, [f"{name}x"]), tmp_path / f"{name}.csv")
    (tmp_path / "notes.md").write_text("no data")
    assert load(tmp_path).all_classes == ("a", "b")


def test_csv__cells_are_what_is_written(tmp_path):
    """Fails if "null" becomes a missing token, or class 01 becomes class 1."""
    path = tmp_path / "x.csv"
    path.write_text("masked,label,label_class\n[MASK],null,01\n[MASK],NA,1\n[MASK],1.50,01\n[MASK],nan,1\n")
    data = load(path)
    assert data.target_classes == ("01", "1")
    assert data.table["factual"].tolist() == ["null", "1.50", "NA", "nan"]
    path.write_text(path.read_text().replace("NA", ""))
    with pytest.raises(UserError, match="'label' is empty in row 1 of class '1'"):
        load(path)


# --- the hub, through a seam and with the real package


@pytest.fixture
def hub(monkeypatch):
    """A hub dataset with one configuration per class; gives the list of what was downloaded."""
    loaded = []

    def splits(dataset: str, name: str | None, trust: bool | None) -> dict[str, pd.DataFrame]:
        loaded.append((dataset, name, trust))
        table = merged(frames())
        rows = table[table["label_class"] == name].assign(split=lambda own: own["split"].replace("val", "validation"))
        return {split: part.drop(columns="split") for split, part in rows.groupby("split")}

    monkeypatch.setattr(readers, "hub_splits", splits)
    monkeypatch.setattr(readers, "hub_configurations", lambda _dataset: list(frames()))
    return loaded


def test_hub__per_class_downloads_only_what_is_used(hub):
    data = load("owner/name", target_classes=["b", "a"], dataset_trust_remote_code=True)
    assert hub == [("owner/name", "b", True), ("owner/name", "a", True)]
    assert sorted(set(data.table["transition"])) == ["a→b", "b→a"] and len(data.table) == 45
    hub.clear()
    load("owner/name", target_classes=["b", "a"], identity=True)
    assert [name for _, name, _ in hub] == ["a", "b", "c"]
    with pytest.raises(UserError, match="no configuration for class 'z'"):
        load("owner/name", target_classes=["a", "z"])


def test_hub__one_table_has_all_configurations_and_splits(hub):
    data = load(None, hf_dataset="owner/name", target_classes=["b", "a"])
    assert len(data.table) == 45 and data.splits() == ("train", "validation", "test")
    some = load(None, hf_dataset="owner/name", hf_subset=["a", "b"], hf_splits=["train", "val"])
    assert some.splits() == ("train", "validation")
    assert [name for _, name, _ in hub] == ["a", "b", "c", "a", "b"]
    with pytest.raises(UserError, match="hf_splits"):
        load(None, hf_dataset="owner/name", hf_splits=["dev"])


def test_hub__needs_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        load(None, hf_dataset="owner/name", hf_subset="x")


def test_hub__real_package_reads_configurations_of_a_directory(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    home = tmp_path / "dataset"
    home.mkdir()
    listed = []
    for name in "ab":
        for split in ("train", "val"):
            rows = frames()[name].assign(label_class=name)
            write(rows[rows["split"] == split].drop(columns="split"), home / f"{name}_{split}.csv")
        files = [
            {"split": split, "path": f"{name}_{key}.csv"} for split, key in (("train", "train"), ("validation", "val"))
        ]
        listed.append({"config_name": name, "data_files": files})
    (home / "README.md").write_text(f"---\nconfigs: {json.dumps(listed)}\n---\n")
    data = load(None, hf_dataset=str(home), dataset_trust_remote_code=None)
    assert data.splits() == ("train", "validation") and len(data.table) == 36
    with pytest.raises(UserError, match="could not be loaded"):
        load(None, hf_dataset=str(home), hf_subset="z")


# --- neutral texts

TEXTS = ["One text.", "Another one.", "A third."]


@pytest.mark.parametrize("form", ["frame", "one column", "list", ".csv", ".parquet", ".jsonl", ".txt"])
def test_neutral__is_read_from_every_form(form, tmp_path):
    value: object = {
        "frame": pd.DataFrame({"id": [1, 2, 3], "text": TEXTS}),
        "one column": pd.DataFrame({"x": TEXTS}),
    }.get(form, TEXTS)
    if form == ".txt":
        value = tmp_path / "x.txt"
        value.write_text("\n\n".join(TEXTS) + "\n")
    elif form.startswith("."):
        value = str(write(pd.DataFrame({"text": TEXTS}), tmp_path / f"x{form}"))
    assert read_neutral(value)["text"].tolist() == TEXTS
    data = load(frames(), target_classes=["a", "b"], eval_neutral_data=value, eval_neutral_max_rows=2)
    assert data.neutral is not None and data.neutral.to_dict("list") == {"text": TEXTS[:2]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (pd.DataFrame({"a": ["x"], "b": ["y"]}), "column 'text'"),
        (["x", " "], "row 1"),
        (pd.DataFrame({"text": ["x", "y", None]}), "row 2"),
        ([], "no rows"),
        ("nowhere.txt", "eval_neutral_data='nowhere.txt' does not exist"),
    ],
)
def test_neutral__rejects_what_is_no_text(value, message):
    with pytest.raises(UserError, match=message):
        read_neutral(value)


def test_label_col__that_is_missing_in_a_class_is_not_replaced_by_another_column():
    """Fails if a misspelt label_col silently trains on `label`."""
    frames = demo.feature_data()
    trainer = TextPredictionTrainer("model", data=frames, target_classes=["M", "F"], label_col="word")
    with pytest.raises(UserError, match="no column with its tokens.*'word'"):
        _ = trainer.data
    renamed = {name: frame.rename(columns={"label": "word"}) for name, frame in frames.items()}
    trainer = TextPredictionTrainer("model", data=renamed, target_classes=["M", "F"], label_col="word")
    assert len(trainer.data.rows("train"))
