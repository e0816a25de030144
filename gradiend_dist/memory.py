"""Bytes that one GPU or rank needs, by engine: integer formulas, from the sizes of a model alone.

n entries are trained on, m is the latent dimension, b = 1 with a decoder bias, W ranks; p is the size of the largest
rank's slice of n; all of it float32, 4 bytes.

    weights       placed, sliced: 4p(2m + b)             zero 1, 2: 4n(2m + b)          zero 3: the same / W
    moments       placed, sliced: 8p(2m + b)             zero: 12n(2m + b) / W, with the fp32 masters
    gradients     x and y: 4p for each kind (zero: 4n), times the items of a step
    step buffers  placed, sliced: 3 chunks of p          zero: output, its gradient, the gradients of the weights on
                                                         their way and in DeepSpeed's bucket; 3: the gathered weights
    host          a copy of weights and moments while a state is saved (zero: what is offloaded), and the indices

Between two steps the base model works, and needs at that time instead of the step buffers:

    base buffers  a weight's gradient as autograd leaves it and in float32, one bucket that fills, and `IN_FLIGHT` + 1
                  that travel; placed: the gradient alone; FSDP: the root's and two layers' weights whole, a gradient
    activations   17 numbers per token, layer and hidden unit in the base's dtype (attention scores are not kept), and
                  3 float32 per predicted place and vocabulary entry
    indices       8 bytes per entry of a pruned space (FSDP: per own entry)

    sketch        4 bytes x 12 held-out items x min(p, 2^20), when the decoder's share of the target is first measured
                  (n > 2^20: 2^20 numbers on every rank)

The peak is the larger of the two times, or that of a spectral start, before there are moments, x and y: the rest, and a
sketch of each kind of all its items. A run without a step has no moments, x and y at all.

Pre-pruning has 4 bytes per own entry of the whole space (zero: of an even slice of it; 8 where the items of a spectral
start rank the weights), on a GPU that has room for them, else on the host: they count in `peak_on_host` alone.

Offloaded, a device has the base model, base buffers, activations and sketches; what else there is is in mapped files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradiend_dist.config.groups.evaluation import ITEMS_OF_A_SIDE
from gradiend_dist.engines.chunks import CHUNK, CHUNK_ON_GPU
from gradiend_dist.gradients.buckets import BUCKET, IN_FLIGHT
from gradiend_dist.gradients.sketch import SKETCH

# Defaults of DeepSpeed: numbers in one bucket of gradients, and gathered numbers above which stage 3 lets weights go
# and gathers the decoder's a second time.
DEEPSPEED_BUCKET = 500_000_000

DEEPSPEED_MAX_LIVE = 1_000_000_000

# Chunks that a step holds at once: the error, what is passed back, an outer product.
CHUNKS_AT_ONCE = 3

# What a CPU process needs beyond this at its first large step, whatever the engine and n: code that is loaded then, and
# freed chunks that malloc keeps (measured: 2 to 8 MB).
PROCESS_ON_CPU = 6_000_000

# Per own entry of the whole space while `pruning.sum_of_sizes` works: one float32 vector, and, where it ranks by
# several items of a direction, their mean.
PRE_PRUNE_BYTES = 4

PRE_PRUNE_BYTES_BY_ITEMS = 8

# Of each direction and of identities.
HELD_OUT_ITEMS = 3 * ITEMS_OF_A_SIDE


@dataclass(frozen=True)
class Head:
    """Encoder and decoder, and what a step over them is made of."""

    n: int
    latent_dim: int = 1
    bias_decoder: bool = True
    kinds: int = 2
    """Different gradients: source and target."""
    items: int = 1
    """Gradient vectors in one optimizer step."""
    seeds: int = 1
    """Trained at once."""
    spectral_items: int = 0
    """Items of a spectral start; 0: it is random."""

    @property
    def vectors(self) -> int:
        """Numbers per entry of n: encoder, decoder and decoder bias."""
        return 2 * self.latent_dim + int(self.bias_decoder)


@dataclass(frozen=True)
class Base:
    """A base model, from its configuration."""

    weight_sizes: tuple[int, ...]
    """Of the space, in the order of the model."""
    total: int
    """All weights, heads included."""
    bytes_per_weight: int
    layer_sizes: tuple[int, ...] = ()
    """Weights in each block that FSDP cuts by itself."""
    first_dimensions: tuple[int, ...] = ()
    """Of the space's weights: FSDP cuts along it."""
    hidden: int = 0
    layers: int = 0
    vocabulary: int = 0

    @property
    def n(self) -> int:
        return sum(self.weight_sizes)

    @property
    def largest(self) -> int:
        return max(self.weight_sizes, default=0)


@dataclass(frozen=True)
class Need:
    """Bytes of the GPU that needs most, by part; `sent` is what it sends in one step."""

    base: int = 0
    weights: int = 0
    moments: int = 0
    gradients: int = 0
    indices: int = 0
    step_buffers: int = 0
    base_buffers: int = 0
    activations: int = 0
    held_out: int = 0
    """Sketch of the held-out items."""
    spectral: int = 0
    """Sketches of a spectral start: 0 without."""
    pre_prune: int = 0
    """Vectors of pre-pruning, on the host where the GPU has no room for them; 0 without."""
    host: int = 0
    """Host memory of a rank: what is offloaded, a state while it is being saved, indices."""
    sent: int = 0

    @property
    def resident(self) -> int:
        return self.base + self.weights + self.moments + self.gradients + self.indices

    @property
    def buffers(self) -> int:
        """The larger of what a step and what a pass of the base model need beside the rest."""
        return max(self.step_buffers, self.base_buffers + self.activations + self.held_out)

    @property
    def peak(self) -> int:
        start = self.base + self.weights + self.indices + self.spectral + self.base_buffers + self.activations
        return max(self.resident + self.buffers, start if self.spectral else 0)

    @property
    def peak_on_host(self) -> int:
        """Where the host is the device as well."""
        return max(self.peak, self.base + self.pre_prune + self.base_buffers + self.activations)


# --- encoder and decoder


def sketches(head: Head, slice_size: int) -> dict[str, int]:
    """Bytes of the sketches of a rank that knows `slice_size` of each gradient."""
    numbers = SKETCH if head.n > SKETCH else slice_size
    return {"held_out": 4 * HELD_OUT_ITEMS * numbers, "spectral": 4 * head.spectral_items * head.kinds * numbers}


def pre_prune(run: Run, slice_size: int) -> int:
    """Vectors over `slice_size` of the whole space."""
    each = PRE_PRUNE_BYTES_BY_ITEMS if run.head.spectral_items else PRE_PRUNE_BYTES
    return each * slice_size if run.is_pruned else 0


def sliced(head: Head, slice_size: int, *, chunk: int = CHUNK_ON_GPU) -> Need:
    """A rank with `slice_size` of the n entries; the single process has all of them."""
    entries = slice_size * head.vectors
    return Need(
        weights=4 * entries * head.seeds,
        moments=8 * entries * head.seeds,
        gradients=4 * slice_size * head.kinds * head.items,
        step_buffers=4 * CHUNKS_AT_ONCE * min(slice_size, chunk) * head.items,
        host=12 * entries * head.seeds,
    )


def zero(head: Head, stage: int, ranks: int, *, offload: bool = False, on_gpu: bool = True) -> Need:
    """A rank of DeepSpeed; on a CPU, pages of its bucket that are not written to take no memory."""
    numbers = head.n * head.vectors
    own = -(-numbers // ranks)
    optimizer = 12 * own * head.seeds
    return Need(
        weights=4 * (own if stage == 3 else numbers) * head.seeds,
        moments=0 if offload else optimizer,
        gradients=4 * head.n * head.kinds * head.items,
        step_buffers=_zero_step_buffers(head, stage, own, offload=offload, on_gpu=on_gpu),
        host=optimizer if offload else 0,
        sent=_zero_sent(head, stage, ranks),
    )


def _zero_step_buffers(head: Head, stage: int, own: int, *, offload: bool, on_gpu: bool) -> int:
    """Beside the rest: the decoder's output and its gradient; gradients; at stage 3 the gathered weights."""
    numbers, one = head.n * head.vectors, head.n * head.latent_dim
    bucket = DEEPSPEED_BUCKET if on_gpu else numbers if numbers <= DEEPSPEED_BUCKET else 0
    output = 2 * head.n * head.items
    if stage < 3:
        # Small ones are copied into the bucket one by one; those larger than it are all there until they are averaged.
        gradients = one if numbers <= DEEPSPEED_BUCKET else numbers
        return 4 * (output + gradients + bucket)
    # All weights, and one more copy while they are unpacked; above the limit the decoder's alone.
    gathered = numbers + one if numbers <= DEEPSPEED_MAX_LIVE else numbers - one
    averaged = 0 if offload else own
    return 4 * (output + one + bucket + gathered + averaged)


def _zero_sent(head: Head, stage: int, ranks: int) -> int:
    numbers = 4 * head.n * head.vectors
    if stage < 3:
        return all_reduce(numbers, ranks) + all_gather(numbers, ranks)
    again = 4 * head.n * head.latent_dim if numbers > 4 * DEEPSPEED_MAX_LIVE else 0
    return all_gather(numbers + again, ranks) + all_gather(numbers, ranks)


# --- what a rank sends, in the ring algorithms of NCCL


def all_gather(whole: int, ranks: int) -> int:
    """A rank passes on all pieces but one; the same for a reduce-scatter."""
    return whole * (ranks - 1) // ranks


def all_reduce(whole: int, ranks: int) -> int:
    return 2 * all_gather(whole, ranks)


# --- the base model


def bucket_sizes(weight_sizes: Sequence[int], size: int = BUCKET) -> list[int]:
    """How `gradients.buckets.Buckets` cuts these weights."""
    found, together = [], 0
    for entries in reversed(weight_sizes):
        if together and together + entries > size:
            found.append(together)
            together = 0
        together += entries
    return [*found, together] if together else found


def bytes_in_flight(weight_sizes: Sequence[int], ranks: int, *, everyone_all: bool) -> int:
    """Bytes of the bucket that fills and of those that travel, with what arrives of each (in place if all get all)."""
    sizes = bucket_sizes(weight_sizes)
    window = IN_FLIGHT + 2
    most = max((sum(sizes[i : i + window]) for i in range(max(1, len(sizes) - window + 1))), default=0)
    return 4 * most + (0 if everyone_all else 4 * -(-most // ranks))


def single_gradient(base: Base) -> int:
    """The largest weight's gradient as autograd leaves it, and in float32 where that is another one."""
    return base.largest * (base.bytes_per_weight + (4 if base.bytes_per_weight != 4 else 0))


def activations(base: Base, rows: int, tokens: int, *, recomputes: bool = False) -> int:
    """Of a forward pass that keeps what its backward pass needs; recomputed: what enters layers, and that of one."""
    numbers = base.layers + 17 if recomputes else 17 * base.layers
    return numbers * base.hidden * rows * tokens * base.bytes_per_weight + 12 * base.vocabulary * rows


def fsdp_base(base: Base, ranks: int) -> int:
    return -(-base.total // ranks) * base.bytes_per_weight


def fsdp_buffers(base: Base) -> int:
    """Root weights (embeddings, head) stay whole in a pass; two layers; a gradient and its float32 copy, in which ranks
    add it up."""
    layer = max(base.layer_sizes, default=0)
    root = base.total - sum(base.layer_sizes)
    return base.bytes_per_weight * (root + 2 * layer) + (base.bytes_per_weight + 4) * max(layer, root)


def fsdp_slice(base: Base, ranks: int) -> int:
    """Entries of rank 0, which has most: ceil(rows / W) rows of each weight. Of a pruned space: the same share."""
    sizes = zip(base.weight_sizes, base.first_dimensions, strict=True)
    return sum(-(-rows // ranks) * (size // rows) for size, rows in sizes)


def fsdp_sent(base: Base, ranks: int, kinds: int) -> int:
    """Weights for the forward pass, layers again for each backward pass, float32 gradients of each to their owners."""
    weights, layers = (base.bytes_per_weight * k for k in (base.total, sum(base.layer_sizes)))
    return all_gather(weights + kinds * (layers + 4 * base.n), ranks)


@dataclass(frozen=True)
class Run:
    """What is planned: a base model, a head over a share of its weights, and how rows reach the base."""

    base: Base
    head: Head
    rows: int
    """Rows of one gradient that are in one pass, over all ranks."""
    tokens: int
    recomputes: bool = False
    """Layers are computed again in the backward pass."""
    has_steps: bool = True
    """Or it is a closed form alone."""
    offloads: bool = False
    """What has a number for each base weight is in mapped files."""

    @property
    def is_pruned(self) -> bool:
        return self.head.n < self.base.n


def need_of_base(run: Run) -> Need:
    """The base model of a single process, on a GPU of its own."""
    gradients = Need(gradients=4 * run.head.n * run.head.kinds * run.head.items if run.has_steps else 0)
    return with_base(gradients, run, 1, run.head.n, run.base.n, base_buffers=single_gradient(run.base))


def need_offloaded(run: Run) -> Need:
    """The GPU of a single process whose vectors are on the host or in files, as `host` says, moments on the host."""
    whole, base = in_steps(run, sliced(run.head, run.head.n)), need_of_base(run)
    return replace(base, host=whole.weights + whole.moments + base.pre_prune + base.host)


def in_steps(run: Run, need: Need) -> Need:
    """The same without what only steps need, if there are none."""
    return need if run.has_steps else replace(need, moments=0, gradients=0, step_buffers=0, sent=0)


def need_placed(run: Run, gpus: int) -> Need:
    """The fullest of 1, 2 or 3 GPUs in a single process, placed as `devices.place` says."""
    head, model = run.head, need_of_base(run)
    whole = in_steps(run, sliced(head, head.n))
    if gpus == 1:
        return together(model, replace(whole, gradients=0))
    gradients = 4 * head.n * head.items if run.has_steps else 0
    encoder, decoder = (share_of(whole, head, vectors, gradients=gradients) for vectors in encoder_and_decoder(head))
    two = [together(model, replace(encoder, gradients=0)), decoder]
    fullest = max(two if gpus == 2 else [encoder, decoder, model], key=lambda need: need.peak)
    return replace(fullest, host=whole.host + model.host, sent=4 * head.n * head.items * (gpus - 1))


def encoder_and_decoder(head: Head) -> tuple[int, int]:
    """Of the vectors, those of either half."""
    return head.latent_dim, head.vectors - head.latent_dim


def share_of(whole: Need, head: Head, vectors: int, *, gradients: int = 0) -> Need:
    """What some of the vectors take of a device that would hold all."""
    return replace(
        whole,
        weights=whole.weights * vectors // head.vectors,
        moments=whole.moments * vectors // head.vectors,
        gradients=gradients,
        step_buffers=whole.step_buffers if vectors else 0,
    )


def together(a: Need, b: Need) -> Need:
    """Two parts on one device."""
    return Need(*(getattr(a, name) + getattr(b, name) for name in Need.__dataclass_fields__))


def with_base(
    need: Need, run: Run, ranks: int, slice_size: int, unpruned_slice: int, *, base_buffers: int, sent: int = 0
) -> Need:
    """`need`, and that of a base model which is whole on this rank.

    `slice_size` and `unpruned_slice` are the entries that the rank knows of a gradient: after pruning, and before.
    """
    indices = 8 * run.head.n if run.is_pruned else 0
    return replace(
        need,
        base=run.base.total * run.base.bytes_per_weight,
        indices=indices,
        base_buffers=base_buffers,
        activations=activations(run.base, -(-run.rows // ranks), run.tokens, recomputes=run.recomputes),
        pre_prune=pre_prune(run, unpruned_slice),
        **sketches(run.head, slice_size),
        host=need.host + indices,
        sent=need.sent + sent,
    )


def need_sliced(run: Run, ranks: int) -> Need:
    """The base whole on every rank, gradients reduce-scattered to their owners."""
    base, head = run.base, run.head
    slice_size = -(-head.n // ranks)
    buffers = single_gradient(base) + bytes_in_flight(base.weight_sizes, ranks, everyone_all=False)
    sent = head.items * head.kinds * all_gather(4 * head.n, ranks)
    return with_base(
        in_steps(run, sliced(head, slice_size)),
        run,
        ranks,
        slice_size,
        -(-base.n // ranks),
        base_buffers=buffers,
        sent=sent,
    )


def need_fsdp(run: Run, ranks: int) -> Need:
    """The base cut by FSDP2; the parts of n follow its shards."""
    base, head = run.base, run.head
    unpruned_slice = fsdp_slice(base, ranks)
    slice_size = -(-unpruned_slice * head.n // base.n)
    sent = head.items * fsdp_sent(base, ranks, head.kinds)
    need = with_base(
        in_steps(run, sliced(head, slice_size)),
        run,
        ranks,
        slice_size,
        unpruned_slice,
        base_buffers=fsdp_buffers(base),
        sent=sent,
    )
    return replace(need, base=fsdp_base(base, ranks), indices=8 * slice_size if run.is_pruned else 0)


def need_zero(run: Run, stage: int, ranks: int, *, offload: bool = False) -> Need:
    """The base whole on every rank, and whole gradients too."""
    base, head = run.base, run.head
    buffers = single_gradient(base) + bytes_in_flight(base.weight_sizes, ranks, everyone_all=True)
    sent = head.items * head.kinds * all_reduce(4 * head.n, ranks)
    need = in_steps(run, zero(head, stage, ranks, offload=offload))
    return with_base(need, run, ranks, head.n, -(-base.n // ranks), base_buffers=buffers, sent=sent)


def on_cpu(engine: str, n: int, ranks: int) -> int:
    """Peak bytes of one rank that holds encoder, decoder, x and y alone, as in benchmarks/engines.py."""
    head = Head(n)
    if engine in ("placed", "sliced"):
        need = sliced(head, -(-n // ranks), chunk=CHUNK)
    else:
        need = zero(head, int(engine.removeprefix("zero")), ranks, on_gpu=False)
    return need.peak + PROCESS_ON_CPU
