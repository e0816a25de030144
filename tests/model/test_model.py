"""The GRADIEND model: its start, its formula, what pruning keeps, and how it rewrites the base model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

from gradiend_dist.errors import UserError
from gradiend_dist.model.base import load_base_model
from gradiend_dist.model.entries import count_to_keep, select_entries_to_keep
from gradiend_dist.model.gradiend import GradiendModel, ParamMappedGradiendModel
from gradiend_dist.model_with_gradiend import ModelWithGradiend, create_model_with_gradiend
from gradiend_dist.space import ParameterSpace

PARTS = ["encoder-weight", "decoder-weight", "decoder-bias", "decoder-sum"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": lambda x: (x.exp() - (-x).exp()) / (x.exp() + (-x).exp()),
    "relu": lambda x: x.clamp(min=0),
    "leakyrelu": lambda x: torch.where(x > 0, x, 0.01 * x),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "silu": lambda x: x / (1 + (-x).exp()),
    "elu": lambda x: torch.where(x > 0, x, x.exp() - 1),
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "smht": lambda x: x.clamp(-1, 1),
    "id": lambda x: x,
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def small_space() -> ParameterSpace:
    return ParameterSpace([("a", (3, 5), None), ("b", (7,), None), ("c", (2, 2, 3), None), ("d", (1,), None)])


def mapped(space: ParameterSpace | None = None, latent_dim: int = 1, **options: Any) -> ParamMappedGradiendModel:
    generator = torch.Generator().manual_seed(5)
    return ParamMappedGradiendModel(space or small_space(), latent_dim, generator=generator, **options)


def weights(model: GradiendModel) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# --- the start


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("latent_dim", [1, 2, 3])
@pytest.mark.parametrize("n", [5, 1003])
def test_start__is_the_references_draw_for_draw(n, latent_dim, bias):
    """Fails if a draw is left out, added, or made in another order: a seed would mean another model."""
    torch.manual_seed(17)
    encoder = nn.Linear(n, latent_dim)
    decoder = nn.Linear(latent_dim, n, bias=bias)
    largest = encoder.weight.max().item()
    for parameter in decoder.parameters():
        nn.init.uniform_(parameter, -largest, largest)
    expected = [*encoder.parameters(), *decoder.parameters()]

    torch.manual_seed(17)
    from_global = GradiendModel(n, latent_dim, bias_decoder=bias)
    state = torch.get_rng_state()
    from_generator = GradiendModel(n, latent_dim, bias_decoder=bias, generator=torch.Generator().manual_seed(17))
    assert same(weights(from_global), expected) and same(weights(from_generator), expected)
    assert torch.equal(torch.get_rng_state(), state), "a generator of its own leaves the global one alone"


def test_start__names_and_shapes_are_those_of_the_file():
    shapes = {name: tuple(tensor.shape) for name, tensor in GradiendModel(7, 2).state_dict().items()}
    assert shapes == {
        "encoder.0.linear.weight": (2, 7),
        "encoder.0.linear.bias": (2,),
        "decoder.0.linear.weight": (7, 2),
        "decoder.0.linear.bias": (7,),
    }


# --- the formula


# Each encoder once, with three decoders and one or three latents in turn; every decoder has the test below.
@pytest.mark.parametrize(
    ("encoder", "decoder", "latent_dim"),
    [(name, ("id", "tanh", "gelu")[place % 3], (1, 3)[place % 2]) for place, name in enumerate(ACTIVATIONS)],
)
def test_forward__is_the_plain_formula(encoder, decoder, latent_dim):
    model = GradiendModel(11, latent_dim, activation_encoder=encoder, activation_decoder=decoder)
    x = 5 * random(4, 11)
    encode, decode = ACTIVATIONS[encoder], ACTIVATIONS[decoder]
    with torch.no_grad():
        h = encode(torch.einsum("kn,mn->km", x, model.encoder_weight) + model.encoder_bias)
        y = decode(torch.einsum("km,nm->kn", h, model.decoder_weight) + model.decoder_bias_vector)
        torch.testing.assert_close(model.forward_encoder(x), h)
        torch.testing.assert_close(model(x), y)
        decoded, encoded = model(x, return_encoded=True)
        assert torch.equal(decoded, model(x)) and torch.equal(encoded, model.forward_encoder(x))
        torch.testing.assert_close(model.forward_encoder(x[2]), h[2])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_forward__every_decoder_activation_is_the_plain_formula(activation):
    model = GradiendModel(11, 2, activation_decoder=activation, bias_decoder=False)
    h = 30 * random(4, 2)
    with torch.no_grad():
        torch.testing.assert_close(model.forward_decoder(h), ACTIVATIONS[activation](h @ model.decoder_weight.T))


@pytest.mark.parametrize("option", ["activation_encoder", "activation_decoder"])
def test_model__names_an_unknown_activation(option):
    with pytest.raises(UserError, match=f"{option}='softmax' is not known"):
        GradiendModel(3, **{option: "softmax"})


def test_forward_encoder__takes_gradients_by_name():
    """In any order and with weights that are not in the space: names decide."""
    model = mapped(small_space().select(torch.tensor([1, 4, 16, 30, 34])), 2)
    gradients = {"d": random(1), "x": random(9), "b": random(7), "a": random(3, 5), "c": random(2, 2, 3)}
    flat = torch.cat([gradients[name].reshape(-1) for name in "abcd"])
    expected = model.forward_encoder(flat[[1, 4, 16, 30, 34]])
    torch.testing.assert_close(model.forward_encoder(gradients), expected)
    del gradients["c"]
    with pytest.raises(UserError, match="lacks 'c'"):
        model.forward_encoder(gradients)


@pytest.mark.parametrize("latent_dim", [1, 2])
def test_invert_encoding__turns_the_axis_and_twice_is_nothing(latent_dim):
    model, x = mapped(latent_dim=latent_dim), random(3, 35)
    before, (decoded, encoded) = weights(model), model(x, return_encoded=True)
    model.invert_encoding()
    turned, turned_encoding = model(x, return_encoded=True)
    assert torch.equal(turned_encoding, -encoded) and torch.equal(turned, decoded)
    model.invert_encoding()
    assert same(weights(model), before)


# --- pruning


def naive_selection(importance: list[float], mask: list[bool] | None, threshold: float | None, topk: Any) -> list[int]:
    keep = [i for i in range(len(importance)) if mask is None or mask[i]]
    keep = [i for i in keep if threshold is None or importance[i] >= threshold]
    if topk is not None:
        k = topk if isinstance(topk, int) else math.ceil(topk * len(keep))
        keep = sorted(keep, key=lambda i: (-importance[i], i))[:k]
    return sorted(keep)


@pytest.mark.parametrize("threshold", [None, 2.0])
@pytest.mark.parametrize("masked", [False, True])
def test_select_entries__mask_then_threshold_then_topk_ties_to_the_lowest(threshold, masked):
    """Importances of 0 to 4 tie everywhere. Fails in any other order of the three, or with torch's own tie-breaking."""
    for seed, topk in itertools.product(range(4), [None, 1, 3, 9, 1000, 0.1, 0.34, 0.5, 1.0]):
        generator = torch.Generator().manual_seed(seed)
        importance = torch.randint(0, 5, (37,), generator=generator).float()
        mask = torch.rand(37, generator=generator) < 0.6 if masked else None
        keep = select_entries_to_keep(37, mask=mask, threshold=threshold, topk=topk, importance=importance)
        assert keep.dtype == torch.int64
        expected = naive_selection(importance.tolist(), mask.tolist() if masked else None, threshold, topk)
        assert keep.tolist() == expected, (seed, topk)


def test_select_entries__the_share_is_of_what_is_left():
    importance = torch.arange(10.0)
    mask = importance < 7
    keep = select_entries_to_keep(10, mask=mask, threshold=2.0, topk=0.5, importance=importance)
    assert keep.tolist() == [4, 5, 6]  # ceil(0.5 * 5) of 2, 3, 4, 5, 6


def test_count_to_keep__is_exact_or_as_the_reference_in_float32():
    remaining, share = 16_777_217 + 4, 0.999999
    exact, rounded = math.ceil(share * remaining), int(torch.ceil(torch.tensor(share * remaining)).item())
    assert exact != rounded
    assert count_to_keep(share, remaining) == exact
    assert count_to_keep(share, remaining, in_float32=True) == rounded
    assert count_to_keep(1e-9, 5) == count_to_keep(1e-9, 5, in_float32=True) == 1
    assert count_to_keep(9, 5) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 5.0}, "keeps nothing"),
        ({"mask": torch.zeros(4, dtype=torch.bool)}, "keeps nothing"),
        ({"topk": 0}, "topk=0"),
        ({"topk": 0.0}, "topk=0.0"),
        ({"topk": 1.5}, "topk=1.5"),
        ({"topk": True}, "topk=True"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, r"shape \(3,\)"),
        ({"mask": torch.ones(4)}, "torch.float32"),
        ({"topk": 2, "importance": torch.ones(5)}, r"importance has shape \(5,\)"),
        ({"threshold": 0.5, "importance": torch.ones(2, 2)}, r"importance has shape \(2, 2\)"),
    ],
)
def test_select_entries__names_what_cannot_be(options, message):
    with pytest.raises(UserError, match=message):
        select_entries_to_keep(4, **{"importance": torch.ones(4), **options})


@pytest.mark.parametrize("latent_dim", [1, 2])
def test_importance__is_the_documented_one_for_every_part(latent_dim):
    model = mapped(latent_dim=latent_dim)
    encoder, decoder, bias = model.encoder_weight.tolist(), model.decoder_weight.tolist(), model.decoder_bias_vector
    expected = {
        "encoder-weight": [sum(abs(row[i]) for row in encoder) for i in range(35)],
        "decoder-weight": [sum(abs(value) for value in row) for row in decoder],
        "decoder-bias": [abs(value) for value in bias.tolist()],
        "decoder-sum": [abs(sum(row) + value) for row, value in zip(decoder, bias.tolist(), strict=True)],
    }
    for part in PARTS:
        torch.testing.assert_close(model.get_weight_importance(part), torch.tensor(expected[part]))


@pytest.mark.parametrize("part", ["decoder-bias", "decoder-sum"])
def test_importance__of_a_bias_needs_one(part):
    with pytest.raises(UserError, match="needs a decoder bias"):
        mapped(bias_decoder=False).get_weight_importance(part)
    with pytest.raises(UserError, match="part='decoder' is not known"):
        mapped().get_weight_importance("decoder")


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("latent_dim", [1, 2])
def test_prune__is_the_dense_model_with_the_other_entries_zeroed(latent_dim, bias, inplace):
    """Fails if a column, row or bias entry is taken from another place than the space says."""
    dense = mapped(latent_dim=latent_dim, bias_decoder=bias, activation_encoder="gelu", activation_decoder="tanh")
    model = mapped(latent_dim=latent_dim, bias_decoder=bias, activation_encoder="gelu", activation_decoder="tanh")
    pruned, mask = model.prune(topk=13, inplace=inplace, return_mask=True)
    keep = mask.nonzero().squeeze(1)
    assert mask.sum() == 13 == pruned.input_dim == len(pruned) and mask.shape == (35,)
    assert keep.tolist() == naive_selection(dense.get_weight_importance().tolist(), None, None, 13)
    assert pruned.space == dense.space.select(keep) and pruned.unpruned_length() == 35
    x = random(3, 35)
    zeroed = torch.where(mask, x, 0.0)
    decoded, encoded = pruned(x[:, keep], return_encoded=True)
    dense_decoded, dense_encoded = dense(zeroed, return_encoded=True)
    torch.testing.assert_close(encoded, dense_encoded)
    torch.testing.assert_close(decoded, dense_decoded[:, keep])
    assert (pruned is model) == inplace
    if not inplace:
        assert same(weights(model), weights(dense)) and model.space == dense.space
        assert pruned.architecture() == {**dense.architecture(), "input_dim": 13}
        pruned.encoder_bias.add_(1.0)
        assert torch.equal(model.encoder_bias, dense.encoder_bias), "a copy shares no memory"


@pytest.mark.parametrize("part", PARTS)
def test_prune__ranks_by_the_part_or_by_the_importance_that_is_given(part):
    model = mapped(latent_dim=2)
    expected = naive_selection(model.get_weight_importance(part).tolist(), None, None, 9)
    assert model.prune(topk=9, part=part, inplace=False, return_mask=True)[1].nonzero().squeeze(1).tolist() == expected
    given = random(35, seed=8)
    expected = naive_selection(given.tolist(), None, None, 9)
    pruned = model.prune(topk=9, part=part, importance=given, inplace=False)
    assert pruned.space.base_global(torch.arange(9)).tolist() == expected


def test_prune__twice_is_prune_of_the_composition():
    once, twice = mapped(), mapped()
    twice.prune(topk=20, inplace=True)
    twice.prune(topk=7, inplace=True)
    once.prune(topk=7, inplace=True)
    assert twice.space == once.space and same(weights(twice), weights(once))


def test_prune__by_mask_and_threshold_needs_no_topk():
    model = mapped()
    importance = model.get_weight_importance("encoder-weight")
    mask = torch.arange(35) % 3 != 0
    threshold = float(importance.median())
    expected = naive_selection(importance.tolist(), mask.tolist(), threshold, None)
    pruned = model.prune(mask=mask, threshold=threshold, part="encoder-weight")
    assert pruned.space.base_global(torch.arange(len(pruned))).tolist() == expected


def test_prune__by_positions_is_a_copy_and_changes_nothing_unasked():
    model, positions = mapped(), torch.tensor([3, 34, 3, 11])
    before = weights(model)
    pruned = model.prune(keep_idx=positions)
    assert pruned.space.base_global(torch.arange(3)).tolist() == [3, 11, 34]
    assert len(model) == 35 and same(weights(model), before)
    for wrong in (torch.tensor([35]), torch.tensor([-1]), torch.tensor([], dtype=torch.long)):
        with pytest.raises(UserError, match="positions from 0 to 34"):
            model.prune(keep_idx=wrong)
    with pytest.raises(UserError, match="leave topk, threshold and mask out"):
        model.prune(keep_idx=positions, topk=3)


def test_enhancer_mask__is_over_the_current_space():
    """The reference indexes a pruned vector by base-global positions and fails."""
    model = mapped()
    model.prune(mask=torch.arange(35) % 2 == 1, inplace=True)
    assert len(model) == 17
    importance = model.get_weight_importance("decoder-bias")
    mask = model.get_enhancer_mask(0.3, "decoder-bias")
    assert mask.nonzero().squeeze(1).tolist() == naive_selection(importance.tolist(), None, None, 6)
    top = model.get_topk_weights("decoder-bias", 6)
    model.prune(mask=mask, inplace=True)
    assert model.space.base_global(torch.arange(6)).tolist() == sorted(top)


@pytest.mark.parametrize("topk", [1, 4, 0.2, 1000])
def test_topk_weights__are_base_global_and_most_important_first(topk):
    model = mapped(latent_dim=2)
    keep = torch.tensor([2, 3, 17, 22, 23, 24, 34])
    model.keep_entries(keep)
    model.decoder_weight.copy_(torch.tensor([[1.0, -1], [5, 0], [2, 2], [0, 5], [0, 0], [-3, 3], [1, 0]]))
    order = [24, 3, 22, 17, 2, 34, 23]  # 6, then 5 twice: the lower position first, 4, 2, 1, 0
    count = min(7, topk if isinstance(topk, int) else math.ceil(topk * 7))
    assert model.get_topk_weights(topk=topk) == order[:count]


# --- with a base model


def whole(family: str = "bert", *, keep: int | None = None, **options: Any) -> ModelWithGradiend:
    tokenizer = tiny.wordpiece_tokenizer() if family == "bert" else tiny.byte_level_tokenizer()
    base = tiny.base_model(family, len(tokenizer))
    model = create_model_with_gradiend(base, tokenizer=tokenizer, seed=3, **options)
    if keep is not None:
        model.gradiend.keep_entries(torch.arange(1, len(model), keep))
    return model


def expected_vector(model: ModelWithGradiend, part: str, factors: list[float]) -> Tensor:
    gradiend = model.gradiend
    decoder, bias = gradiend.decoder_weight, gradiend.decoder_bias_vector
    return {
        "decoder": lambda: decoder @ torch.tensor(factors) + bias,
        "encoder-weight": lambda: gradiend.encoder_weight.sum(0),
        "decoder-weight": lambda: decoder.sum(1),
        "decoder-bias": lambda: bias,
        "decoder-sum": lambda: decoder.sum(1) + bias,
    }[part]()


# Where an entry goes depends on the family and on what is kept, the vector on part and latents: all pairs of each.
@pytest.mark.parametrize(
    ("family", "keep", "latent_dim", "part"),
    [
        *((family, keep, 1, "decoder") for family in ("bert", "gpt2", "llama") for keep in (None, 3, 501)),
        *(("gpt2", 501, latent_dim, part) for latent_dim in (1, 2) for part in PARTS),
        ("bert", 3, 2, "decoder"),
    ],
)
def test_rewrite__adds_the_vector_at_the_selected_entries_and_nothing_elsewhere(family, keep, latent_dim, part):
    """Fails if an entry is added twice (a tied weight), to a wrong place, or to a weight that is not selected."""
    model = whole(family, keep=keep, latent_dim=latent_dim)
    before = {name: tensor.clone() for name, tensor in model.base_model.state_dict().items()}
    factors = [-1.5, 0.5][:latent_dim]
    changed = model.rewrite_base_model(0.25, factors if latent_dim > 1 else factors[0], part=part)
    vector = expected_vector(model, part, factors)
    after = dict(changed.named_parameters())
    for weight in model.gradiend.space.weights:
        expected = before[weight.name].clone().reshape(-1)
        places = weight.flat_indices()
        expected[places] += 0.25 * vector[weight.offset : weight.stop]
        actual = after.pop(weight.name).detach().reshape(-1)
        torch.testing.assert_close(actual[places], expected[places], rtol=1e-6, atol=1e-7)
        untouched = torch.ones(weight.numel, dtype=torch.bool)
        untouched[places] = False
        assert torch.equal(actual[untouched], expected[untouched])
    assert all(torch.equal(parameter, before[name]) for name, parameter in after.items()), "heads are left alone"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.base_model.state_dict().items())
    if family == "gpt2":
        assert changed.lm_head.weight is changed.transformer.wte.weight
    if keep is None:
        assert not torch.equal(next(changed.parameters()), next(model.base_model.parameters()))


def test_rewrite__one_factor_stands_for_all_of_the_latent():
    model = whole(latent_dim=2)
    one, two = (model.rewrite_vector(factor, "decoder") for factor in (0.7, [0.7, 0.7]))
    assert torch.equal(one, two)
    with pytest.raises(UserError, match="feature_factor has 3 values, latent_dim is 2"):
        model.rewrite_base_model(1.0, [1.0, 2.0, 3.0])


def test_rewrite__names_a_part_that_is_not_there():
    model = whole(bias_decoder=False)
    with pytest.raises(UserError, match="needs a decoder bias"):
        model.rewrite_base_model(1.0, part="decoder-sum")
    with pytest.raises(UserError, match="part='nothing'"):
        model.rewrite_base_model(1.0, part="nothing")


@tiny.without_onednn()
def test_rewrite__works_in_bfloat16():
    """The reference fails. The step is rounded once, to the type of the base weight."""
    model = whole()
    model.base_model.to(torch.bfloat16)
    model.gradiend.to(torch.bfloat16)
    name = model.gradiend.space.weights[0].name
    before = dict(model.base_model.named_parameters())[name]
    after = dict(model.rewrite_base_model(8.0, 1.0).named_parameters())[name]
    size = before.numel()
    vector = model.gradiend.decoder_weight[:size, 0].float() + model.gradiend.decoder_bias_vector[:size].float()
    assert after.dtype == torch.bfloat16
    torch.testing.assert_close(
        after.detach().float().reshape(-1), before.detach().float().reshape(-1) + 8 * vector, rtol=0.02, atol=0.02
    )


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("keep", [None, 7])
def test_encode__of_a_text_is_the_encoding_of_its_gradient(family, keep):
    model = whole(family, keep=keep, latent_dim=2)
    text = "the man said [MASK] left"
    gradient = model.create_gradients(text, "he")
    assert gradient.shape == (len(model),)
    loss_before = model.create_gradients(text, "she")
    assert not torch.equal(gradient, loss_before), "a later gradient does not overwrite an earlier one"
    expected = torch.tanh(model.gradiend.encoder_weight @ gradient + model.gradiend.encoder_bias)
    torch.testing.assert_close(model.encode(text, "he"), expected)
    torch.testing.assert_close(model.encode(gradient), expected)
    assert model.encode(text, "he", return_float=True) == pytest.approx(expected.tolist())
    assert not model.encode(text, "he").requires_grad
    with pytest.raises(UserError, match="pass label="):
        model.encode(text)


def test_encode__gives_one_float_for_one_latent():
    model = whole()
    value = model.encode("the man said [MASK] left", "he", return_float=True)
    assert isinstance(value, float) and -1.0 <= value <= 1.0


def test_encode__follows_a_prune():
    """Fails if gradients are still formed over the space of before."""
    model = whole()
    text = "the man said [MASK] left"
    gradient = model.create_gradients(text, "he")
    pruned, mask = model.prune_gradiend(topk=0.1, inplace=False, return_mask=True)
    assert len(model.gradiend) == gradient.numel() != len(pruned) and pruned.base_model is model.base_model
    torch.testing.assert_close(pruned.create_gradients(text, "he"), gradient[mask])
    torch.testing.assert_close(model.create_gradients(text, "he"), gradient)
    assert model.prune_gradiend(topk=0.1) is model
    torch.testing.assert_close(model.encode(text, "he"), pruned.encode(text, "he"))


def test_whole__hands_questions_on_to_the_gradiend_model():
    model = whole()
    assert torch.equal(model.get_weight_importance("encoder-weight"), model.gradiend.encoder_weight[0].abs())
    assert model.get_topk_weights("decoder-bias", 5) == model.gradiend.get_topk_weights("decoder-bias", 5)
    assert model.get_enhancer_mask(5).sum() == 5
    before = model.gradiend.encoder_weight.clone()
    model.invert_encoding()
    assert torch.equal(model.gradiend.encoder_weight, -before)


def test_create__restricts_the_weights_and_fixes_the_start():
    one = whole(param_map=["bert.encoder.layer.1.*"])
    assert all(name.startswith("bert.encoder.layer.1.") for name in one.gradiend.param_map)
    two = whole(param_map=["bert.encoder.layer.1.*"])
    assert same(weights(one.gradiend), weights(two.gradiend))
    assert not one.base_model.training


def test_create__names_what_is_missing():
    base = tiny.base_model("bert", 40)
    with pytest.raises(UserError, match="pass tokenizer="):
        create_model_with_gradiend(base)
    with pytest.raises(UserError, match="source='factual_'"):
        whole(source="factual_")
    with pytest.raises(UserError, match="model='/nowhere/at/all' "):
        create_model_with_gradiend("/nowhere/at/all")


def test_whole__rejects_another_base_model():
    model = whole()
    larger = tiny.base_model("bert", 99)
    with pytest.raises(
        UserError, match=r"names bert.embeddings.word_embeddings.weight of shape .* has shape \(99, 12\)"
    ):
        ModelWithGradiend(larger, model.gradiend, model.tokenizer)
    with pytest.raises(UserError, match="no such weight"):
        ModelWithGradiend(tiny.base_model("gpt2", 99), model.gradiend, model.tokenizer)


@pytest.mark.parametrize("trusted", [True, False])
def test_remote_code__is_off_by_default_and_loud_when_on(
    masked_lm: Path, caplog: pytest.LogCaptureFixture, trusted: bool
) -> None:
    load_base_model(str(masked_lm), **({"trust_remote_code": True} if trusted else {}))
    assert ("runs on this machine with your rights" in caplog.text) is trusted
