"""Several features of one language model, and the weights that they share.

    python examples/features.py [MODEL] [OUTPUT_DIR]       default: bert-base-cased runs/features

Each feature is a small table of sentences. A GRADIEND model is trained for each of them, and the weights that matter
most to its decoder are compared: how many of the top k of one feature are among the top k of another.
"""

from __future__ import annotations

import sys
from itertools import combinations, product
from pathlib import Path

import pandas as pd

from gradiend_dist import ModelWithGradiend, TextPredictionTrainer, TrainingArguments

MEN = "Adam Ben Carl David Eric Frank George Henry Jack Kevin Martin Noah Paul Robert Thomas".split()
WOMEN = "Alice Clara Diana Emma Helen Irene Julia Karen Laura Mary Nora Olivia Rachel Sarah Wendy".split()
GROUPS = [
    f"The {who}"
    for who in "students farmers sailors tourists dancers workers painters singers soldiers children parents teachers "
    "visitors players guests".split()
]
PRONOUNS = (
    "{who} said that [MASK] had lost the key.",
    "{who} went home because [MASK] felt cold.",
    "{who} hoped that [MASK] would win.",
    "{who} smiled when [MASK] heard the music.",
    "{who} waited until [MASK] could see the sea.",
)
REFLEXIVES = (
    "{who} saw [MASK] in the mirror.",
    "{who} blamed [MASK] after a long day.",
    "{who} prepared [MASK] for the big race.",
    "{who} enjoyed [MASK] in the garden.",
    "{who} asked [MASK] once again.",
)
# Feature -> class -> (who, sentences, the word at the blank)
FEATURES = {
    "gender": {"M": (MEN, PRONOUNS, "he"), "F": (WOMEN, PRONOUNS, "she")},
    "number": {"singular": (MEN, PRONOUNS, "he"), "plural": (GROUPS, PRONOUNS, "they")},
    "reflexive": {"M": (MEN, REFLEXIVES, "himself"), "F": (WOMEN, REFLEXIVES, "herself")},
}
SPLITS = ("train", "train", "train", "validation", "test")
TOP_K = 1000


def table(feature: str) -> pd.DataFrame:
    """One row for each subject and sentence; nobody is in two splits."""
    rows = [
        {"masked": text.format(who=who), "label": word, "label_class": name, "split": SPLITS[number % len(SPLITS)]}
        for name, (subjects, texts, word) in FEATURES[feature].items()
        for (number, who), text in product(enumerate(subjects), texts)
    ]
    return pd.DataFrame(rows)


def train(feature: str, model: str, output_dir: Path) -> ModelWithGradiend:
    """The closed form needs 16 gradients and no step."""
    args = TrainingArguments(
        experiment_dir=str(output_dir / feature),
        initialization="spectral",
        max_steps=0,
        max_seeds=1,
        train_batch_size=4,
    )
    trainer = TextPredictionTrainer(
        model, data=table(feature), target_classes=list(FEATURES[feature]), args=args
    ).train()
    result = trainer.evaluate_encoder(neutral=False)
    print(f"{feature}: correlation {result['correlation']:.3f} on the test split")
    return trainer.get_model()


def main(model: str = "bert-base-cased", output_dir: str = "runs/features") -> None:
    # Positions in the base model, so that models over different selections of its weights can be compared as well.
    top = {
        feature: set(train(feature, model, Path(output_dir)).get_topk_weights(part="decoder-weight", topk=TOP_K))
        for feature in FEATURES
    }
    print(f"\nshared among the top {TOP_K} weights of the decoder:")
    for one, other in combinations(FEATURES, 2):
        print(f"  {one} and {other}: {len(top[one] & top[other]) / TOP_K:.1%}")


if __name__ == "__main__":
    main(*sys.argv[1:])
