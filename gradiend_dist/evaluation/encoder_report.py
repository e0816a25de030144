"""evaluate_encoder: a split and neutral texts, encoded, described, and kept while nothing they depend on changes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from gradiend_dist.data.neutral import neutral_dataset_rows, neutral_training_rows
from gradiend_dist.evaluation.encoder import Encoder, EncoderEvaluation, encode_items
from gradiend_dist.evaluation.metrics import encoder_metrics, join_encodings, neutral_encoding_rows
from gradiend_dist.gradients.items import ItemRows
from gradiend_dist.model_with_gradiend import ModelWithGradiend
from gradiend_dist.session import Session
from gradiend_dist.storage.files import explained, read_json, write_json
from gradiend_dist.storage.fingerprint import content_hash, model_files_hash, text_hash

logger = logging.getLogger(__name__)


class EncoderReport:
    """The evaluation of one trained model; see `TextPredictionTrainer.evaluate_encoder`.

    All ranks make it and call its methods.
    """

    def __init__(
        self, session: Session, model: ModelWithGradiend, *, split: str, max_size: int | None, neutral: bool,
        left_alone: list[str],
    ) -> None:  # fmt: skip
        self.session, self.model, self.split, self.max_size = session, model, split, max_size
        self.neutral, self.left_alone = neutral, left_alone
        self.args, self.data = session.args, session.data

    def result(self, directory: Path | None, *, use_cache: bool, return_df: bool) -> dict[str, Any]:
        """The metrics; written to `directory`, or read from it where they are still right. All ranks call this."""
        depends_on = self._fingerprint()
        name = f"encoded_values{f'_max_size_{self.max_size}' if self.max_size else ''}_split_{self.split}"
        stored = None if directory is None else directory / name
        if use_cache and stored is not None:
            found = self.session.comm.first(
                f"looking for {stored.name}", lambda: _stored_evaluation(stored, depends_on, return_df)
            )
            if found is not None:
                return found
        table = self.table()
        result = encoder_metrics(
            table,
            target_classes=self.data.target_classes,
            all_classes=self.data.all_classes,
            source=self.model.source,
        )
        if stored is not None:
            self.session.comm.first(
                f"writing {stored.name}", lambda: _store_evaluation(stored, table, result, depends_on)
            )
        return {**result, "encoder_df": table} if return_df else result

    def table(self) -> pd.DataFrame:
        """One line per encoded row."""
        model, session = self.model, self.session
        gradients = session.gradients_for_encoding(model.gradiend.space, repeated=False)
        evaluation = EncoderEvaluation.of(
            session, gradients, self.split, self.max_size, source=model.source, repeated=False
        )
        encoder = Encoder.of(session, model.gradiend)
        with torch.no_grad():
            tables = [evaluation.table(encoder)]
            for rows in self._neutral_rows(evaluation) if self.neutral else ():
                items = ItemRows(rows, session.objective)
                single = [items.item([position]) for position in range(len(rows))]
                encoded = encode_items(evaluation.gradients, single, "factual", encoder, keep=False)
                tables.append(neutral_encoding_rows(rows, encoded))
        return join_encodings(*tables)

    def _neutral_rows(self, evaluation: EncoderEvaluation) -> list[pd.DataFrame]:
        """The texts of the test split with another token hidden, and the neutral texts."""
        session, as_reference = self.session, self.args.behaviour.reference_neutral
        shared: dict[str, Any] = {
            "seed": self.args.data_seed,
            "causal": session.objective.name == "clm_next_token",
            "mask_placeholder": self.args.mask_placeholder,
            "as_reference": as_reference,
        }
        words, made = self._words_left_alone(), []
        if self.split == "test":
            rows, cap = (evaluation.visited, self.max_size) if as_reference else (evaluation.items.rows, None)
            left_alone = [*words, *rows["factual"].str.strip(), *rows["alternative"].str.strip()]
            made.append(neutral_training_rows(rows[:cap], session.tokenizer, target_words=left_alone, **shared))
        if self.data.neutral is not None and (self.split == "test" or as_reference):
            cap = self.max_size if as_reference else None
            texts = self.data.neutral
            made.append(neutral_dataset_rows(texts, session.tokenizer, excluded_words=words, max_rows=cap, **shared))
        return [table for table in made if len(table)]

    def _words_left_alone(self) -> list[str]:
        """Words that no neutral row hides: those of the feature and those that the configuration names."""
        table, words = self.data.table, set()
        for side in ("factual", "alternative"):
            of_targets = table[f"{side}_class"].isin(self.data.target_classes)
            words |= set(table.loc[of_targets, side] if self.args.behaviour.reference_neutral else table[side])
        return [*sorted(words), *self.left_alone]

    def _fingerprint(self) -> dict[str, Any]:
        """All that the result depends on, by name."""
        texts = self.data.neutral["text"].tolist() if self.data.neutral is not None else None
        return {
            "model": content_hash(self.model.gradiend, self.session.comm),
            "space": self.model.gradiend.space.fingerprint(),
            "base_model": self.model.name_or_path,
            "base_model_files": model_files_hash(self.model.name_or_path),
            "data": self.data.fingerprint(),
            "neutral": text_hash(texts) if self.neutral else None,
            "split": self.split,
            "max_size": self.max_size,
            "compat": self.args.compat,
            "encoder_eval_balance": self.args.encoder_eval_balance,
            "include_other_classes": self.args.include_other_classes,
        }


def _store_evaluation(stored: Path, table: pd.DataFrame, result: dict[str, Any], depends_on: dict[str, Any]) -> None:
    with explained(stored):
        stored.parent.mkdir(parents=True, exist_ok=True)
        table.to_csv(stored.with_suffix(".csv"), index=False)
    write_json(stored.with_suffix(".json"), {**result, "depends_on": depends_on})


def _stored_evaluation(stored: Path, depends_on: dict[str, Any], return_df: bool) -> dict[str, Any] | None:
    path = stored.with_suffix(".json")
    if not path.exists() or not stored.with_suffix(".csv").exists():
        return None
    result: dict[str, Any] = read_json(path)
    found = result.pop("depends_on", {})
    changed = [name for name, value in depends_on.items() if found.get(name) != value]
    if changed:
        logger.info("%s is not reused: %s changed", path, changed[0])
        return None
    for name, value in result.items():
        if name.endswith("_by_class") or name == "label_value_to_class_name":
            result[name] = {float(key): item for key, item in value.items()}
    return {**result, "encoder_df": pd.read_csv(stored.with_suffix(".csv"))} if return_df else result
