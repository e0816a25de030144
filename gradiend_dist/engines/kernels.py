"""The passes of a step over n as Triton kernels, each of which reads and writes what it needs once.

Bytes per entry of n with K = m = 1, in float32: `encode` 8, `reduce_decoder` 12, `update_encoder` 28, `update_decoder`
52; 100 in all, which is what is read and written when each pass does so once. Moments in bfloat16 take 24 less.

Names: i are entries of n, j latents, k items. K rows of gradients come as a tuple of pointers, since items of several
batches are not one tensor; the loops over them are unrolled. We [m, n] and Wd [n, m] are read in tiles, in which m is
filled up to a power of two (`padded`). Sums are left behind as one row for each program, to be added up in float64: in
the same order every time, as atomic additions would not.

What Adam is set to comes as `fused.AdamNumbers`.

A launch works on the entries from `start` to `stop`. Triton moves several numbers in one instruction where it knows
both to be multiples of 16: who launches cuts off what is not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gradiend_dist.engines import rounding

FIRST_FACTOR = tl.constexpr(rounding.FIRST_FACTOR)
SECOND_FACTOR = tl.constexpr(rounding.SECOND_FACTOR)
GOLDEN = tl.constexpr(rounding.GOLDEN)


@triton.jit
def encode(
    sources, weight, stride, sums, start, stop, latents: tl.constexpr, padded: tl.constexpr, block: tl.constexpr
):
    """We.x of each item and, of a single item, |x|^2."""
    i, inside = _entries(start, stop, block)
    j = tl.arange(0, padded)
    used = j < latents
    rows = weight + j[:, None].to(tl.int64) * stride + i[None, :]
    w = tl.load(rows, mask=used[:, None] & inside[None, :], other=0.0)
    sums += tl.program_id(0) * (len(sources) * latents + (1 if len(sources) == 1 else 0))
    for k in tl.static_range(len(sources)):
        x = tl.load(sources[k] + i, mask=inside, other=0.0)
        tl.store(sums + k * latents + j, tl.sum(w * x[None, :], axis=1), mask=used)
        if len(sources) == 1:
            tl.store(sums + latents, tl.sum(x * x))


@triton.jit
def encoder_gradient_square(sources, d_encoder, sums, start, stop, latents: tl.constexpr, block: tl.constexpr):
    """Squares of d^T x; x is read from memory once, and for the other latents from the cache."""
    i, inside = _entries(start, stop, block)
    squares = tl.full([block], 0.0, tl.float32)
    for j in tl.static_range(latents):
        gradient = _encoder_gradient(sources, d_encoder, i, inside, j, latents, block)
        squares += gradient * gradient
    tl.store(sums + tl.program_id(0), tl.sum(squares))


@triton.jit
def update_encoder(
    sources, d_encoder, weights, moments, second_moments, salts, offset, num_steps, not_finite, adam, sums, start, stop,
    decoupled: tl.constexpr, latents: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Adam on the rows of We along d^T x; their squares afterwards."""
    i, inside = _entries(start, stop, block)
    steps = tl.load(num_steps)
    may_write = tl.load(not_finite).to(tl.int32) == 0
    squares = tl.full([block], 0.0, tl.float32)
    for j in tl.static_range(latents):
        gradient = _encoder_gradient(sources, d_encoder, i, inside, j, latents, block)
        w = _update(
            weights[j], moments[j], second_moments[j], i, i + offset, salts[j], gradient, inside, may_write, steps,
            adam, decoupled,
        )  # fmt: skip
        squares += w * w
    tl.store(sums + tl.program_id(0), tl.sum(squares))


@triton.jit
def reduce_decoder(
    targets, weight, bias, latent, shares, sums, start, stop,
    activation: tl.constexpr, latents: tl.constexpr, padded: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """r.Wd of each item; the loss, and the squares of the gradients of bd and Wd, all for shares instead of factors."""
    i, inside = _entries(start, stop, block)
    j = tl.arange(0, padded)
    used = j < latents
    places = i[:, None] * latents + j[None, :]
    tile = inside[:, None] & used[None, :]
    w = tl.load(weight + places, mask=tile, other=0.0)
    b = _bias(bias, i, inside, block)
    loss = tl.full([block], 0.0, tl.float32)
    bias_gradient = tl.full([block], 0.0, tl.float32)
    gradient = tl.full([block, padded], 0.0, tl.float32)
    sums += tl.program_id(0) * (len(targets) * latents + 3)
    for k in tl.static_range(len(targets)):
        h = tl.load(latent + k * latents + j, mask=used, other=0.0)
        share = tl.load(shares + k)
        error, r = _errors(w, b, h, targets[k], i, inside, activation)
        loss += share * error * error
        bias_gradient += share * r
        gradient += (share * r)[:, None] * h[None, :]
        tl.store(sums + k * latents + j, tl.sum(w * r[:, None], axis=0), mask=used)
    sums += len(targets) * latents
    tl.store(sums, tl.sum(loss))
    tl.store(sums + 1, tl.sum(bias_gradient * bias_gradient))
    tl.store(sums + 2, tl.sum(tl.sum(gradient * gradient, axis=1)))


@triton.jit
def update_decoder(
    targets, weight, bias, moments, second_moments, salts, offset, latent, factors, num_steps, not_finite, adam, sums,
    start, stop,
    decoupled: tl.constexpr, activation: tl.constexpr, latents: tl.constexpr, padded: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Adam on Wd and bd along the errors, which are formed anew; the squares of Wd afterwards."""
    i, inside = _entries(start, stop, block)
    steps = tl.load(num_steps)
    may_write = tl.load(not_finite).to(tl.int32) == 0
    j = tl.arange(0, padded)
    used = j < latents
    places = i[:, None] * latents + j[None, :]
    tile = inside[:, None] & used[None, :]
    w = tl.load(weight + places, mask=tile, other=0.0)
    b = _bias(bias, i, inside, block)
    bias_gradient = tl.full([block], 0.0, tl.float32)
    gradient = tl.full([block, padded], 0.0, tl.float32)
    for k in tl.static_range(len(targets)):
        h = tl.load(latent + k * latents + j, mask=used, other=0.0)
        _, r = _errors(w, b, h, targets[k], i, inside, activation)
        r *= tl.load(factors + k)
        bias_gradient += r
        gradient += r[:, None] * h[None, :]
    w = _step(
        w, weight, moments[0], second_moments[0], places, places + offset * latents, salts[0], gradient, tile,
        may_write, steps, adam, decoupled,
    )  # fmt: skip
    if bias is not None:
        _step(
            b, bias, moments[1], second_moments[1], i, i + offset, salts[1], bias_gradient, inside, may_write, steps,
            adam, decoupled,
        )  # fmt: skip
    tl.store(sums + tl.program_id(0), tl.sum(tl.sum(w * w, axis=1)))


@triton.jit
def _entries(start, stop, block: tl.constexpr):
    """The entries of this program, and which of them there are. In 64 bits: n may be larger than 2^31."""
    i = start + tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    return i, i < stop


@triton.jit
def _encoder_gradient(sources, d_encoder, i, inside, j, latents: tl.constexpr, block: tl.constexpr):
    """One row of d^T x."""
    gradient = tl.full([block], 0.0, tl.float32)
    for k in tl.static_range(len(sources)):
        gradient += tl.load(d_encoder + k * latents + j) * tl.load(sources[k] + i, mask=inside, other=0.0)
    return gradient


@triton.jit
def _bias(bias, i, inside, block: tl.constexpr):
    return tl.full([block], 0.0, tl.float32) if bias is None else tl.load(bias + i, mask=inside, other=0.0)


@triton.jit
def _errors(w, b, h, target, i, inside, activation: tl.constexpr):
    """y' - y, and the same passed back through the activation; 0 behind the last entry."""
    decoded, slope = _activate(tl.sum(w * h[None, :], axis=1) + b, activation)
    error = tl.where(inside, decoded - tl.load(target + i, mask=inside, other=0.0), 0.0)
    return error, error * slope


@triton.jit
def _update(
    weight, moment, second_moment, i, counter, salt, gradient, inside, may_write, steps, adam, decoupled: tl.constexpr
):
    w = tl.load(weight + i, mask=inside, other=0.0)
    return _step(
        w, weight, moment, second_moment, i, counter, salt, gradient, inside, may_write, steps, adam, decoupled
    )


@triton.jit
def _step(
    w, weight, moment, second_moment, places, counter, salt, gradient, inside, may_write, steps, adam,
    decoupled: tl.constexpr,
):  # fmt: skip
    """One Adam or AdamW step of the weights `w` that are at `places`; returns them as they are afterwards."""
    before = w
    m = _moments(moment, places, inside)
    v = _moments(second_moment, places, inside)
    if decoupled:
        w -= adam.learning_rate * adam.weight_decay * w
    else:
        gradient += adam.weight_decay * w
    m = adam.beta1 * m + adam.rest1 * gradient
    v = adam.beta2 * v + adam.rest2 * gradient * gradient
    correction1 = -_expm1(steps * adam.log_beta1)
    correction2 = -_expm1(steps * adam.log_beta2)
    w -= adam.learning_rate / correction1 * m / (tl.sqrt(v) / tl.sqrt(correction2) + adam.epsilon)
    writes = inside & may_write
    tl.store(weight + places, w, mask=writes)
    if moment.dtype.element_ty == tl.float32:
        tl.store(moment + places, m, mask=writes)
        tl.store(second_moment + places, v, mask=writes)
    else:
        noise = _noise(counter, salt, steps)
        tl.store(moment + places, _rounded(m, noise & 0xFFFF), mask=writes)
        tl.store(second_moment + places, _rounded(v, noise >> 16), mask=writes)
    return tl.where(writes, w, before)


@triton.jit
def _moments(moment, places, inside):
    """In float32; bfloat16 numbers come as int16, the upper half of their bits."""
    if moment.dtype.element_ty == tl.float32:
        m = tl.load(moment + places, mask=inside, other=0.0)
    else:
        m = (tl.load(moment + places, mask=inside, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return m


@triton.jit
def _rounded(value, noise):
    """`rounding.store_rounded`: the bfloat16 neighbour below or above, as int16."""
    return ((value.to(tl.uint32, bitcast=True) + noise) >> 16).to(tl.int16)


@triton.jit
def _noise(counter, salt, steps):
    """`rounding.Rounding.noise`."""
    folded = counter.to(tl.uint32) ^ ((counter >> 32).to(tl.uint32) * GOLDEN)
    return _mix(folded ^ _mix(steps.to(tl.uint32) ^ salt.to(tl.uint32)))


@triton.jit
def _mix(bits):
    bits ^= bits >> 16
    bits *= FIRST_FACTOR
    bits ^= bits >> 15
    bits *= SECOND_FACTOR
    return bits ^ (bits >> 16)


@triton.jit
def _activate(x, activation: tl.constexpr):
    """act(x) and act'(x); at corners the derivative that torch takes."""
    if activation == "id":
        y = x
        slope = tl.full(x.shape, 1.0, tl.float32)
    elif activation == "relu":
        y = tl.where(x > 0, x, 0.0)
        slope = tl.where(x > 0, 1.0, 0.0)
    elif activation == "leakyrelu":
        y = tl.where(x > 0, x, 0.01 * x)
        slope = tl.where(x > 0, 1.0, 0.01)
    elif activation == "smht":
        y = tl.minimum(tl.maximum(x, -1.0), 1.0)
        slope = tl.where((x > -1.0) & (x < 1.0), 1.0, 0.0)
    elif activation == "elu":
        below = _expm1(tl.minimum(x, 0.0))
        y = tl.where(x > 0, x, below)
        slope = tl.where(x > 0, 1.0, below + 1.0)
    elif activation == "tanh":
        y = _tanh(x)
        slope = 1.0 - y * y
    elif activation == "gelu":
        share = 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476))
        y = x * share
        slope = share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif activation == "silu":
        share = 1.0 / (1.0 + tl.exp(-x))
        y = x * share
        slope = share * (1.0 + x * (1.0 - share))
    else:
        tl.static_assert(activation == "sigmoid")
        y = 1.0 / (1.0 + tl.exp(-x))
        slope = y * (1.0 - y)
    return y, slope


@triton.jit
def _tanh(x):
    """To the last bits also near 0, where 1 - 2 / (e^2x + 1) would lose them: there Cephes' polynomial."""
    z = x * x
    series = -5.70498872745e-3 * z + 2.06390887954e-2
    series = (series * z - 5.37397155531e-2) * z + 1.33314422036e-1
    series = (series * z - 3.33332819422e-1) * z * x + x
    return tl.where(tl.abs(x) < 0.625, series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def _expm1(x):
    """e^x - 1 for x <= 0, to the last bits also near 0."""
    t = _tanh(0.5 * x)
    return 2.0 * t / (1.0 - t)
