"""From a table of sentences to a rewritten language model, in one script.

    python examples/gender.py [MODEL] [OUTPUT_DIR]         default: bert-base-cased runs/gender_py

It learns gender from the gradients of MODEL, shows what encoder and decoder have learnt, and saves two changed
copies of MODEL: one that says "he" where it said "she", and the other way round.
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
        learning_rate="auto",  # encoder and decoder start in closed form, from 16 gradients, and are refined
        max_seeds=1,
        train_batch_size=8,
        max_steps=20,
        eval_steps=10,
        pre_prune_config=PrePruneConfig(n_samples=16, topk=0.1, source="diff"),
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

    # How far each class can be strengthened for 1 % more perplexity on the neutral texts.
    decoder = trainer.evaluate_decoder(max_harm=0.01)
    for name, other in (("M", "F"), ("F", "M")):
        found = decoder[name]
        print(f"{name} in place of {other}: probability {found['base_value']:.4f} -> {found['value']:.4f}")
        if "refusal" in found:
            print(f"  {found['refusal']}")
        else:
            print(f"  perplexity {100 * found['harm']:+.2f} %, on other texts {100 * found['held_out']['harm']:+.2f} %")

    # Plain transformers models, with their tokenizer and a model card.
    for name in ("M", "F"):
        if "refusal" in decoder[name]:
            continue
        trainer.rewrite_base_model(decoder, target_class=name, output_dir=Path(output_dir) / f"model_{name}")
        print(f"saved {Path(output_dir) / f'model_{name}'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
