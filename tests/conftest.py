"""Eight fake CPU devices, chosen before any backend starts."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
