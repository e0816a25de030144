"""The numbers of an evaluation, against values worked out by hand and against the same encodings negated."""

from __future__ import annotations

import json
import math
from io import StringIO
from typing import Any

import numpy as np
import pandas as pd
import pytest

from gradiend_dist.errors import UserError
from gradiend_dist.evaluation.metrics import (
    CSV_COLUMNS,
    SOURCES,
    TRAINING_COLUMNS,
    encoder_metrics,
    encoding_rows,
    flip,
    join_encodings,
    neutral_encoding_rows,
)

PAIR = ("M", "F")
CLASSES = ("M", "F", "N")
WORDS = {"M": ("he", "him"), "F": ("she", "her"), "N": ("they", "them")}
DIRECTIONS = {("M", "F"): 0, ("F", "M"): 1, ("N", "N"): 2}


def unified(*directions: tuple[str, str], splits: tuple[str, ...] = ("test",)) -> pd.DataFrame:
    rows = []
    for i, (factual, alternative) in enumerate(directions):
        rows.append(
            {
                "masked": f"sentence {i} with [MASK] inside",
                "split": splits[i % len(splits)],
                "factual_class": factual,
                "alternative_class": alternative,
                "factual": WORDS[factual][i % 2],
                "alternative": WORDS[alternative][i % 2],
                "transition": f"{factual}→{alternative}",
                "feature_class_id": DIRECTIONS[factual, alternative],
                "label": {"M": 1, "F": -1, "N": 0}[factual],
            }
        )
    return pd.DataFrame(rows)


def neutral(count: int, kind: str) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "masked": [f"neutral [MASK] {i}" for i in range(count)],
            "split": "test",
            "factual_class": "neutral",
            "alternative_class": "neutral",
            "factual": "text",
            "alternative": "text",
            "transition": "neutral→neutral",
            "feature_class_id": 0,
            "label": 0,
            "type": kind,
            "text": [f"neutral text {i}" for i in range(count)],
            "input_text": [f"neutral [MASK] {i}" for i in range(count)],
        }
    )


def table(rows: pd.DataFrame, encodings: Any, source: str = "factual") -> pd.DataFrame:
    return encoding_rows(rows, np.asarray(encodings), source=source, target_classes=PAIR, mask_placeholder="[MASK]")


def metrics(encoded: pd.DataFrame, source: str = "factual") -> dict[str, Any]:
    return encoder_metrics(encoded, target_classes=PAIR, all_classes=CLASSES, source=source)


def random_table(source: str, *, seed: int = 0, splits: tuple[str, ...] = ("train", "test", "test")) -> pd.DataFrame:
    """Eleven pair rows, five identity rows, seven neutral rows; no size divides another."""
    rng = np.random.default_rng(seed)
    directions = [("M", "F")] * 7 + [("F", "M")] * 4 + [("N", "N")] * 5
    return join_encodings(
        table(unified(*directions, splits=splits), rng.uniform(-1, 1, 16), source),
        neutral_encoding_rows(neutral(4, "neutral_training_masked"), rng.uniform(-1, 1, 4)),
        neutral_encoding_rows(neutral(3, "neutral_dataset"), rng.uniform(-1, 1, 3)),
    )


# Tables


def test_encoding_rows__name_the_encoded_token() -> None:
    """Fails if the label, class or word of the other side is written, or a 0 label becomes -0.0."""
    rows = unified(("M", "F"), ("F", "M"), ("N", "N"))
    by_source = {source: table(rows, [0.1, 0.2, 0.3], source) for source in SOURCES}
    assert by_source["factual"]["label"].tolist() == [1.0, -1.0, 0.0]
    assert by_source["factual"]["source_id"].tolist() == ["M", "F", "N"]
    assert by_source["factual"]["source_token"].tolist() == ["he", "her", "they"]
    assert by_source["factual"]["eval_group"].tolist() == ["M", "F", "N"]
    assert by_source["alternative"]["label"].tolist() == [-1.0, 1.0, 0.0]
    assert math.copysign(1, by_source["alternative"]["label"].iloc[2]) == 1
    assert by_source["alternative"]["source_id"].tolist() == ["F", "M", "N"]
    assert by_source["alternative"]["source_token"].tolist() == ["she", "him", "they"]
    assert by_source["alternative"]["eval_group"].tolist() == [0, 1, 2]
    assert by_source["diff"]["label"].tolist() == [1.0, -1.0, 0.0]
    assert by_source["diff"]["source_id"].tolist() == [0, 1, 2]
    assert by_source["diff"]["source_token"].isna().all()
    for encoded in by_source.values():
        assert tuple(encoded.columns) == TRAINING_COLUMNS
        assert encoded["target_id"].tolist() == ["F", "M", "N"]
        assert encoded["text"].iloc[1] == "sentence 1 with her inside"


def test_encoding_rows__keep_the_order_and_forget_the_index() -> None:
    """Fails if encodings are aligned by the index of the rows instead of their order."""
    rows = unified(("M", "F"), ("F", "M"), ("N", "N")).iloc[[2, 0, 1]]
    encoded = table(rows, [1.0, 2.0, 3.0])
    assert encoded["encoded"].tolist() == [1.0, 2.0, 3.0]
    assert encoded["source_id"].tolist() == ["N", "M", "F"]
    assert encoded.index.tolist() == [0, 1, 2]


def test_encoding_rows__refuse_labels_of_the_encoded_side() -> None:
    """Labels negated by the caller would be negated twice."""
    rows = unified(("M", "F"), ("F", "M"))
    with pytest.raises(AssertionError, match="by factual class"):
        table(rows.assign(label=-rows["label"]), [0.1, 0.2], "alternative")


def test_encoding_rows__refuse_a_wrong_number_of_encodings() -> None:
    with pytest.raises(AssertionError, match="2 rows, but encodings"):
        table(unified(("M", "F"), ("F", "M")), [0.1, 0.2, 0.3])


def test_encoding_rows__normalise_split_names_and_use_the_placeholder() -> None:
    rows = unified(("M", "F")).assign(split="Val", masked="a ___ and [MASK]")
    encoded = encoding_rows(rows, np.zeros(1), source="factual", target_classes=PAIR, mask_placeholder="___")
    assert encoded.loc[0, "data_split"] == "validation"
    assert encoded.loc[0, "text"] == "a he and [MASK]"


def test_join_encodings__has_the_columns_of_the_file() -> None:
    assert tuple(random_table("factual").columns) == CSV_COLUMNS
    training = table(unified(("M", "F")), [0.5])
    empty = neutral_encoding_rows(neutral(0, "neutral_dataset"), np.zeros(0))
    assert tuple(join_encodings(training, empty).columns) == TRAINING_COLUMNS


# Metrics


def test_encoder_metrics__by_hand() -> None:
    """Every number of a table small enough to check on paper."""
    rows = unified(("M", "F"), ("M", "F"), ("F", "M"), ("F", "M"), ("N", "N"))
    encoded = join_encodings(
        table(rows, [0.9, 0.3, -0.9, 0.1, 0.2]),
        neutral_encoding_rows(neutral(2, "neutral_dataset"), np.array([-0.2, 0.6])),
    )
    result = metrics(encoded)
    assert result["n_samples"] == 7
    assert result["sample_counts"]["by_type"] == {"training": 5, "neutral_dataset": 2}
    assert result["sample_counts"]["training_by_eval_group"] == {"M": 2, "F": 2, "N": 1}
    # the labels have mean 0, the encodings 0.12
    labels = np.array([1, 1, -1, -1, 0])
    deviations = np.array([0.78, 0.18, -1.02, -0.02, 0.08])
    expected = labels @ deviations / math.sqrt((labels @ labels) * (deviations @ deviations))
    assert result["correlation"] == result["training_only"]["correlation"] == pytest.approx(expected)
    # three classes: 0.9, -0.9 and 0.2 are right; of the neutral ones -0.2 is
    assert result["training_only"]["accuracy"] == 3 / 5
    assert result["all_data"]["accuracy"] == 4 / 7
    # two classes: only 0.1 is on the wrong side
    assert result["target_classes_only"]["accuracy"] == 3 / 4
    assert result["mean_by_class"] == {-1.0: -0.4, 0.0: 0.2, 1.0: pytest.approx(0.6)}
    assert result["min_by_class"] == {-1.0: -0.9, 0.0: 0.2, 1.0: 0.3}
    assert result["max_by_feature_class"] == {"F": 0.1, "M": 0.9, "N": 0.2}
    assert result["q1_by_class"][1.0] == pytest.approx(0.45)
    assert result["q3_by_class"][1.0] == pytest.approx(0.75)
    assert result["std_by_class"] == pytest.approx({-1.0: math.sqrt(0.5), 0.0: 0.0, 1.0: math.sqrt(0.18)})
    assert result["n_by_feature_class"] == {"F": 2, "M": 2, "N": 1}
    assert result["mean_by_type"] == {"neutral_dataset": pytest.approx(0.2), "training": pytest.approx(0.12)}
    assert result["abs_mean_by_type"] == {"neutral_dataset": pytest.approx(0.4), "training": pytest.approx(0.48)}
    assert result["neutral_mean_by_type"] == {"neutral_dataset": pytest.approx(0.2)}
    assert result["label_value_to_class_name"] == {-1.0: "F", 0.0: "neutral", 1.0: "M"}
    assert result["mean_by_target"]["M"] == {"he": 0.9, "him": 0.3}
    assert result["eval_group_basis"] == "factual_id"
    assert "split_generalization" not in result
    assert "correlation_by_latent" not in result


def test_encoder_metrics__neutral_rows_do_not_enter_the_correlation() -> None:
    """Identity rows (label 0, type training) do."""
    encoded = random_table("alternative")
    training = encoded[encoded["type"] == "training"]
    pair = training[training["label"] != 0]
    assert metrics(encoded, "alternative")["correlation"] == metrics(training, "alternative")["correlation"]
    assert metrics(training, "alternative")["correlation"] != metrics(pair, "alternative")["correlation"]
    assert metrics(encoded, "alternative")["target_classes_only"] == metrics(pair, "alternative")["target_classes_only"]


@pytest.mark.parametrize("source", SOURCES)
def test_encoder_metrics__are_plain_json_without_nan(source: str) -> None:
    """A numpy number, or a NaN of a group of one row, would break the file."""
    encoded = random_table(source).drop(index=range(8, 11))  # one row of the second direction remains
    encoded.loc[:, "data_split"] = "test"
    result = metrics(encoded, source)
    json.dumps(result, allow_nan=False)
    assert set(result["mean_by_class"]) == {-1.0, 0.0, 1.0}
    assert all(type(key) is float for key in result["mean_by_class"])
    assert all(type(count) is int for count in result["sample_counts"]["by_type"].values())
    assert all(type(key) is str for key in result["mean_by_feature_class"])


@pytest.mark.parametrize("source", SOURCES)
def test_encoder_metrics__survive_the_file(source: str) -> None:
    """The file turns directions into floats and missing words into NaN."""
    encoded = random_table(source)
    read = pd.read_csv(StringIO(encoded.to_csv(index=False)), float_precision="round_trip")
    assert metrics(read, source) == metrics(encoded, source)


def test_encoder_metrics__constant_encodings_have_no_correlation() -> None:
    """0.1 has no exact mean: a standard deviation would be tiny, not 0, and the quotient noise."""
    rows = unified(("M", "F"), ("M", "F"), ("F", "M"))
    result = metrics(table(rows, [0.1, 0.1, 0.1]))
    assert result["correlation"] == 0.0
    assert result["all_data"]["correlation"] == 0.0


@pytest.mark.parametrize(
    ("source", "present", "missing"),
    [("factual", ("M", "F"), "F"), ("alternative", ("M", "F"), "F"), ("diff", ("F", "M"), "M")],
)
def test_encoder_metrics__name_the_class_without_rows(source: str, present: tuple[str, str], missing: str) -> None:
    """For alternative gradients the missing *label* is that of the present class: the message must not name it."""
    encoded = table(unified(present, present, splits=("validation",)), [0.1, 0.2], source)
    with pytest.raises(UserError, match=f"split validation has no row of class '{missing}': add"):
        metrics(encoded, source)


def test_encoder_metrics__only_neutral_rows_are_an_error() -> None:
    encoded = join_encodings(neutral_encoding_rows(neutral(3, "neutral_dataset"), np.zeros(3))).assign(eval_group=None)
    with pytest.raises(UserError, match="evaluation data has no row of class 'M' and none of 'F'"):
        metrics(encoded)


def test_encoder_metrics__refuse_encodings_that_are_not_numbers() -> None:
    encoded = random_table("factual")
    encoded.loc[[3, 5], "encoded"] = [np.nan, np.inf]
    with pytest.raises(UserError, match=r"row 3 \(and 1 more\).*learning_rate"):
        metrics(encoded)


def test_encoder_metrics__refuse_foreign_tables() -> None:
    with pytest.raises(UserError, match="no column 'eval_group'"):
        metrics(random_table("factual").drop(columns="eval_group"))
    with pytest.raises(UserError, match="class 'N'.*all_classes"):
        encoder_metrics(random_table("factual"), target_classes=PAIR, all_classes=PAIR, source="factual")


def test_encoder_metrics__keep_directions_into_one_class_apart() -> None:
    """Named by the encoded class alone, the mean of M→F would be overwritten by that of N→F."""
    encoded = table(unified(("M", "F"), ("F", "M"), ("N", "N")), [0.1, 0.2, 0.3], "alternative")
    encoded.loc[2, ["source_id", "target_id"]] = "F"
    # a neutral row has no group, which turns the numbers of the others into floats
    encoded = join_encodings(encoded, neutral_encoding_rows(neutral(1, "neutral_dataset"), np.zeros(1)))
    result = metrics(encoded, "alternative")
    assert result["mean_by_eval_group"] == {"0": 0.1, "M (identity)": 0.2, "2": 0.3}
    assert result["sample_counts"]["training_by_eval_group"] == {"0": 1, "M (identity)": 1, "2": 1}
    assert result["label_value_to_class_name"][-1.0] == "F"


def test_encoder_metrics__labels_shared_by_classes_are_named_by_sign() -> None:
    encoded = table(unified(("M", "F"), ("F", "M"), ("M", "F")), [0.1, 0.2, 0.3])
    encoded.loc[2, "source_id"] = "N"
    assert metrics(encoded)["label_value_to_class_name"] == {-1.0: "F", 1.0: "positive"}


def test_encoder_metrics__several_latents() -> None:
    """The first latent is what one latent would be; each has its correlation."""
    rows = unified(*[("M", "F"), ("F", "M")] * 4, ("M", "F"))
    latents = np.random.default_rng(1).normal(size=(9, 3)).astype(np.float32)
    wide, narrow = table(rows, latents), table(rows, latents[:, 0])
    assert list(wide.columns) == [*TRAINING_COLUMNS, "encoded_1", "encoded_2"]
    result = metrics(wide)
    by_latent = result.pop("correlation_by_latent")
    assert result == metrics(narrow)
    assert by_latent == [metrics(table(rows, latents[:, j]))["correlation"] for j in range(3)]
    wide.loc[4, "encoded_2"] = np.nan
    with pytest.raises(UserError, match="row 4"):
        metrics(wide)


# Several splits


def test_split_generalization__by_hand() -> None:
    rows = unified(*[("M", "F")] * 4, *[("F", "M")] * 4, ("N", "N"), splits=("train", "test"))
    encodings = [0.8, 0.4, 0.6, 0.4, -0.5, -0.5, -0.3, 0.1, 0.9]
    result = metrics(table(rows, encodings))["split_generalization"]
    assert result["splits_compared"] == result["splits_present"] == ["train", "test"]
    assert result["mean_by_feature_class_by_split"] == {
        "F": {"test": pytest.approx(-0.2), "train": pytest.approx(-0.4)},
        "M": {"test": pytest.approx(0.4), "train": pytest.approx(0.7)},
    }
    assert result["shift_by_feature_class"] == {"F": pytest.approx(0.2), "M": pytest.approx(0.3)}
    assert result["epsilon"] == 1e-6
    expected = {"F": 1 - 0.2 / (0.6 + 1e-6), "M": 1 - 0.3 / (1.1 + 1e-6)}
    assert result["agreement_by_feature_class"] == pytest.approx(expected, abs=1e-12)
    assert result["agreement_worst"] == pytest.approx(expected["F"])
    assert result["agreement"] == pytest.approx(sum(expected.values()) / 2)
    smd = 0.3 / np.std([0.8, 0.4, 0.6, 0.4], ddof=1)
    assert result["smd_by_feature_class"]["M"] == pytest.approx(smd)


def test_split_generalization__of_differences_is_by_direction() -> None:
    """The reference raises for source=diff, whose ids are no class names, and so never evaluates it."""
    result = metrics(random_table("diff"), "diff")["split_generalization"]
    assert set(result["mean_by_feature_class_by_split"]) == {"0", "1"}


def test_split_generalization__neutral_rows_are_no_split() -> None:
    """They are all marked test; train and validation must then still be the splits compared."""
    encoded = random_table("factual", splits=("train", "validation"))
    assert metrics(encoded)["split_generalization"]["splits_compared"] == ["train", "validation"]


def test_split_generalization__names_the_class_missing_in_a_split() -> None:
    rows = unified(("M", "F"), ("M", "F"), ("F", "M"), splits=("train", "test"))
    with pytest.raises(UserError, match="nothing of class 'F' is encoded in test"):
        metrics(table(rows, [0.1, 0.2, 0.3]))


# Negated encoders


@pytest.mark.parametrize("source", SOURCES)
def test_flip__equals_the_metrics_of_the_negated_encodings(source: str) -> None:
    """Every field: a mean that keeps its sign, a quartile not exchanged or a stale accuracy would differ."""
    encoded = random_table(source)
    negated = encoded.assign(encoded=-encoded["encoded"])
    flipped, expected = flip(metrics(encoded, source)), metrics(negated, source)
    assert_close(flipped, expected)
    assert flipped["training_only"]["accuracy"] != metrics(encoded, source)["training_only"]["accuracy"]


def test_flip__twice_is_nothing_and_leaves_its_input_alone() -> None:
    rows = unified(*[("M", "F"), ("F", "M")] * 3, splits=("train", "train", "test"))
    before = metrics(table(rows, np.random.default_rng(2).normal(size=(6, 2))))
    copy = json.dumps(before)
    assert flip(flip(before)) == before
    assert flip(before)["correlation_by_latent"] == [-value for value in before["correlation_by_latent"]]
    assert json.dumps(before) == copy


def test_flip__refuses_fields_it_does_not_know() -> None:
    with pytest.raises(AssertionError, match="training_rows"):
        flip({"correlation": -0.9, "training_rows": []})


def assert_close(left: Any, right: Any) -> None:
    """Equal keys and order-free equal values; quartiles of negated numbers are interpolated from the other side."""
    if isinstance(left, dict):
        assert set(left) == set(right)
        for key in left:
            assert_close(left[key], right[key])
    elif isinstance(left, float):
        assert left == pytest.approx(right, rel=1e-12, abs=1e-12)
    else:
        assert left == right
