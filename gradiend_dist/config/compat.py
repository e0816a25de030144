"""Every decision in which this package differs from `gradiend` 0.2.3, in one place.

`REFERENCE` is what `compat="gradiend-0.2"` means: the reference's numbers, its defects included. `CORRECTED` is the
default. The code asks the run's `Behaviour` at each of these places and nowhere else, so this list is complete.
A `seed` that is left out is 0, its default; an explicit seed=None (rows in the order of 42, a single run unseeded) is
not reproduced.

Nor are these defects of its decoder evaluation, whose numbers depend on the batch or on what else is in it:
causal models are read at the last place of a batch padded on the right, which is padding for shorter rows; with
tokenizers that mark word starts only the spellings without the mark count; a word of several tokens counts by its first
one in causal models; the placeholder is [MASK] whatever `mask_placeholder` says, and stands in the texts that a causal
model is scored on; where classes share words, and without `decoder_eval_prob_on_other_class`, strengthening is judged
by the rows of the class that comes first, whichever is strengthened; where rows stand in for neutral texts and are
capped, they are the first ones, all of one class; kept points are read whatever has changed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from gradiend_dist.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """The decisions that a run takes as the reference does, or better; the defaults are the corrected ones."""

    reference_data: bool = False
    """Alternatives drawn from all splits and upper-cased after "I"; remainders of groups dropped, tails of large groups
    never used, the same order in every epoch. Corrected: same split, every row, order reshuffled per epoch."""

    reference_labels: bool = False
    """Causal models are asked for the target at the last prefix token's own place, so that token is no context, and the
    prefix keeps its trailing space. Masked models are asked for the word as it is spelt alone, which tokenizers that
    mark word starts do not use after a space (`he`, not `Ġhe`). Corrected: the token that follows the whole prefix; the
    word as it stands in the text."""

    pre_prune_by_row_number: bool = False
    """Row numbers of a stratified sample are used as places in the alternating schedule, so the sample is not
    stratified, and it is drawn anew for every seed. Corrected: one stratified sample for all seeds."""

    pre_prune_mixes_directions: bool = False
    """Gradients of both directions are averaged before their size is taken; with source=diff they have opposite signs
    and cancel, and what is kept is what the feature does not move. Corrected: sizes of the means of each direction."""

    topk_in_float32: bool = False
    """The number of weights to keep is rounded through float32 (off by a few above 1.6e7). Corrected: exact."""

    flip_below: float = 0.0
    """Normalisation turns the encoding when the correlation is below this."""

    flip_decoder_bias: bool = False
    """Normalisation negates the decoder bias too, which changes the reconstruction, and leaves Adam's moments as they
    were. Corrected: the turn is exact, loss and further training are unchanged by it; with an encoder activation that
    is not odd there is no such turn, and none is made."""

    starts_at_random: bool = False
    """A start that is left to the run is random. Corrected: the closed form, where the target changes its sign with
    the class."""

    draws_on_host: bool = False
    """A random start is drawn number by number on the host, five times as many as there are weights to train, by every
    rank. Corrected: by position and on the device, each rank its own; other numbers of the same distribution."""

    step_zero_competes: bool = False
    """The untrained model's correlation can win `best`, and then the last model is kept; without evaluation the model
    of step 1 is kept. Corrected: trained steps compete; without evaluation the last model is kept."""

    ignored_arguments: tuple[str, ...] = ()
    """Arguments that are accepted and lost on the way to the model: they have no effect. Corrected: they have."""

    no_strategy_is_ignored: bool = False
    """eval_strategy=no and save_strategy=no have no effect. Corrected: nothing is evaluated, no checkpoint is kept."""

    evaluation_by_class: bool = False
    """An evaluation of factual gradients alternates between classes by name, not between directions, and without
    encoder_eval_balance a cap counts for each direction. Corrected: directions alternate; without balance one cap."""

    differences_unevaluated: bool = False
    """An evaluation with source=diff fails and is passed over, so the last model is kept. Corrected: it succeeds."""

    reference_neutral: bool = False
    """A neutral row hides a token as the tokenizer spells it (`##ing`), which is then read as other tokens, and may
    hide a piece of a target word or a word of another class; repeated rows count again, a cap counts for all rows
    together, and neutral texts come with every split. Corrected: exactly one token is hidden, of no class's words;
    every text counts, once; with the test split."""

    strength_on_a_grid: bool = False
    """How far to rewrite is selected of a grid of learning rates. Corrected: where none are given, it is searched in
    units of harm."""

    rewrites_at_any_cost: bool = False
    """A change that an evaluation has found to be useless or harmful is made all the same. Corrected: when forced."""

    lms_on_special_tokens: bool = False
    """The language-model score of the decoder evaluation also asks for [CLS], [SEP] and the end of a text. Corrected:
    for tokens of the text alone."""

    signed_convergence: bool = False
    """Among several seeds one with correlation -0.9 did not converge; alone it did. Corrected: both did, unless
    normalize_gradiend should have turned it."""

    last_digit_selects: bool = False
    """Of seeds whose scores differ by rounding alone, the one with the larger last digit is chosen. Corrected: the
    first of them, on any number of ranks."""

    supervised_decoder_factual: bool = False
    """A supervised decoder learns from the label of the factual word also with source=alternative, so that its sign is
    opposite to an encoder's. Corrected: from the label of the word whose gradient is the source."""

    one_converged_is_enough: bool = False
    """training.json says converged if one seed did, whatever min_convergent_seeds. Corrected: if that many did."""

    loss_only_supervised: bool = False
    """convergent_metric=loss chooses by loss only with supervised_decoder; otherwise the best checkpoint is that of the
    correlation and no seed converges. Corrected: the best checkpoint is that of the smallest loss."""

    mean_threshold_always: bool = False
    """convergent_mean_by_class_threshold=None means 0.5. Corrected: None switches the condition off."""

    keeps_convergent_seeds: bool = False
    """Where nothing is said of them, the model files of all converged seeds stay. Corrected: those of the best alone,
    as keep_seed_runs=False promises."""

    max_steps_is_a_cap: bool = False
    """max_steps does not extend num_train_epochs. Corrected: it overrides them."""


CORRECTED = Behaviour()

# The reference has every defect that is a switch.
REFERENCE = Behaviour(
    **dict.fromkeys((item.name for item in fields(Behaviour) if item.default is False), True),
    flip_below=-0.6,
    ignored_arguments=(
        "latent_dim", "activation_encoder", "activation_decoder", "bias_decoder", "torch_dtype", "evaluate_fn",
    ),
)  # fmt: skip


def behaviour_of(compat: str | None) -> Behaviour:
    """What the argument `compat` stands for."""
    if compat not in (None, "gradiend-0.2"):
        raise UserError(f"compat={compat!r} is not known: pass gradiend-0.2, or leave it out.")
    return REFERENCE if compat else CORRECTED
