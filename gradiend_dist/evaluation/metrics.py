"""Numbers of an encoder evaluation, from a table of encodings to the fields of the reference's `evaluate_encoder`.

The table has one row per encoded gradient and the columns of the reference's CSV file. Its label names the class of the
*encoded* token: +1 the first target class, -1 the second, 0 any other. Fields `*_by_class` are keyed by that label as a
float, fields `*_by_feature_class` by the class's name.

With several latents, `encoded` is the first one, to which every field of the reference refers; the others are the
columns `encoded_1`, `encoded_2`, ..., and the result has one field more: `correlation_by_latent`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from gradiend_dist.errors import UserError

SOURCES = ("factual", "alternative", "diff")

TRAINING_COLUMNS = (
    "text", "encoded", "label", "source_id", "target_id", "feature_class_id", "eval_group", "type",
    "source_token", "factual_token", "alternative_token", "template", "data_split",
)  # fmt: skip

CSV_COLUMNS = (
    *TRAINING_COLUMNS,
    "factual_id", "counterfactual_id", "transition_id", "input_type", "input_text", "masked", "neutral_variant",
)  # fmt: skip

NEEDED_COLUMNS = (
    "encoded", "label", "source_id", "target_id", "feature_class_id", "eval_group", "type", "source_token",
    "data_split",
)  # fmt: skip

NEUTRAL_TYPES = ("neutral_training_masked", "neutral_dataset")

BOUNDARIES = {"neg_boundary": -0.5, "pos_boundary": 0.5, "neutral_boundary": 0.0}

STANDARD_SPLITS = ("train", "validation", "test")

# How a negated encoder changes each field. `flip` refuses a field that is in none of the lists.
NEGATED = (
    "correlation", "correlation_by_latent", "mean_by_class", "mean_by_type", "neutral_mean_by_type",
    "mean_by_feature_class", "mean_by_eval_group", "mean_by_target",
)  # fmt: skip

EXCHANGED = {
    f"{one}_by_{group}": f"{other}_by_{group}"
    for group in ("class", "feature_class")
    for one, other in (("min", "max"), ("max", "min"), ("q1", "q3"), ("q3", "q1"))
}

SCORES = ("all_data", "training_only", "target_classes_only")

UNCHANGED = (
    "n_samples", "sample_counts", "boundaries", "std_by_class", "n_by_class", "std_by_feature_class",
    "n_by_feature_class", "abs_mean_by_type", "eval_group_basis", "label_value_to_class_name",
)  # fmt: skip

FloatArray = npt.NDArray[np.float64]


# Tables of encodings


def encoding_rows(
    rows: pd.DataFrame,
    encodings: npt.NDArray[Any],
    *,
    source: str,
    target_classes: tuple[str, str],
    mask_placeholder: str,
) -> pd.DataFrame:
    """Table of encoded unified rows, in their order; `encodings` is [rows] or [rows, latents].

    `rows` carry the label of the *factual* class. Where the alternative's gradient was encoded it is negated here, so
    that it names the encoded token. The columns are `TRAINING_COLUMNS`: the reference writes the others of
    `CSV_COLUMNS` only in the presence of neutral rows.
    """
    _assert_factual_labels(rows, target_classes)
    labels = rows["label"].astype(int)  # as integers, or the negated 0 would be a -0.0 in the file
    source_id, source_token = _encoded_side(rows, source)
    columns = {
        "text": _filled(rows, mask_placeholder),
        "label": (-labels if source == "alternative" else labels).astype(float),
        "source_id": source_id,
        "target_id": rows["alternative_class"],
        "feature_class_id": rows["feature_class_id"],
        "eval_group": source_id if source == "factual" else rows["feature_class_id"],
        "type": "training",
        "source_token": source_token,
        "factual_token": rows["factual"],
        "alternative_token": rows["alternative"],
        "template": rows["masked"],
        "data_split": rows["split"].str.lower().replace({"val": "validation"}),
    }
    return _with_encodings(columns, encodings, rows.index, TRAINING_COLUMNS)


def neutral_encoding_rows(rows: pd.DataFrame, encodings: npt.NDArray[Any]) -> pd.DataFrame:
    """Table of encoded neutral rows (see `evaluation.neutral`), all encoded from their factual gradient."""
    columns = {
        "text": rows["text"],
        "label": 0.0,
        "source_id": rows["factual_class"],
        "target_id": rows["alternative_class"],
        "feature_class_id": rows["feature_class_id"],
        "type": rows["type"],
        "source_token": rows["factual"],
        "factual_token": rows["factual"],
        "alternative_token": rows["alternative"],
        "template": rows["masked"],
        "data_split": rows["split"],
        "factual_id": rows["factual_class"],
        "counterfactual_id": rows["alternative_class"],
        "transition_id": rows["feature_class_id"],
        "input_type": "factual",
        "input_text": rows["input_text"],
        "masked": rows["masked"],
        "neutral_variant": rows["type"],
    }
    # Neutral rows belong to no evaluation group: the column comes in as missing when the tables are joined.
    order = tuple(name for name in CSV_COLUMNS if name != "eval_group")
    return _with_encodings(columns, encodings, rows.index, order)


def join_encodings(*tables: pd.DataFrame) -> pd.DataFrame:
    """One table of the non-empty ones, with the columns in the order of the reference's file."""
    return pd.concat([table for table in tables if len(table)], ignore_index=True)


def _assert_factual_labels(rows: pd.DataFrame, target_classes: tuple[str, str]) -> None:
    by_class = rows["factual_class"].map({target_classes[0]: 1, target_classes[1]: -1}).fillna(0)
    wrong = rows.index[by_class != rows["label"]].tolist()
    assert not wrong, f"labels must be +1, -1 or 0 by factual class {target_classes}, but rows {wrong[:5]} differ"


def _encoded_side(rows: pd.DataFrame, source: str) -> tuple[Any, Any]:
    """Class and word whose gradient the encoder reads; a difference has a direction instead of a class and no word."""
    assert source in SOURCES, f"source is one of {SOURCES}, not {source!r}"
    if source == "diff":
        return rows["feature_class_id"], None
    return rows[f"{source}_class"], rows[source]


def _filled(rows: pd.DataFrame, mask_placeholder: str) -> list[str]:
    pairs = zip(rows["masked"], rows["factual"], strict=True)
    return [template.replace(mask_placeholder, word) for template, word in pairs]


def _with_encodings(
    columns: dict[str, Any], encodings: npt.NDArray[Any], index: pd.Index, order: tuple[str, ...]
) -> pd.DataFrame:
    latents = np.asarray(encodings, dtype=np.float64)
    if latents.ndim == 1:
        latents = latents[:, None]
    assert latents.ndim == 2 and len(latents) == len(index), f"{len(index)} rows, but encodings {latents.shape}"
    table = pd.DataFrame({**columns, "encoded": latents[:, 0]}, index=index)[list(order)]
    for j in range(1, latents.shape[1]):
        table[f"encoded_{j}"] = latents[:, j]
    return table.reset_index(drop=True)


# Metrics


def encoder_metrics(
    encoded: pd.DataFrame, *, target_classes: tuple[str, str], all_classes: tuple[str, ...], source: str
) -> dict[str, Any]:
    """Every field of the reference's evaluation that the table gives rise to; fields of absent rows are absent.

    Neutral rows count in `n_samples`, `sample_counts`, `all_data` and the means by type only. The result holds Python
    numbers, strings, lists and dicts. Beyond the reference's fields, each of the three scores has
    `accuracy_if_negated`, without which `flip` could not know the accuracy of the negated encoder.
    """
    assert source in SOURCES, f"source is one of {SOURCES}, not {source!r}"
    _require_columns(encoded)
    _require_finite(encoded)
    training = encoded[~_is_neutral(encoded)]
    _require_two_labels(training, target_classes, source)
    if source != "diff":
        _require_known_classes(training, all_classes)
    targets = training[training["label"] != 0]
    result = {
        "n_samples": len(encoded),
        "all_data": _scores(encoded, _ternary),
        "training_only": _scores(training, _ternary),
        "target_classes_only": _scores(targets, _binary),
        "boundaries": dict(BOUNDARIES),
        **_correlations(training),
        **_statistics(training, "label", "class", float),
        **_statistics(training, "source_id", "feature_class", str),
        **_means_by_type(encoded),
        **_eval_groups(encoded, training, source),
        "label_value_to_class_name": _label_names(training),
        "mean_by_target": _means_by_target(training),
        "split_generalization": _split_generalization(training, target_classes, source),
    }
    return {name: value for name, value in result.items() if value != {}}


def _is_neutral(encoded: pd.DataFrame) -> pd.Series[bool]:
    return encoded["type"].astype(str).str.startswith("neutral")


def _require_columns(encoded: pd.DataFrame) -> None:
    missing = [name for name in NEEDED_COLUMNS if name not in encoded.columns]
    if missing:
        raise UserError(
            f"The table of encodings has no column {missing[0]!r}: pass one that evaluate_encoder(return_df=True) made."
        )


def _latent_columns(encoded: pd.DataFrame) -> list[str]:
    names = ["encoded"]
    while f"encoded_{len(names)}" in encoded.columns:
        names.append(f"encoded_{len(names)}")
    return names


def _require_finite(encoded: pd.DataFrame) -> None:
    latents = encoded[_latent_columns(encoded)].to_numpy(dtype=np.float64)
    wrong = np.flatnonzero(~np.isfinite(latents).all(axis=1))
    if len(wrong):
        raise UserError(
            f"The encoding of row {wrong[0]} (and {len(wrong) - 1} more) is not a finite number, so the encoder has "
            "diverged: train with a lower learning_rate."
        )


def _require_two_labels(training: pd.DataFrame, target_classes: tuple[str, str], source: str) -> None:
    """A correlation needs two labels; name the classes whose rows would have given the missing ones."""
    labels = set(training["label"].astype(float))
    if len(labels) > 1:
        return
    # Rows of one class are encoded as the other one where the alternative's gradient is read.
    row_labels = (-1.0, 1.0) if source == "alternative" else (1.0, -1.0)
    missing = [name for name, label in zip(target_classes, row_labels, strict=True) if label not in labels]
    splits = ordered_splits(training["data_split"])
    where = f"split {' and '.join(splits)}" if splits else "evaluation data"
    raise UserError(
        f"A correlation needs rows of both target classes, but the {where} has no row of class "
        f"{' and none of '.join(map(repr, missing))}: add such rows or evaluate another split."
    )


def _require_known_classes(training: pd.DataFrame, all_classes: tuple[str, ...]) -> None:
    for name in training["source_id"].astype(str).unique():
        if name not in all_classes:
            raise UserError(
                f"The table of encodings names the class {name!r} in source_id, which is not one of all_classes "
                f"{list(all_classes)}: pass the table of this experiment or add the class to all_classes."
            )


def ordered_splits(names: pd.Series[Any]) -> list[str]:
    """The distinct split names: train, validation, test, then others by name."""
    present = names.dropna().astype(str).unique().tolist()
    return [name for name in STANDARD_SPLITS if name in present] + sorted(set(present) - set(STANDARD_SPLITS))


def _correlation(labels: pd.Series[Any], encoded: pd.Series[Any]) -> float:
    x, y = (values.to_numpy(dtype=np.float64) for values in (labels, encoded))
    if x.min() == x.max() or y.min() == y.max():
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


def _correlations(training: pd.DataFrame) -> dict[str, Any]:
    values = [_correlation(training["label"], training[name]) for name in _latent_columns(training)]
    return {"correlation": values[0], **({"correlation_by_latent": values} if len(values) > 1 else {})}


def _ternary(values: FloatArray) -> FloatArray:
    lower, upper = BOUNDARIES["neg_boundary"], BOUNDARIES["pos_boundary"]
    return np.where(values <= lower, -1.0, np.where(values >= upper, 1.0, 0.0))


def _binary(values: FloatArray) -> FloatArray:
    return np.where(values >= BOUNDARIES["neutral_boundary"], 1.0, -1.0)


def _scores(rows: pd.DataFrame, classify: Callable[[FloatArray], FloatArray]) -> dict[str, float]:
    encoded = rows["encoded"].to_numpy(dtype=np.float64)
    wanted = classify(rows["label"].to_numpy(dtype=np.float64))
    return {
        "correlation": _correlation(rows["label"], rows["encoded"]),
        "accuracy": float(np.mean(classify(encoded) == wanted)),
        "accuracy_if_negated": float(np.mean(classify(-encoded) == wanted)),
    }


def _statistics(training: pd.DataFrame, column: str, name: str, key: Callable[[Any], Any]) -> dict[str, dict[Any, Any]]:
    """The seven `*_by_<name>` fields. Series methods, because the sums of `groupby.agg` differ in the last bit."""
    by_group = {key(value): _describe(group["encoded"]) for value, group in training.groupby(column)}
    statistics = ("mean", "min", "max", "q1", "q3", "std", "n")
    return {f"{s}_by_{name}": {group: numbers[s] for group, numbers in by_group.items()} for s in statistics}


def _describe(encoded: pd.Series[Any]) -> dict[str, float]:
    return {
        "mean": float(encoded.mean()),
        "min": float(encoded.min()),
        "max": float(encoded.max()),
        "q1": float(encoded.quantile(0.25)),
        "q3": float(encoded.quantile(0.75)),
        "std": float(encoded.std(ddof=1)) if len(encoded) > 1 else 0.0,
        "n": len(encoded),
    }


def _means_by_type(encoded: pd.DataFrame) -> dict[str, dict[str, float]]:
    groups = {str(name): group["encoded"] for name, group in encoded.groupby("type")}
    means = {name: float(values.mean()) for name, values in groups.items()}
    return {
        "mean_by_type": means,
        "abs_mean_by_type": {name: float(values.abs().mean()) for name, values in groups.items()},
        "neutral_mean_by_type": {name: means[name] for name in NEUTRAL_TYPES if name in means},
    }


def _eval_groups(encoded: pd.DataFrame, training: pd.DataFrame, source: str) -> dict[str, Any]:
    """Counts and means by evaluation group: the class if factual gradients were encoded, the direction otherwise.

    The reference leaves the groups of an evaluation during training empty; a table without `eval_group` values does so.
    """
    by_type = encoded["type"].astype(str).value_counts().items()
    sizes = training["eval_group"].value_counts()
    names = _eval_group_names(training, source)
    result: dict[str, Any] = {
        "sample_counts": {
            "by_type": {str(name): int(count) for name, count in by_type},
            "training_by_eval_group": {names[_group_id(value)]: int(count) for value, count in sizes.items()},
        }
    }
    if names:
        groups = training.groupby("eval_group")
        result["mean_by_eval_group"] = {names[_group_id(g)]: float(rows["encoded"].mean()) for g, rows in groups}
        result["eval_group_basis"] = "factual_id" if source == "factual" else "feature_class_id"
    return result


def _group_id(value: Any) -> str:
    """A direction is `0` whether or not a missing value elsewhere has turned the column into floats."""
    return str(int(value)) if isinstance(value, int | float | np.number) else str(value)


def _eval_group_names(training: pd.DataFrame, source: str) -> dict[str, str]:
    groups = {_group_id(value): rows for value, rows in training.groupby("eval_group")}
    if source == "factual":
        return {group: group for group in groups}
    names = {group: _direction_name(group, rows) for group, rows in groups.items()}
    shared = [name for name in names.values() if list(names.values()).count(name) > 1]
    # Two directions may end in one class; under one name the later would hide the earlier.
    return {group: group if name in shared else name for group, name in names.items()}


def _direction_name(group: str, rows: pd.DataFrame) -> str:
    """The reference's name: for alternative gradients both ids are the encoded class, hence its "(identity)"."""
    starts, ends = (rows[column].dropna().astype(str).unique().tolist() for column in ("source_id", "target_id"))
    if len(starts) != 1 or len(ends) != 1:
        return group
    return f"{starts[0]} (identity)" if starts == ends else f"{starts[0]}->{ends[0]}"


def _label_names(training: pd.DataFrame) -> dict[float, str]:
    labels = sorted(training["label"].astype(float).unique().tolist())
    return {label: _label_name(label, training["source_id"][training["label"] == label]) for label in labels}


def _label_name(label: float, source_ids: pd.Series[Any]) -> str:
    """Name of a label's class; a sign where several classes share it, the number where directions were encoded."""
    if label == 0:
        return "neutral"
    names = source_ids.astype(str).unique().tolist()
    if len(names) > 1:
        return "positive" if label > 0 else "negative"
    return str(label) if names[0].isdigit() else str(names[0])


def _means_by_target(training: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Mean encoding of each encoded word, by class; differences have no word."""
    tokens = training["source_token"]
    rows = training[tokens.notna() & (tokens.astype(str).str.strip() != "")]
    means: dict[str, dict[str, float]] = {}
    keys = [rows["source_id"].astype(str), rows["source_token"].astype(str)]
    for (name, token), group in rows.groupby(keys):
        means.setdefault(str(name), {})[str(token)] = float(group["encoded"].mean())
    return means


# Several splits in one table


def _split_generalization(training: pd.DataFrame, target_classes: tuple[str, str], source: str) -> dict[str, Any]:
    """How well the class means of train and test (else of the first and last split) agree; empty for one split."""
    rows = training[_between_targets(training, target_classes, source)]
    splits = ordered_splits(rows["data_split"])
    if len(splits) < 2:
        return {}
    first, last = ("train", "test") if "train" in splits and "test" in splits else (splits[0], splits[-1])
    by_class = {str(name): group for name, group in rows.groupby(rows["source_id"].astype(str))}
    means = {name: _means_by_split(group) for name, group in by_class.items()}
    expected = ("0", "1") if source == "diff" else target_classes
    _require_both_splits(means, expected, (first, last))
    spread = float(rows["encoded"].std()) if len(rows) > 1 else 1.0
    epsilon = max(1e-8, 1e-6 * max(1.0, spread))
    differences = {name: mean[first] - mean[last] for name, mean in means.items()}
    sizes = {name: abs(mean[first]) + abs(mean[last]) + epsilon for name, mean in means.items()}
    agreement = {name: min(1.0, max(0.0, 1.0 - abs(differences[name]) / sizes[name])) for name in means}
    return {
        "agreement": float(np.mean(list(agreement.values()))),
        "agreement_worst": min(agreement.values()),
        "agreement_by_feature_class": agreement,
        "mean_by_feature_class_by_split": means,
        "shift_by_feature_class": {name: abs(difference) for name, difference in differences.items()},
        "smd_by_feature_class": {name: _in_deviations(differences[name], by_class[name]) for name in means},
        "epsilon": epsilon,
        "splits_compared": [first, last],
        "splits_present": splits,
    }


def _between_targets(training: pd.DataFrame, target_classes: tuple[str, str], source: str) -> pd.Series[bool]:
    """Rows of the two trained directions. Differences carry a direction (0, 1) where others carry a class."""
    if source == "diff":
        return training["feature_class_id"].isin([0, 1])
    ids = training[["source_id", "target_id"]].astype(str)
    return (training["label"] != 0) & ids.isin(list(target_classes)).all(axis=1)


def _means_by_split(rows: pd.DataFrame) -> dict[str, float]:
    return {str(split): float(group["encoded"].mean()) for split, group in rows.groupby("data_split")}


def _require_both_splits(means: dict[str, dict[str, float]], classes: tuple[str, ...], splits: tuple[str, str]) -> None:
    for name in classes:
        for split in splits:
            if split not in means.get(name, {}):
                raise UserError(
                    f"The splits {splits[0]} and {splits[1]} are compared, but nothing of class {name!r} is encoded in "
                    f"{split}: add rows of both target classes to it or evaluate one split."
                )


def _in_deviations(difference: float, rows: pd.DataFrame) -> float:
    deviation = float(rows["encoded"].std())
    return difference / deviation if deviation > 0 else 0.0


# Negated encoders


def flip(metrics: dict[str, Any]) -> dict[str, Any]:
    """The metrics of the same rows after encoder and decoder have been negated, up to rounding of the quartiles.

    The reference turns only the top-level correlation and the per-class numbers; here every field turns that has to.
    """
    return {name: _flipped(name, metrics) for name in metrics}


def _flipped(name: str, metrics: dict[str, Any]) -> Any:
    value = metrics[name]
    if name in NEGATED:
        return _negated(value)
    if name in EXCHANGED:
        return _negated(metrics[EXCHANGED[name]])
    if name in SCORES:
        return _flipped_scores(value)
    if name == "split_generalization":
        signed = ("mean_by_feature_class_by_split", "smd_by_feature_class")
        return {key: _negated(item) if key in signed else item for key, item in value.items()}
    assert name in UNCHANGED, f"flip does not know how a negated encoder changes the field {name!r}"
    return value


def _flipped_scores(scores: dict[str, float]) -> dict[str, float]:
    return {
        "correlation": -scores["correlation"],
        "accuracy": scores["accuracy_if_negated"],
        "accuracy_if_negated": scores["accuracy"],
    }


def _negated(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _negated(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_negated(item) for item in value]
    return -value
