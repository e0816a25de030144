"""The base model and the GRADIEND model over it; where they are, and what memory they may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gradiend_dist.config.checks import require, require_positive
from gradiend_dist.config.choices import Activation
from gradiend_dist.config.fields import documented


@documented
@dataclass(kw_only=True)
class ModelArguments:
    """The base model and the GRADIEND model over it."""

    params: list[str] | None = None
    """Names or wildcards of the base weights to use. None: the backbone."""
    prediction_objective: Literal["auto", "mlm_mask_token", "clm_next_token"] = "auto"
    """One of auto, mlm_mask_token, clm_next_token."""
    latent_dim: int = 1
    """Width of the bottleneck."""
    activation_encoder: Activation = "tanh"
    """One of tanh, relu, leakyrelu, gelu, silu, elu, sigmoid, smht, id."""
    activation_decoder: Activation = "id"
    """One of tanh, relu, leakyrelu, gelu, silu, elu, sigmoid, smht, id."""
    bias_decoder: bool = True
    """Give the decoder a bias."""
    torch_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the base model: float32, bfloat16 or float16; GRADIEND itself stays in float32."""
    bf16: bool = False
    """Run the base model under bfloat16 autocast."""
    fp16: bool = False
    """Run the base model under float16 autocast with loss scaling."""
    gradient_checkpointing: bool = False
    """Compute each layer of the base model again in the backward pass: slower, with far less memory for activations."""
    attn_implementation: str | None = None
    """Attention of the base model, e.g. eager, sdpa or flash_attention_2. None: what transformers chooses."""
    tf32: bool = False
    """Let GPUs round the factors of float32 products to TF32: faster, with 3 digits instead of 7."""
    trust_remote_code: bool = False
    """Run model code from the hub. Only for models you trust."""

    def check(self) -> None:
        require_positive("latent_dim", self.latent_dim)
        require(not (self.bf16 and self.fp16), "bf16 and fp16 are both set: pass only one.")
        require(self.attn_implementation != "", "attn_implementation is empty: name one, e.g. sdpa, or leave it out.")
        require(self.params != [], "params is empty: name at least one weight, or leave it out for the whole backbone.")


@documented
@dataclass(kw_only=True)
class DeviceArguments:
    """Where the models are, and what memory gradients may use."""

    device: str | None = None
    """Put everything on this device."""
    device_encoder: str | None = None
    """Device of the encoder."""
    device_decoder: str | None = None
    """Device of the decoder."""
    device_base_model: str | None = None
    """Device of the base model."""
    encoder_decoder_same_device: bool = False
    """On 2+ GPUs: encoder and decoder on 0, base on 1."""
    offload: bool = False
    """Keep encoder, decoder and all else that has a number for each base weight out of the device: on the host of a
    GPU, and where that has no room, in files that are mapped into memory. One process."""
    ddp_timeout: int = 1800
    """Seconds after which a rank that does not answer ends the run."""
    use_cached_gradients: bool = False
    """Keep gradients on disk and use them in later runs."""
    gradient_store_gib: float | None = None
    """Memory for gradients that are used again, in GiB. None: what the rest of the run leaves free."""

    def check(self) -> None:
        require_positive("ddp_timeout", self.ddp_timeout)
        placed = self.device_encoder or self.device_decoder or self.encoder_decoder_same_device
        require(
            not (self.offload and placed),
            "offload puts encoder and decoder on the host: leave device_encoder, device_decoder and "
            "encoder_decoder_same_device out, or offload.",
        )
        require_positive("gradient_store_gib", self.gradient_store_gib, zero=True)
