"""What feature to learn and from which rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from gradiend_dist.config.checks import fits
from gradiend_dist.data.splits import HELDOUT, GroupKey, Ratios, normalise_split
from gradiend_dist.errors import UserError

SPLIT_COLUMN = "split"


@dataclass(kw_only=True)
class TextPredictionConfig:
    """What feature to learn and from which rows: the reference's data fields with its defaults."""

    data: str | Path | pd.DataFrame | dict[str, pd.DataFrame] | None = None
    """A table, a frame per class, a csv/parquet/jsonl file, a directory, or a hub id with a configuration per class."""
    hf_dataset: str | None = None
    """Hub id of a dataset that is one table."""
    hf_subset: str | list[str] | None = None
    """Configurations of hf_dataset to read; None: all."""
    hf_splits: list[str] | None = None
    """Splits of the hub dataset to read; None: all."""
    dataset_trust_remote_code: bool | None = None
    """Passed to `datasets.load_dataset` unless None."""
    target_classes: list[str] | None = None
    """The two classes of the feature: the first is encoded towards +1. None: the data has exactly two, sorted."""
    all_classes: list[str] | None = None
    """All classes that matter, also those outside the feature; None: all in the data."""
    masked_col: str = "masked"
    """Column with the sentence, the placeholder in place of the token."""
    label_col: str = "label"
    """Column with the token that stands in the sentence."""
    label_class_col: str = "label_class"
    """Column with the class of that token."""
    mask_placeholder: str = "[MASK]"
    """What marks the token's place in the sentences; independent of the tokenizer's mask token."""
    split_col: str | None = SPLIT_COLUMN
    """Column with the split; None: split rows at random; "heldout": no token is in two splits."""
    split_group_col: str | None = None
    """With "heldout": the column whose values must not be in two splits, "factual" (default) or "masked"."""
    split_group_key: GroupKey = None
    """With "heldout": function(s) that map equivalent values to one; default: strip and casefold."""
    split_ratios: Sequence[float] | Mapping[str, float] | None = None
    """Shares of train, validation and test, if given in place of the three below."""
    split_train_ratio: float = 0.8
    split_val_ratio: float = 0.1
    split_test_ratio: float = 0.1
    alternative_col: str | None = "alternative"
    """Column of a table with the token of the other class."""
    alternative_class_col: str | None = "alternative_class"
    """Column of a table with that other class."""
    use_class_names_as_columns: bool = True
    """A column named like a class holds the tokens of that class."""
    max_counterfactuals_per_sentence: int = 1
    """How many different alternatives are drawn for a sentence that has none written down."""
    random_state: int | None = None
    """Seed of those draws; None: the seed of the run."""
    class_merge_map: dict[str, list[str]] | None = None
    """New class -> the classes of the data that it consists of."""
    class_merge_transition_groups: list[list[str]] | None = None
    """Only classes of the data that share a group are each other's alternatives."""
    eval_neutral_data: pd.DataFrame | list[str] | str | Path | None = None
    """Texts without the feature: frame, list, file (csv, parquet, jsonl, txt) or hub id."""
    eval_neutral_additional_excluded_words: list[str] | None = None
    """Words that are never masked in neutral texts, besides the targets."""
    eval_neutral_max_rows: int | None = None
    """Use only the first neutral texts."""
    decoder_eval_targets: dict[str, list[str]] | str | None = None
    """Each class's words whose probabilities are measured; "label": each row's own; None: all words of a class in the
    data, each row's own where classes share words."""
    decoder_eval_restrict_to_target_classes: bool = True
    """Measure the words of the target classes alone, if more are given."""
    decoder_eval_prob_on_other_class: bool = True
    """A class is strengthened by its probability on the other class's rows; False: on its own."""
    decoder_eval_export_row_wise_csv: bool = False
    """Also write the base model's probabilities of each row's own words."""
    decoder_eval_ignore_tokens: list[str] | None = None
    """Words that do not count in the language-model score; None: those of the feature, where its rows are the text."""
    decoder_eval_lms_max_samples: int | None = None
    """At most this many rows and texts of a decoder evaluation, where no other cap is given."""
    run_id: str | None = None
    """Sub-directory of the experiment."""
    img_format: str = "png"
    """File type of plots."""
    img_dpi: int | None = None
    """Resolution of plots."""

    def __post_init__(self) -> None:
        if self.data is not None and self.hf_dataset is not None:
            raise UserError("data and hf_dataset are both given: give the one to read.")
        if self.hf_subset is not None and self.hf_dataset is None:
            raise UserError(f"hf_subset={self.hf_subset!r} needs hf_dataset: name the hub dataset there.")
        if not self.mask_placeholder:
            raise UserError("mask_placeholder is empty: give the marker that stands in the sentences, e.g. '[MASK]'.")
        if self.run_id is not None and (Path(self.run_id).is_absolute() or ".." in Path(self.run_id).parts):
            raise UserError(f"run_id={self.run_id!r} leads out of experiment_dir: give the name of a directory in it.")
        targets = self.decoder_eval_targets
        if targets != "label" and not fits(targets, dict[str, list[str]] | None):
            raise UserError(
                f"decoder_eval_targets={targets!r} must map classes to lists of words, or be 'label': each row's own."
            )
        self._check_classes()
        self._check_counts()
        self._check_splits()

    def _check_classes(self) -> None:
        self.target_classes = _different("target_classes", self.target_classes)
        self.all_classes = _different("all_classes", self.all_classes)
        if self.target_classes is not None and len(self.target_classes) != 2:
            raise UserError(f"target_classes={self.target_classes!r} must name exactly two classes.")
        outside = [name for name in self.target_classes or () if self.all_classes and name not in self.all_classes]
        if outside:
            raise UserError(f"target class {outside[0]!r} is not in all_classes={self.all_classes!r}: add it there.")
        self._check_merging()

    def _check_merging(self) -> None:
        if not fits(self.class_merge_map, dict[str, list[str]] | None):
            raise UserError(f"class_merge_map={self.class_merge_map!r} must map a merged class to a list of classes.")
        bases = [base for members in (self.class_merge_map or {}).values() for base in members]
        repeated = [base for base, count in Counter(bases).items() if count > 1]
        if repeated:
            raise UserError(f"class_merge_map has class {repeated[0]!r} twice: each class belongs to one merged class.")
        if self.class_merge_map is not None and not all(self.class_merge_map.values()):
            raise UserError(f"class_merge_map={self.class_merge_map!r} has a merged class without members.")
        for group in self.class_merge_transition_groups or ():
            if isinstance(group, str) or len(set(group)) < 2:
                raise UserError(f"class_merge_transition_groups has {group!r}: a group needs at least two classes.")

    def _check_counts(self) -> None:
        counts = {
            "max_counterfactuals_per_sentence": self.max_counterfactuals_per_sentence,
            "eval_neutral_max_rows": self.eval_neutral_max_rows,
            "decoder_eval_lms_max_samples": self.decoder_eval_lms_max_samples,
            "img_dpi": self.img_dpi,
        }
        for name, value in counts.items():
            if value is not None and value < 1:
                raise UserError(f"{name}={value} must be at least 1.")
        if self.random_state is not None and not 0 <= self.random_state < 2**32:
            raise UserError(f"random_state={self.random_state} is not in [0, 2^32): give another.")

    def _check_splits(self) -> None:
        self.split_train_ratio, self.split_val_ratio, self.split_test_ratio = self._given_ratios()
        if not (min(self.ratios) >= 0 and abs(sum(self.ratios) - 1) <= 1e-6):  # so that NaN is refused
            raise UserError(f"The shares of train, validation and test are {self.ratios}: they must add up to 1.")
        if self.split_col != HELDOUT and (self.split_group_col is not None or self.split_group_key is not None):
            raise UserError("split_group_col and split_group_key need split_col='heldout': set it, or leave them out.")
        if self.split_group_col not in (None, "factual", "masked"):
            raise UserError(f"split_group_col={self.split_group_col!r} must be 'factual' or 'masked'.")
        steps = self.split_group_key if isinstance(self.split_group_key, (list, tuple)) else [self.split_group_key]
        if self.split_group_key is not None and not all(callable(step) for step in steps):
            raise UserError(f"split_group_key={self.split_group_key!r} must be a function or a list of functions.")

    def _given_ratios(self) -> Ratios:
        given = self.split_ratios
        if given is None:
            return self.ratios
        if isinstance(given, Mapping):
            named = {normalise_split(name): share for name, share in given.items()}
            if sorted(named) != ["test", "train", "validation"]:
                raise UserError(f"split_ratios={given!r} must have the keys 'train', 'validation' and 'test'.")
            given = [named["train"], named["validation"], named["test"]]
        if len(given) != 3:
            raise UserError(f"split_ratios={given!r} must give three shares: train, validation, test.")
        return float(given[0]), float(given[1]), float(given[2])

    @property
    def ratios(self) -> Ratios:
        """Shares of train, validation and test."""
        return self.split_train_ratio, self.split_val_ratio, self.split_test_ratio


def _different(name: str, classes: Sequence[object] | None) -> list[str] | None:
    if classes is None:
        return None
    names = [classes] if isinstance(classes, str) else [str(item) for item in classes]
    if isinstance(classes, str) or len(set(names)) != len(names):
        raise UserError(f"{name}={classes!r} must be a list of different classes.")
    return names
