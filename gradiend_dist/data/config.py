"""What feature to learn and from which rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from gradiend_dist.config.checks import check_path, fits
from gradiend_dist.config.fields import FLAG, NO_FLAG, documented
from gradiend_dist.config.foreign import OF_FEATURE, accepting
from gradiend_dist.config.groups.feature import ClassArguments
from gradiend_dist.data.splits import HELDOUT, GroupKey, Ratios, normalise_split
from gradiend_dist.errors import UserError

SPLIT_COLUMN = "split"

# Agg draws images below 2^16 pixels in each direction; the widest plot has 20 inches.
HIGHEST_DPI = 2400


@accepting(OF_FEATURE)
@documented
@dataclass(kw_only=True)
class TextPredictionConfig(ClassArguments):
    """What feature to learn and from which rows: the reference's data fields with its defaults."""

    data: str | Path | pd.DataFrame | dict[str, pd.DataFrame] | None = field(default=None, metadata={FLAG: str | None})
    """CSV, Parquet or JSONL file, directory, or hub id with a subset per class; in Python also a table, or a table for
    each class."""
    hf_dataset: str | None = None
    """Hub id of a dataset that is one table."""
    hf_subset: str | list[str] | None = field(default=None, metadata={FLAG: list[str] | None})
    """Subsets of hf_dataset. None: all."""
    hf_splits: list[str] | None = None
    """Splits of the hub dataset. None: all."""
    dataset_trust_remote_code: bool | None = None
    """Passed on to datasets.load_dataset unless None."""
    run_id: str | None = None
    """Results go to experiment_dir/run_id."""
    target_classes: list[str] | None = None
    """The two classes; the first is encoded towards +1. None: the data has exactly two, sorted."""
    all_classes: list[str] | None = None
    """All classes that matter, also those outside the feature. None: all in the data."""
    masked_col: str = "masked"
    """Column of the sentence with the blank."""
    label_col: str = "label"
    """Column of the word at the blank."""
    label_class_col: str = "label_class"
    """Column of that word's class."""
    alternative_col: str | None = "alternative"
    """Column of the alternative word."""
    alternative_class_col: str | None = "alternative_class"
    """Column of the alternative word's class."""
    use_class_names_as_columns: bool = True
    """Take columns named like classes as their words."""
    split_col: str | None = SPLIT_COLUMN
    """Column of the split; null: split rows at random; heldout: by word, so that no word is in two splits."""
    split_group_col: str | None = None
    """With heldout: the column that is not shared between splits, factual (default) or masked."""
    split_group_key: GroupKey = field(default=None, metadata={FLAG: NO_FLAG})
    """With heldout: function(s) that map equivalent values to one; None: strip and casefold. Python only."""
    split_ratios: Sequence[float] | Mapping[str, float] | None = field(default=None, metadata={FLAG: NO_FLAG})
    """Shares of train, validation and test in one, in place of the three below; Python only."""
    split_train_ratio: float = 0.8
    """Share of the train split."""
    split_val_ratio: float = 0.1
    """Share of the validation split."""
    split_test_ratio: float = 0.1
    """Share of the test split."""
    max_counterfactuals_per_sentence: int = 1
    """Different alternatives drawn for each sentence that has none written down."""
    random_state: int | None = None
    """Seed of drawn alternatives. None: seed."""
    eval_neutral_data: pd.DataFrame | list[str] | str | Path | None = field(default=None, metadata={FLAG: str | None})
    """File (CSV, Parquet, JSONL, text) or hub id of sentences without the feature; in Python also a table or a list."""
    eval_neutral_additional_excluded_words: list[str] | None = None
    """Words never hidden in them, besides the targets."""
    eval_neutral_max_rows: int | None = None
    """Use only the first neutral sentences, at most this many."""
    second_neutral_data: pd.DataFrame | list[str] | str | Path | None = field(default=None, metadata={FLAG: str | None})
    """The same of another kind of text: the harm of a rewritten model is measured on it as well."""
    decoder_eval_targets: dict[str, list[str]] | str | None = field(
        default=None, metadata={FLAG: dict[str, Any] | str | None}
    )
    """Words of each class for the decoder grid, as YAML: '{M: [he], F: [she]}', or label: each row's own. None: all
    words of a class in the data, each row's own where classes share words."""
    decoder_eval_restrict_to_target_classes: bool = True
    """Of these, measure the target classes alone."""
    decoder_eval_prob_on_other_class: bool = True
    """Strengthening counts on the other class's rows. False: on its own."""
    decoder_eval_export_row_wise_csv: bool = False
    """Also write each row's probabilities under the base model."""
    decoder_eval_ignore_tokens: list[str] | None = None
    """Words left out of the language-model score. None: those of the feature, where its rows are the text."""
    decoder_eval_lms_max_samples: int | None = None
    """Rows and texts of the decoder grid, at most, where no other cap is given."""
    img_format: str = "png"
    """Format of plots."""
    img_dpi: int | None = None
    """Resolution of plots."""

    def __post_init__(self) -> None:
        if self.data is not None and self.hf_dataset is not None:
            raise UserError("data and hf_dataset are both given: give the one to read.")
        if self.hf_subset is not None and self.hf_dataset is None:
            raise UserError(f"hf_subset={self.hf_subset!r} needs hf_dataset: name the hub dataset there.")
        self.check()
        for name in ("data", "run_id", "eval_neutral_data", "second_neutral_data"):
            if isinstance(vars(self)[name], str | Path):
                check_path(name, vars(self)[name])
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
        if self.img_dpi is not None and self.img_dpi > HIGHEST_DPI:
            raise UserError(f"img_dpi={self.img_dpi} is more than any plot needs: pass at most {HIGHEST_DPI}.")
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
