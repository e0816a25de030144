"""From a table of sentences to a rewritten language model, in one script.

    python examples/gender.py [MODEL] [OUTPUT_DIR]         default: bert-base-cased runs/gender_py

It learns gender from the gradients of MODEL in closed form, shows what encoder and decoder have learnt, and saves two
changed copies of MODEL: one that says "he" where it said "she", and the other way round.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

from gradiend_dist import PrePruneConfig, TextPredictionTrainer, TrainingArguments

HERE = Path(__file__).parent


def main(model: str = "bert-base-cased", output_dir: str = "runs/gender_py") -> None:
    # One row is a sentence with a blank, the word that stood there, its class and its split. A path would do as well.
    rows = pd.read_csv(HERE / "gender.csv")

    args = TrainingArguments(
        experiment_dir=output_dir,
        initialization="spectral",  # encoder and decoder in closed form, from 16 gradients
        learning_rate="auto",  # then refined
        max_seeds=1,
        train_batch_size=8,
        max_steps=20,
        eval_steps=10,
        pre_prune_config=PrePruneConfig(n_samples=16, topk=0.1, source="diff"),
        decoder_eval_lrs=[10 ** (-1 - step / 3) for step in range(13)],  # strengths to try: 0.1 to 0.00001
    )
    trainer = TextPredictionTrainer(
        model,
        data=rows,
        target_classes=["M", "F"],
        eval_neutral_data=str(HERE / "neutral.csv"),
        args=args,
    )
    trainer.train()

    encoder = trainer.evaluate_encoder()
    print(f"encoder: correlation {encoder['correlation']:.3f} on the test split")

    # The base model at every strength; for each class the smallest one that changes it and keeps its other knowledge.
    decoder = trainer.evaluate_decoder(scaling="curvature")
    before = decoder["grid"]["base"]
    print(f"base model: language-model score {before['lms']['lms']:.3f}")
    for name, other in (("M", "F"), ("F", "M")):
        point = decoder[name]
        after = decoder["grid"][point["feature_factor"], point["learning_rate"]]
        print(
            f"{name} in place of {other}: probability {before['probs_by_dataset'][other][name]:.4f} "
            f"-> {after['probs_by_dataset'][other][name]:.4f}, language-model score {after['lms']['lms']:.3f}"
        )

    # Plain transformers models, with their tokenizer and a model card.
    for name in ("M", "F"):
        trainer.rewrite_base_model(decoder, target_class=name, output_dir=Path(output_dir) / f"model_{name}")
        print(f"saved {Path(output_dir) / f'model_{name}'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
