"""What can be asked of a trained model: evaluations, plots, records."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from gradiend_dist.config.checks import require
from gradiend_dist.evaluation.decoder_evaluation import DecoderEvaluation
from gradiend_dist.evaluation.encoder_report import EncoderReport
from gradiend_dist.evaluation.request import DecoderRequest
from gradiend_dist.storage.records import read_seed_report, read_training
from gradiend_dist.training.experiment import ModelOfExperiment


class Evaluations(ModelOfExperiment):
    """The evaluations of a trained model. All ranks make it."""

    def evaluate_encoder(
        self,
        split: str = "test",
        max_size: int | None = None,
        *,
        neutral: bool = True,
        use_cache: bool | None = None,
        return_df: bool = False,
        plot: bool = False,
        plot_kwargs: dict[str, Any] | None = None,
        **plot_options: Any,
    ) -> dict[str, Any]:
        """Encode a split (and, for the test split, neutral texts) and describe the encodings.

        With `experiment_dir`, the table and the result are written beside the model, and read again with `use_cache`
        while model, data and arguments are the same. `plot` draws the distributions with the options of
        `plot_encoder_distributions`, given by name or together as `plot_kwargs`. All ranks call this.
        """
        plot_options = {**(plot_kwargs or {}), **plot_options}
        require(plot or not plot_options, f"evaluate_encoder(): {', '.join(plot_options)} is not a known argument.")
        require(max_size is None or max_size >= 1, f"max_size={max_size} must be at least 1: pass a larger number.")
        report = EncoderReport(
            self.session,
            self.get_model(),
            split=split,
            max_size=max_size or self.args.encoder_eval_max_size,
            neutral=neutral,
            left_alone=self.config.eval_neutral_additional_excluded_words or [],
        )
        use_cache = bool(self.args.use_cache) if use_cache is None else use_cache
        result = report.result(self.experiment_dir, use_cache=use_cache, return_df=return_df or plot)
        if plot:
            table = result["encoder_df"] if return_df else result.pop("encoder_df")
            result["plot_path"] = self.plot_encoder_distributions(table, **{"show": False, **plot_options})
        return result

    def evaluate_decoder(
        self,
        lrs: Sequence[float] | None = None,
        feature_factors: Sequence[float] | None = None,
        use_cache: bool | None = None,
        split: str = "test",
        max_size: int | None = None,
        *,
        plot: bool = False,
        plot_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """How far to rewrite the base model: for each class the step that makes it most probable within `max_harm`.

        Further options are the fields of `DecoderRequest` (`target_class`, `max_harm`, `scaling`, ...) and, with
        `plot`, those of `plot_probability_shifts`, also together as `plot_kwargs`.

        Returns, for each class (`target_class`: for these, or `balance`), the selected `feature_factor` and
        `learning_rate` with the `value` reached, its `harm` and the language-model score, under the class's name or, to
        weaken it, `<class>_weaken`; where nothing is worth having, a `refusal` says why; and all points under `grid`.
        With `lrs` (or a `selector`, or in `compat` mode) the points are those of feature_factors x lrs, as in the
        reference; else a search visits about ten for each class. With `experiment_dir`, finished points are kept, and
        read again with `use_cache` while nothing that they depend on has changed. All ranks call this and share the
        points.
        """
        names = [item.name for item in dataclasses.fields(DecoderRequest)]
        of_plot = {**(plot_kwargs or {}), **{name: options.pop(name) for name in list(options) if name not in names}}
        require(plot or not of_plot, f"evaluate_decoder(): {', '.join(of_plot)} is not a known argument.")
        request = DecoderRequest(
            lrs=lrs, feature_factors=feature_factors, use_cache=use_cache, split=split, max_size=max_size, **options
        )
        found = DecoderEvaluation(self, request).results()
        if plot:
            found["plot_path"] = self.plot_probability_shifts(found, **{"show": False, **of_plot})
        return found

    def evaluate(
        self, *, kwargs_encoder: dict[str, Any] | None = None, kwargs_decoder: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Both evaluations. All ranks call this."""
        return {
            "encoder": self.evaluate_encoder(**(kwargs_encoder or {})),
            "decoder": self.evaluate_decoder(**(kwargs_decoder or {})),
        }

    def plot_encoder_distributions(
        self,
        encoder_df: pd.DataFrame | None = None,
        output: str | Path | None = None,
        *,
        split: str = "test",
        show: bool = False,
        label_name_mapping: dict[str, str] | None = None,
        img_format: str | None = None,
    ) -> Path:
        """Draw the encodings of each class, of each split that `encoder_df` has, and of neutral texts.

        All ranks call this; rank 0 draws.
        """
        from gradiend_dist.report.figures import plot_encoder_distributions

        if encoder_df is None:
            encoder_df = self.evaluate_encoder(split, return_df=True)["encoder_df"]
        return self._draw(
            "encoder_distributions",
            output,
            img_format,
            lambda path, image: plot_encoder_distributions(
                encoder_df,
                path,
                target_classes=self.target_classes,
                label_name_mapping=label_name_mapping,
                show=show,
                **image,
            ),
        )

    def plot_probability_shifts(
        self,
        decoder_results: dict[str, Any] | None = None,
        output: str | Path | None = None,
        *,
        show: bool = False,
        label_name_mapping: dict[str, str] | None = None,
        img_format: str | None = None,
    ) -> Path:
        """Draw the classes' probabilities and the language-model score over the grid, with the selected points.

        All ranks call this; rank 0 draws.
        """
        from gradiend_dist.report.figures import plot_probability_shifts

        results = decoder_results or self.evaluate_decoder(use_cache=True)
        of_decoder = all(entry.get("part") == "decoder" for name, entry in results.items() if name in self.all_classes)
        factors = self.strengthening_factors() if of_decoder else {}
        return self._draw(
            "decoder_probability_shifts",
            output,
            img_format,
            lambda path, image: plot_probability_shifts(
                results,
                path,
                target_classes=self.target_classes,
                factors=factors,
                on_other_class=self.config.decoder_eval_prob_on_other_class,
                label_name_mapping=label_name_mapping,
                show=show,
                **image,
            ),
        )

    def plot_training_convergence(
        self,
        output: str | Path | None = None,
        *,
        show: bool = True,
        label_name_mapping: dict[str, str] | None = None,
        img_format: str | None = None,
        **options: Any,
    ) -> Path:
        """Draw loss, correlation and class means over the steps; returns the file. All ranks call this; rank 0 draws.

        `show` opens a window or notebook cell as well, where there is a display, and does not wait for it.
        """
        from gradiend_dist.report.plots import plot_training_convergence

        return self._draw(
            "training_convergence",
            output,
            img_format,
            lambda path, image: plot_training_convergence(
                self.get_training_stats(),
                path,
                show=show,
                label_name_mapping=label_name_mapping,
                **{**image, **options},
            ),
        )

    def _draw(
        self,
        name: str,
        output: str | Path | None,
        img_format: str | None,
        draw: Callable[[str | Path, dict[str, Any]], Path],
    ) -> Path:
        """All ranks call this; rank 0 draws, to `output` or beside the results."""
        img_format = img_format or self.config.img_format
        path = output or self._root / f"{name}.{img_format}"
        return self.comm.first(
            "drawing", lambda: draw(path, {"img_format": img_format, "img_dpi": self.config.img_dpi})
        )

    def get_training_stats(self, model_path: str | Path | None = None) -> dict[str, Any]:
        """The record of a training run: `training_stats`, `losses`, `best_score_checkpoint` and the rest.

        No communication.
        """
        path = Path(model_path) if model_path is not None else self.model_path
        return read_training(path)

    def get_seed_report(self) -> dict[str, Any]:
        """The report on all seeds that were tried. No communication."""
        return read_seed_report(self.seed_runs_dir)
