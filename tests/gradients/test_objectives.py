"""From a row with a blank to token ids: what is read, what is asked for, and that few logits are enough."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from torch import nn
from transformers import BertForMaskedLM, PreTrainedTokenizerFast

from gradiend_dist.errors import UserError
from gradiend_dist.gradients.cloze import (
    CausalObjective,
    Cloze,
    ClozeBatch,
    ClozeRow,
    LogitsAt,
    MaskedObjective,
    choose_objective,
)
from gradiend_dist.model.base import longest_input

CPU = torch.device("cpu")


def masked(max_length: int = 40, placeholder: str = "[MASK]") -> MaskedObjective:
    return MaskedObjective(tiny.wordpiece_tokenizer(), max_length, placeholder)


def causal(tokenizer: PreTrainedTokenizerFast, max_length: int = 40, *, early: bool = False) -> CausalObjective:
    return CausalObjective(tokenizer, max_length, "[MASK]", as_reference=early)


def tokens(objective: Any, ids: tuple[int, ...]) -> list[str]:
    return objective.tokenizer.convert_ids_to_tokens(list(ids))


# --- masked


@pytest.mark.parametrize(
    ("word", "pieces"), [("he", ["he"]), ("herself", ["her", "##self"]), ("themselves", ["them", "##sel", "##ves"])]
)
def test_masked__one_blank_becomes_one_mask_per_piece(word, pieces):
    """Fails if a word of several pieces is asked for at one mask, or its pieces are wanted in another order."""
    objective = masked()
    cloze = objective.cloze("The man said [MASK] left .", word)
    masks = ["[MASK]"] * len(pieces)
    assert tokens(objective, cloze.input_ids) == ["[CLS]", "the", "man", "said", *masks, "left", ".", "[SEP]"]
    assert cloze.positions == tuple(range(4, 4 + len(pieces)))
    assert tokens(objective, cloze.labels) == pieces


def test_masked__several_blanks_are_kept_and_the_last_piece_repeats():
    objective = masked()
    cloze = objective.cloze("[MASK] said [MASK] and [MASK] left", "herself")
    assert cloze.positions == (1, 3, 5)
    assert tokens(objective, cloze.labels) == ["her", "##self", "##self"]
    assert tokens(objective, objective.cloze("[MASK] and [MASK]", "he").labels) == ["he", "he"]


def test_masked__takes_another_placeholder_and_the_tokenizers_own_mask():
    here = masked(placeholder="<blank>")
    assert here.cloze("a man <blank> left", "herself") == masked().cloze("a man [MASK] left", "herself")
    assert here.cloze("a man [MASK] left", "herself") == masked().cloze("a man [MASK] left", "herself")


def test_masked__rows_of_words_of_one_length_share_their_input():
    objective = masked()
    he, she, herself = (objective.cloze("a man [MASK] left", word) for word in ("he", "she", "herself"))
    assert ClozeRow(he, she).shares_input and not ClozeRow(he, she).is_identity
    assert not ClozeRow(he, herself).shares_input
    assert ClozeRow(he, he).is_identity and ClozeRow(he, he).shares_input
    one = Cloze((1, 2, 3), (1,), (4,))
    assert not one.same_input(Cloze((1, 9, 3), (1,), (4,))) and not one.same_input(Cloze((1, 2, 3), (2,), (4,)))


@pytest.mark.parametrize("max_length", [5, 6, 9, 40])
@pytest.mark.parametrize("word", ["he", "themselves"])
@pytest.mark.parametrize("unknown", [False, True])
def test_masked__a_long_row_keeps_the_blank_the_ends_and_the_words_around_it(max_length, word, unknown):
    """Fails if for any place of the blank a mask is cut off, the row is too long or too short, or words are skipped.

    A row of unknown words is one of [UNK]s, which a tokenizer counts among its special tokens.
    """
    objective = masked(max_length)
    num_pieces = len(objective.cloze("[MASK]", word).labels)
    num_words = 29 - num_pieces
    words = ["zebra"] * num_words if unknown else tiny.sentence(num_words).split()
    for place in range(num_words + 1):
        text = " ".join([*words[:place], "[MASK]", *words[place:]])
        whole = masked(1000).cloze(text, word)
        cloze = objective.cloze(text, word)
        assert len(cloze.input_ids) == min(max_length, len(whole.input_ids))
        assert cloze.labels == whole.labels
        assert (cloze.input_ids[0], cloze.input_ids[-1]) == (whole.input_ids[0], whole.input_ids[-1])
        shift = whole.positions[0] - cloze.positions[0]
        assert cloze.positions == tuple(position - shift for position in whole.positions)
        body = slice(1 + shift, len(cloze.input_ids) - 1 + shift)
        assert cloze.input_ids[1:-1] == whole.input_ids[body]


def test_masked__plain_truncation_is_kept_where_it_keeps_the_blank():
    """As the reference: the window moves only if it must, and is then centred."""
    objective = masked(10)
    words = tiny.sentence(30).split()

    def first_word(place: int) -> int:
        cloze = objective.cloze(" ".join([*words[:place], "[MASK]", *words[place + 1 :]]), "he")
        return place - (cloze.positions[0] - 1)

    assert [first_word(place) for place in (0, 7)] == [0, 0]
    assert [first_word(place) for place in (8, 15, 29)] == [4, 11, 22]


@pytest.mark.parametrize(("template", "word", "message"), [
    ("The man left .", "he", "has no mask"),
    ("The man <blank> left .", "he", "has no mask"),
    ("The man [MASK] left .", "", "has no token"),
    ("The man [MASK] left .", " ", "has no token"),
])  # fmt: skip
def test_masked__names_rows_it_cannot_use(template, word, message):
    with pytest.raises(UserError, match=message):
        masked().cloze(template, word)


def test_masked__needs_a_mask_token():
    with pytest.raises(UserError, match="needs a tokenizer with a mask token"):
        MaskedObjective(tiny.byte_level_tokenizer(), 40, "[MASK]")


# --- causal

CAUSAL_TOKENIZERS = {
    "byte_level": (tiny.byte_level_tokenizer, {}, "Ġ", []),
    "byte_level_end": (tiny.byte_level_tokenizer, {"adds_end": True}, "Ġ", []),
    "metaspace": (tiny.metaspace_tokenizer, {}, "▁", ["<s>"]),
    "metaspace_end": (tiny.metaspace_tokenizer, {"adds_end": True}, "▁", ["<s>"]),
}


@pytest.fixture(params=CAUSAL_TOKENIZERS)
def kind(request):
    make, options, mark, begin = CAUSAL_TOKENIZERS[request.param]
    return make(**options), mark, begin


def body(tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    """The tokens of a text without what the tokenizer puts around it."""
    return tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("word", ["he", "she", "they"])
@pytest.mark.parametrize("template", ["The man said [MASK] was tired", "The man said that [MASK]", "The man, [MASK]"])
def test_causal__the_label_is_the_token_that_follows_the_whole_prefix(kind, template, word):
    """Fails if the word is asked for without its space, after an end token, or a token too early."""
    tokenizer, mark, begin = kind
    objective = causal(tokenizer)
    cloze = objective.cloze(template, word)
    prefix = template.split(" [MASK]")[0]
    assert tokens(objective, cloze.input_ids) == begin + body(tokenizer, prefix)
    assert cloze.positions == (len(cloze.input_ids) - 1,)
    first = body(tokenizer, f"{prefix} {word}")[len(body(tokenizer, prefix))]
    assert tokens(objective, cloze.labels) == [first] and first.startswith(mark)
    if word != "they":
        assert first == mark + word


def test_causal__a_word_without_a_space_before_it_has_none_in_its_label(kind):
    tokenizer, mark, _ = kind
    objective = causal(tokenizer)
    cloze = objective.cloze("The man left home.[MASK] was tired", "she")
    assert not tokens(objective, cloze.labels)[0].startswith(mark)
    assert tokenizer.decode([*cloze.input_ids, *cloze.labels], skip_special_tokens=True).startswith(
        "The man left home."
    )


@pytest.mark.parametrize("gap", ["  ", "\n", " \n", "\n\n", "\t", " \n "])
def test_causal__white_space_before_the_blank_is_context_and_not_the_label(gap):
    """Fails if a line break before the blank is what both words are asked for: their gradients would be equal."""
    tokenizer = tiny.byte_level_tokenizer()
    objective = causal(tokenizer)
    he, she = (objective.cloze(f"The man said{gap}[MASK]", word) for word in ("he", "she"))
    assert he.labels != she.labels and he.same_input(she)
    assert tokens(objective, he.labels)[0].removeprefix("Ġ") == "he"
    for cloze, word in ((he, "he"), (she, "she")):
        assert tokenizer.decode([*cloze.input_ids, *cloze.labels]) == f"The man said{gap}{word}"


def test_causal__a_long_word_is_asked_for_by_its_first_piece(kind):
    tokenizer, mark, _ = kind
    objective = causal(tokenizer)
    pieces = body(tokenizer, "said mandolate")[len(body(tokenizer, "said")) :]
    assert len(pieces) > 2
    label = tokens(objective, objective.cloze("The man said [MASK]", "mandolate").labels)
    assert label == [next(piece for piece in pieces if piece != mark)]


def test_causal__truncation_keeps_the_end(kind):
    tokenizer = kind[0]
    text = f"{tiny.sentence(25)} [MASK] left"
    whole = causal(tokenizer, 1000).cloze(text, "he")
    for max_length in (1, 7, len(whole.input_ids) - 1, len(whole.input_ids)):
        cloze = causal(tokenizer, max_length).cloze(text, "he")
        assert cloze.input_ids == whole.input_ids[-max_length:]
        assert (cloze.positions, cloze.labels) == ((max_length - 1,), whole.labels)


def test_causal__a_blank_at_the_start_needs_a_begin_token():
    with pytest.raises(UserError, match="nothing before the blank"):
        causal(tiny.byte_level_tokenizer()).cloze("[MASK] left", "he")
    tokenizer = tiny.metaspace_tokenizer()
    cloze = causal(tokenizer).cloze("[MASK] left", "he")
    assert (cloze.input_ids, cloze.positions) == ((tokenizer.bos_token_id,), (0,))
    assert tokens(causal(tokenizer), cloze.labels) == ["▁he"]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("word", ["", " "])
def test_causal__names_a_word_without_a_token(early, word):
    """Fails if the last word of the prefix is silently taken for the label."""
    with pytest.raises(UserError, match="has no token"):
        causal(tiny.byte_level_tokenizer(), early=early).cloze("The man said [MASK] left", word)


def test_causal_early__asks_the_second_last_token_for_the_bare_word():
    """What the reference does: the trailing space stays, `he` is looked up without it, truncation keeps the start."""
    tokenizer = tiny.byte_level_tokenizer()
    objective = causal(tokenizer, early=True)
    cloze = objective.cloze("The man said [MASK] was tired", "he")
    assert tokens(objective, cloze.input_ids) == ["The", "Ġman", "Ġsaid", "Ġ"]
    assert cloze.positions == (2,) and tokens(objective, cloze.labels) == ["he"]
    pieces = tokenizer("xylophone", add_special_tokens=False)["input_ids"]
    assert len(pieces) > 1 and objective.cloze("The man said [MASK]", "xylophone").labels == (pieces[0],)
    long = f"{tiny.sentence(25)} [MASK]"
    short = causal(tokenizer, 7, early=True).cloze(long, "he")
    assert short.input_ids == tuple(tokenizer(long.split("[MASK]")[0])["input_ids"][:7]) and short.positions == (5,)


def test_causal_early__names_rows_on_which_the_reference_trains_on_zeros():
    with pytest.raises(UserError, match="fewer than two tokens"):
        causal(tiny.byte_level_tokenizer(), early=True).cloze("The[MASK] man", "he")


# --- the choice of an objective


@pytest.mark.parametrize(("family", "tokenizer", "name"), [
    ("bert", tiny.wordpiece_tokenizer, "mlm_mask_token"),
    ("gpt2", tiny.byte_level_tokenizer, "clm_next_token"),
    ("llama", tiny.wordpiece_tokenizer, "clm_next_token"),  # a mask token does not make a causal model masked
])  # fmt: skip
def test_choose_objective__auto_follows_the_model(family, tokenizer, name):
    tokenizer = tokenizer()
    model = tiny.base_model(family, len(tokenizer))
    options = {"max_length": 30, "mask_placeholder": "[MASK]", "as_reference": False}
    assert choose_objective("auto", model, tokenizer, **options).name == name
    model.config.architectures = None
    expected = "mlm_mask_token" if tokenizer.mask_token else "clm_next_token"
    assert choose_objective("auto", model, tokenizer, **options).name == expected


@pytest.mark.parametrize(("family", "limit"), [("bert", 40), ("roberta", 38), ("gpt2", 40), ("llama", 40)])
def test_longest_input__is_what_the_model_has_positions_for(family, limit):
    """The model itself is asked: `limit` tokens work; one more is an error where positions are a table."""
    model = tiny.base_model(family, 67)
    assert longest_input(model, tiny.wordpiece_tokenizer()) == limit
    assert longest_input(model, tiny.wordpiece_tokenizer(model_max_length=9)) == 9
    ids = torch.full((1, limit + 1), 6)
    model(input_ids=ids[:, 1:])
    if family != "llama":
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=ids)
    options = {"mask_placeholder": "[MASK]", "as_reference": False}
    tokenizer = tiny.wordpiece_tokenizer()
    assert choose_objective("auto", model, tokenizer, max_length=256, **options).max_length == limit
    assert choose_objective("auto", model, tokenizer, max_length=11, **options).max_length == 11


# --- batches and logits


def clozes() -> list[Cloze]:
    """Rows of 3, 11 and 6 tokens with one, three and two places."""
    generator = torch.Generator().manual_seed(0)
    ids = [tuple(torch.randint(5, 60, (size,), generator=generator).tolist()) for size in (3, 11, 6)]
    places = [(1,), (0, 4, 10), (2, 5)]
    return [Cloze(i, p, tuple(range(len(p)))) for i, p in zip(ids, places, strict=True)]


def test_batch__is_padded_on_the_right_to_its_longest_row():
    batch = ClozeBatch.of(clozes(), 99, CPU)
    assert batch.input_ids.shape == (3, 11)
    for row, cloze in enumerate(clozes()):
        length = len(cloze.input_ids)
        assert batch.input_ids[row].tolist() == [*cloze.input_ids, *[99] * (11 - length)]
        assert batch.attention_mask[row].tolist() == [1] * length + [0] * (11 - length)
    assert batch.rows.tolist() == [0, 1, 1, 1, 2, 2]
    assert batch.positions.tolist() == [1, 0, 4, 10, 2, 5]


@torch.no_grad()
def alone(model: nn.Module, cloze: Cloze) -> torch.Tensor:
    """Logits of one row by itself, without padding."""
    return model(input_ids=torch.tensor([cloze.input_ids])).logits[0, list(cloze.positions)]


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "albert", "electra", "gpt2", "llama"])
def test_logits_at__few_places_are_the_same_as_of_each_row_alone(family):
    """Fails if a head mixes places, if padding is attended to, or if a family silently takes the slow way."""
    model = tiny.base_model(family, 67)
    read = LogitsAt(model)
    with torch.no_grad():
        logits = read(ClozeBatch.of(clozes(), 1, CPU))
    assert read._narrow is True
    torch.testing.assert_close(logits, torch.cat([alone(model, c) for c in clozes()]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_logits_at__the_head_runs_on_the_read_places_only(family):
    model = tiny.base_model(family, 67)
    seen: list[tuple[int, ...]] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _module, args: seen.append(tuple(args[0].shape)))
    read, batch = LogitsAt(model), ClozeBatch.of(clozes(), 1, CPU)
    read(batch)
    assert seen == [(3, 11, 12), (1, 6, 12), (1, 6, 12)], "one full pass to compare with, then six places each"
    read(batch)
    assert seen[3:] == [(1, 6, 12)]


class MixingHead(nn.Module):
    """A head whose logits of a place depend on all places; by how much is `amount`."""

    def __init__(self, head: nn.Module, amount: float) -> None:
        super().__init__()
        self.head, self.amount = head, amount

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden + self.amount * hidden.mean(1, keepdim=True))


class WholeSequenceHead(nn.Module):
    def __init__(self, head: nn.Module, length: int) -> None:
        super().__init__()
        self.head, self.length = head, length

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden.reshape(-1, self.length, hidden.shape[-1]))


@pytest.mark.parametrize(
    "wrap", [lambda h: MixingHead(h, 1.0), lambda h: MixingHead(h, 0.02), lambda h: WholeSequenceHead(h, 11)]
)
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_logits_at__a_head_that_mixes_places_gets_all_of_them(wrap, scale):
    """Fails if the comparison is blind to small logits or small mixtures: gradients would silently be wrong."""
    model = tiny.base_model("bert", 67)
    assert isinstance(model, BertForMaskedLM)
    with torch.no_grad():
        model.cls.predictions.decoder.weight.mul_(scale)
        model.cls.predictions.decoder.bias.mul_(scale)
    model.cls = wrap(model.cls)
    read, batch = LogitsAt(model), ClozeBatch.of(clozes(), 1, CPU)
    with torch.no_grad():
        logits = read(batch)
        full = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    assert read._narrow is False
    torch.testing.assert_close(logits, full[batch.rows, batch.positions], rtol=0, atol=0)


def test_logits_at__a_device_without_memory_is_told():
    """Fails if the check takes it for a head that wants all places: the full pass that follows needs far more."""
    model = tiny.base_model("bert", 67)
    passes: list[int] = []

    def run_out(*_: object) -> None:
        passes.append(len(passes))
        if len(passes) == 2:  # the pass that is compared with the full one
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.get_output_embeddings().register_forward_pre_hook(run_out)
    with pytest.raises(torch.OutOfMemoryError):
        LogitsAt(model)(ClozeBatch.of(clozes(), 1, CPU))


def test_logits_at__a_model_without_a_backbone_is_read_in_full():
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny.base_model("bert", 67)

        def forward(self, **inputs: torch.Tensor) -> Any:
            return self.inner(**inputs)

    model, batch = Plain(), ClozeBatch.of(clozes(), 1, CPU)
    with torch.no_grad():
        expected = LogitsAt(model.inner)(batch)
        torch.testing.assert_close(LogitsAt(model)(batch), expected, rtol=1e-4, atol=1e-5)


def test_logits_at__leaves_no_hook_behind():
    model = tiny.base_model("bert", 67)
    LogitsAt(model)(ClozeBatch.of(clozes(), 1, CPU))
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("template", "as_reference", "piece"),
    [("then [MASK] ran", False, "Ġhe"), ("[MASK] ran", False, "he"), ("([MASK] ran)", False, "he"),
     ("then [MASK] ran", True, "he")],
)  # fmt: skip
def test_masked__asks_for_the_word_as_it_stands_in_the_text(template: str, as_reference: bool, piece: str) -> None:
    """RoBERTa's kind of tokenizer writes a word after a space as another token than the word alone."""
    tokenizer = tiny.byte_level_tokenizer(additional_special_tokens=["<mask>"], mask_token="<mask>")
    cloze = MaskedObjective(tokenizer, 40, "[MASK]", as_reference=as_reference).cloze(template, "he")
    assert tokenizer.convert_ids_to_tokens(list(cloze.labels)) == [piece]


@pytest.mark.parametrize("word", ["zzz", "he zzz"])
def test_masked__a_word_that_is_unknown_is_refused(word):
    """Fails if all words outside the vocabulary are trained on as one and the same [UNK]."""
    objective = MaskedObjective(tiny.wordpiece_tokenizer(), 64, "[MASK]")
    with pytest.raises(UserError, match=f"The word '{word}' has no token"):
        objective.cloze("the man said [MASK] left", word)
    reference = MaskedObjective(tiny.wordpiece_tokenizer(), 64, "[MASK]", as_reference=True)
    assert reference.cloze("the man said [MASK] left", word).labels


def test_causal__a_word_that_is_unknown_is_refused():
    objective = CausalObjective(tiny.metaspace_tokenizer(), 64, "[MASK]", as_reference=False)
    with pytest.raises(UserError, match="has no token"):
        objective.cloze("The man said [MASK]", "xylophone")
