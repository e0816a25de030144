"""Where a seed starts: in the closed form of a few items, or of more or larger ones where these do not do.

Where none of them do, the start is random; unless the closed form was asked for by name, which is then taken as it is.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.engines.base import Rates
from gradiend_dist.errors import UserError
from gradiend_dist.gradients.store import GradientSource
from gradiend_dist.model.gradiend import GradiendModel
from gradiend_dist.training.inputs import TrainingInputs
from gradiend_dist.training.spectral import ClosedForm, SpectralStart

logger = logging.getLogger(__name__)

# Of items, or of the rows of each: what is tried where the first ones do not do.
TIMES = 4


@dataclass(frozen=True)
class Solved:
    """A closed form and the items that it is made of."""

    start: SpectralStart
    form: ClosedForm

    def fill(self, model: GradiendModel) -> dict[str, Any]:
        """All ranks call this."""
        return self.start.fill(model, self.form)


class SeedStart:
    """The start of one seed. All ranks make it and call its methods."""

    def __init__(
        self,
        args: TrainingArguments,
        inputs: TrainingInputs,
        gradients: GradientSource,
        seed: int,
        *,
        whole_items: bool,
    ) -> None:
        self.args, self.inputs, self.gradients, self.seed, self.whole_items = args, inputs, gradients, seed, whole_items
        self._first: SpectralStart | None = None

    def closed_form(self) -> Solved | None:
        """None: the start is random, which is said."""
        args = self.args
        if not args.starts_trained:
            if args.initialization == "auto" and not args.behaviour.starts_at_random:
                logger.warning("the start is random: %s", self._why_random())
            return None
        if args.initialization == "spectral":
            found = Solved(self._first_items(), self._first_items().solve())
        else:
            tried = self._tried()
            if tried is None:
                return None
            found = tried
        found.start.warn(found.form)
        return found

    def rates(self) -> Rates:
        """What learning_rate=auto is made of."""
        return self._first_items().measured().rates()

    def _first_items(self) -> SpectralStart:
        if self._first is None:
            items, labels = self.inputs.spectral_items(self.seed)
            self._first = SpectralStart(self.args, self.gradients, items, labels, whole_items=self.whole_items)
        return self._first

    def _tried(self) -> Solved | None:
        """The first items' closed form; where it does not hold, that of more items, then that of larger ones."""
        best, why = self._solved(self._first_items())
        seen = {item.key for item in self._first_items().items}
        for more, larger, remedy in ((TIMES, 1, "as many items"), (1, TIMES, "as many rows in each item")):
            if best is not None and best.form.holds:
                break
            items, labels = self.inputs.spectral_items(self.seed, more=more, larger=larger)
            if {item.key for item in items} <= seen:
                continue  # there are no others
            logger.warning("the closed form does not hold (%s): trying %d times %s", why, TIMES, remedy)
            found, why = self._solved(SpectralStart(self.args, self.gradients, items, labels))
            if found is not None and (best is None or found.form.holds or not best.form.is_feature):
                best = found
        if best is not None and best.form.is_feature:
            return best
        if self.args.max_steps == 0:
            raise UserError(
                f"max_steps=0 trains nothing, and the closed form does not show the feature ({why}): pass max_steps or "
                "more rows, or initialization=spectral to take it all the same."
            )
        logger.warning("the start is random: the closed form does not show the feature (%s)", why)
        return None

    @staticmethod
    def _solved(start: SpectralStart) -> tuple[Solved | None, str]:
        """The form, and in words what speaks against it."""
        try:
            form = start.solve()
        except UserError as error:
            return None, str(error).rstrip(".")
        gap, found = form.facts["gap"], form.facts["label_correlation"]
        shown = [f"gap {gap:.2f}"] if gap is not None else []
        return Solved(start, form), ", ".join([*shown, f"label correlation {0.0 if found is None else found:.2f}"])

    def _why_random(self) -> str:
        if self.args.target != "diff":
            return f"target={self.args.target} does not change its sign with the class"
        return f"latent_dim={self.args.latent_dim} is not below spectral_items={self.args.spectral_items}"
