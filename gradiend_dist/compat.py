"""Every decision in which this package differs from `gradiend` 0.2.3, in one place.

`REFERENCE` is what `compat="gradiend-0.2"` means: the reference's numbers, its defects included. `CORRECTED` is the
default. The code asks the run's `Behaviour` at each of these places and nowhere else, so this list is complete.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    reference_data: bool
    """Alternatives drawn from all splits and upper-cased after "I"; remainders of groups dropped, tails of large groups
    never used, the same order in every epoch. Corrected: same split, every row, order reshuffled per epoch."""

    causal_label_early: bool
    """Causal models are asked for the target at the last prefix token's own place, so that token is no context, and the
    prefix keeps its trailing space. Corrected: the whole prefix is context, the target is the token that follows it."""

    pre_prune_by_row_number: bool
    """Row numbers of a stratified sample are used as places in the alternating schedule, so the sample is not
    stratified, and it is drawn anew for every seed. Corrected: one stratified sample for all seeds."""

    topk_in_float32: bool
    """The number of weights to keep is rounded through float32 (off by a few above 1.6e7). Corrected: exact."""

    flip_below: float
    """Normalisation turns the encoding when the correlation is below this."""

    flip_decoder_bias: bool
    """Normalisation negates the decoder bias too, which changes the reconstruction, and leaves Adam's moments as they
    were. Corrected: the turn is exact, loss and further training are unchanged by it."""

    step_zero_competes: bool
    """The untrained model's correlation can win `best`, and then the last model is kept; without evaluation the model
    of step 1 is kept. Corrected: trained steps compete; without evaluation the last model is kept."""

    signed_convergence: bool
    """A seed with correlation -0.9 did not converge. Corrected: with normalize_gradiend=False the sign is free."""

    mean_threshold_always: bool
    """convergent_mean_by_class_threshold=None means 0.5. Corrected: None switches the condition off."""

    max_steps_is_a_cap: bool
    """max_steps does not extend num_train_epochs. Corrected: it overrides them."""

    data_seed_without_seed: int
    """Seed of row order when seed is None."""


REFERENCE = Behaviour(
    reference_data=True,
    causal_label_early=True,
    pre_prune_by_row_number=True,
    topk_in_float32=True,
    flip_below=-0.6,
    flip_decoder_bias=True,
    step_zero_competes=True,
    signed_convergence=True,
    mean_threshold_always=True,
    max_steps_is_a_cap=True,
    data_seed_without_seed=42,
)

CORRECTED = Behaviour(
    reference_data=False,
    causal_label_early=False,
    pre_prune_by_row_number=False,
    topk_in_float32=False,
    flip_below=0.0,
    flip_decoder_bias=False,
    step_zero_competes=False,
    signed_convergence=False,
    mean_threshold_always=False,
    max_steps_is_a_cap=False,
    data_seed_without_seed=0,
)
