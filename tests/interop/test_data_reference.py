"""With reference=True the tables and orders are those of `gradiend` 0.2.3, row for row, for every input form.

Each test runs the reference's own trainer on the same frames. A wrong random stream, row order, split or casing rule
shows as a first differing row.
"""

from __future__ import annotations

import random

import pandas as pd
import pytest

gradiend = pytest.importorskip("gradiend")

from gradiend.trainer.core.arguments import TrainingArguments  # noqa: E402
from gradiend.trainer.text.common.dataset_base import TextBatchedDatasetBase  # noqa: E402
from gradiend.trainer.text.prediction.trainer import TextPredictionTrainer  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from gradiend_dist.data.config import TextPredictionConfig  # noqa: E402
from gradiend_dist.data.schedule import cap_per_group, make_schedule  # noqa: E402
from gradiend_dist.data.table import load_feature_data  # noqa: E402

COLUMNS = ["masked", "split", "factual_class", "alternative_class", "factual", "alternative", "transition"]
WORDS = {
    "sg": ["I", "he", "He", "SHE", "it", "it", "mcCoy", "this", "that", "one", "Each"],
    "pl": ["we", "We", "they're", "THEY", "these", "those", "all", "both", "Many", "few"],
    "nt": ["the", "A", "an", "some", "Any"],
}


def frame(name: str, n: int, seed: int, token_column: str = "label", split: bool = True) -> pd.DataFrame:
    rng = random.Random(f"{name} {seed}")
    rows = {
        "masked": [f"{name} sentence {row}: [MASK] stands here." for row in range(n)],
        token_column: [rng.choice(WORDS[name[:2]]) for _ in range(n)],
    }
    if split:
        rows["split"] = [rng.choice(["train", "train", "Train", "val", "test"]) for _ in range(n)]
    return pd.DataFrame(rows)


def frames(seed: int = 0, **kwargs: bool) -> dict[str, pd.DataFrame]:
    return {name: frame(name, n, seed, **kwargs) for name, n in (("pl", 37), ("nt", 23), ("sg", 29))}


def merged(given: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """One table, classes mixed."""
    table = pd.concat([rows.assign(label_class=name) for name, rows in given.items()])
    return table.sample(frac=1, random_state=3).reset_index(drop=True)


def with_alternatives() -> pd.DataFrame:
    rng = random.Random(8)
    table = merged(frames())
    others = {"sg": ["pl", "nt"], "pl": ["sg", "nt"], "nt": ["pl", "sg", "nt"]}
    table["alternative_class"] = [rng.choice(others[name]) for name in table["label_class"]]
    table["alternative"] = [rng.choice(WORDS[name]) for name in table["alternative_class"]]
    table.loc[[4, 17], "alternative"] = None
    return table


def wide_table() -> pd.DataFrame:
    table = merged(frames())
    rng = random.Random(9)
    for name in ("sg", "pl", "nt"):
        table[name] = [rng.choice([*WORDS[name], None]) for _ in range(len(table))]
    return table


def wide_frames() -> dict[str, pd.DataFrame]:
    given = frames()
    rng = random.Random(10)
    given["sg"]["pl"] = [rng.choice([*WORDS["pl"], None]) for _ in range(len(given["sg"]))]
    return given


def word_pairs() -> pd.DataFrame:
    """Each word has one fixed counterpart."""
    rng = random.Random(11)
    pairs = [("king", "queen"), ("uncle", "aunt"), ("boy", "Girl"), ("Son", "daughter"), ("actor", "actress")]
    rows = []
    for number in range(60):
        pair = rng.choice(pairs)
        side = rng.randrange(2)
        classes = ("m", "f") if side == 0 else ("f", "m")
        rows.append((f"row {number} [MASK].", pair[side], classes[0], pair[1 - side], classes[1]))
    return pd.DataFrame(rows, columns=["masked", "label", "label_class", "alternative", "alternative_class"])


def prepaired() -> dict[str, pd.DataFrame]:
    rows = {name: frame(name, 12, 5, token_column="source") for name in ("sg", "pl")}
    for name, other in (("sg", "pl"), ("pl", "sg")):
        rows[name]["target"] = [WORDS[other][row % 7] for row in range(12)]
        rows[name]["target_id"] = other
    rows["pl"].loc[3, "target"] = None
    return rows


def merging(seed: int = 0) -> tuple[dict[str, pd.DataFrame], dict[str, list[str]]]:
    """Base classes and a merge map; the reference walks set(target_classes), so the map is listed in that order."""
    members = {"one": ["sg1", "sg3"], "many": ["pl3", "pl1"]}
    listed = {name: members[name] for name in set(["many", "one"])}
    return {
        name: frame(name, n, seed) for name, n in (("sg1", 11), ("pl1", 13), ("nt", 7), ("pl3", 9), ("sg3", 8))
    }, listed


def base_alternatives(given: dict[str, pd.DataFrame]) -> pd.DataFrame:
    rng = random.Random(12)
    table = merged(given)
    table["alternative_class"] = [rng.choice(["sg1", "sg3", "pl1", "pl3", "nt"]) for _ in range(len(table))]
    table["alternative"] = [rng.choice(WORDS[name[:2]]) for name in table["alternative_class"]]
    return table


def tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "[MASK]": 2}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]")


PAIR = {"target_classes": ["sg", "pl"]}
MERGE_FRAMES, MERGE_MAP = merging()
GROUPS = [["sg1", "pl1"], ["sg3", "pl3", "nt"]]
ONE_MANY = {"class_merge_map": MERGE_MAP, "target_classes": ["many", "one"]}
CASES = {
    "per class": {"data": frames(), **PAIR},
    "per class, other order": {"data": frames(), "target_classes": ["pl", "sg"], "random_state": 0},
    "per class, several draws": {"data": frames(), "max_counterfactuals_per_sentence": 3, **PAIR},
    "per class, two classes, no pair named": {"data": {name: frames()[name] for name in ("sg", "pl")}},
    "per class, no splits": {"data": frames(split=False), **PAIR},
    "per class, columns": {"data": wide_frames(), **PAIR},
    "per class, pre-paired": {"data": prepaired(), **PAIR},
    "per class, random split": {"data": frames(), "split_col": None, **PAIR},
    "per class, held out": {"data": frames(), "split_col": "heldout", **PAIR},
    "per class, held out sentences": {
        "data": frames(), "split_col": "heldout", "split_group_col": "masked", "split_ratios": (0.5, 0.2, 0.3), **PAIR,
    },
    "merged classes": {"data": MERGE_FRAMES, **ONE_MANY},
    "merged classes, random split": {"data": MERGE_FRAMES, "split_col": None, **ONE_MANY},
    "table with alternatives": {"data": with_alternatives(), **PAIR},
    "table with alternatives, random split": {
        "data": with_alternatives(), "split_col": None, "split_ratios": {"train": 0.6, "val": 0.2, "test": 0.2}, **PAIR,
    },
    "table with alternatives, held out": {"data": with_alternatives(), "split_col": "heldout", **PAIR},
    "table of word pairs, held out": {"data": word_pairs(), "split_col": "heldout", "target_classes": ["f", "m"]},
    "table with a column per class": {"data": wide_table(), **PAIR},
    "table with a column per class, random split": {"data": wide_table(), "split_col": None, **PAIR},
    "table without alternatives": {"data": merged(frames()), **PAIR},
    "table without alternatives, random split": {"data": merged(frames()), "split_col": None, **PAIR},
    "merged classes in a table": {"data": merged(MERGE_FRAMES), **ONE_MANY},
    "merged classes in a table with alternatives": {"data": base_alternatives(MERGE_FRAMES), **ONE_MANY},
    "merged classes, transition groups": {
        "data": base_alternatives(MERGE_FRAMES), "class_merge_transition_groups": GROUPS, **ONE_MANY,
    },
}  # fmt: skip


def trainer(case: dict, seed: int, identity: bool = False, **more: object) -> TextPredictionTrainer:
    arguments = TrainingArguments(seed=seed, add_identity_for_other_classes=identity, do_eval=False, **more)
    return TextPredictionTrainer("no-model", training_args=arguments, **{"random_state": 7, **case})


def ours(case: dict, seed: int, identity: bool = False):
    config = TextPredictionConfig(**{"random_state": 7, **case})
    return load_feature_data(config, seed=seed, add_identity_for_other_classes=identity, reference=True)


def assert_same(got: pd.DataFrame, want: pd.DataFrame) -> None:
    assert list(got.columns) == list(want.columns)
    assert got.to_dict("records") == want.to_dict("records")


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_table__equals_the_reference_row_for_row(case, seed):
    theirs = trainer(case, seed)
    want = theirs.combined_data
    data = ours(case, seed)
    assert_same(data.table[COLUMNS], want[COLUMNS])
    assert data.target_classes == theirs.pair
    assert list(data.all_classes) == theirs.all_classes


@pytest.mark.parametrize("identity", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_rows__of_a_split_equal_what_the_reference_trains_on(case, identity):
    theirs = trainer(case, 3, identity)
    data = ours(case, 3, identity)
    for split in data.splits():
        want = theirs.create_training_data(tokenizer(), split=split, batch_size=1).data
        got = data.rows(split).rename(columns={"factual_class": "factual_id", "alternative_class": "alternative_id"})
        columns = ["masked", "factual", "alternative", "factual_id", "alternative_id", "label", "feature_class_id"]
        assert_same(got[columns], want[columns])


@pytest.mark.parametrize("identity", [False, True])
@pytest.mark.parametrize("case", ["per class", "table with alternatives", "table with a column per class"])
def test_rows__of_all_classes_equal_the_reference(case, identity):
    case = {**CASES[case], "all_classes": ["sg", "nt", "pl"]}
    want = trainer(case, 3, identity).create_training_data(tokenizer(), split="train", include_other_classes=True).data
    got = ours(case, 3, identity).rows("train", include_other_classes=True)
    assert len(set(got["transition"])) > 2
    columns = ["masked", "factual", "alternative", "label", "feature_class_id"]
    assert_same(got[columns], want[columns])


@pytest.mark.parametrize("batch_size", [1, 2, 4])
@pytest.mark.parametrize("max_size", [None, 9])
def test_schedule__visits_the_rows_in_the_reference_order(batch_size, max_size):
    case = {"data": frames(), **PAIR}
    want = trainer(case, 6, identity=True, train_max_size=max_size).create_training_data(
        tokenizer(), split="train", batch_size=batch_size
    )
    visited = [TextBatchedDatasetBase.__getitem__(want, item)["masked"] for item in range(len(want))]
    rows = cap_per_group(ours(case, 6, identity=True).rows("train"), max_size, column="feature_class_id", seed=6)
    schedule = make_schedule(rows, batch_size, seed=6, reference=True)
    assert len(schedule) == len(want) // batch_size
    for epoch in (0, 3):
        batches = [schedule.batches[number] for number in schedule.epoch(epoch)]
        assert [rows["masked"][row] for batch in batches for row in batch] == visited


def test_schedule__of_evaluation_rows_is_the_reference_order_of_single_rows():
    rows = ours({"data": frames(), **PAIR}, 6).rows("train")
    want = TextBatchedDatasetBase(rows, None, 1, "label", seed=6, balance_column="feature_class_id")
    schedule = make_schedule(rows, 1, seed=6, reference=True, shuffle=False)
    assert [rows["masked"][schedule.batches[item][0]] for item in schedule.epoch(0)] == [
        want[item]["masked"] for item in range(len(want))
    ]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_files__are_read_as_by_the_reference(tmp_path, suffix):
    path = tmp_path / f"training.{suffix}"
    table = with_alternatives()
    table.to_csv(path, index=False) if suffix == "csv" else table.to_parquet(path, index=False)
    for data in (path, str(path), tmp_path):
        assert_same(ours({"data": data, **PAIR}, 2).table[COLUMNS], trainer({"data": data, **PAIR}, 2).combined_data)
