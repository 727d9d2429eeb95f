"""Low-rank gradient sketches with predicted-KL step control, for optax."""

from logra_jax import bases
from logra_jax import flops
from logra_jax.low_rank import apply_updates
from logra_jax.low_rank import LowRank
from logra_jax.low_rank import Sketch
from logra_jax.optimizers import logra
from logra_jax.row_adam import scale_by_row_adam
from logra_jax.row_adam import scale_to_weight_ratio
from logra_jax.sketch import sketched
from logra_jax.step_control import scale_by_predicted_kl
from logra_jax.taps import tapped_linear

__version__ = "0.1.0"

__all__ = [
    "LowRank",
    "Sketch",
    "apply_updates",
    "bases",
    "flops",
    "logra",
    "scale_by_predicted_kl",
    "scale_by_row_adam",
    "scale_to_weight_ratio",
    "sketched",
    "tapped_linear",
]
