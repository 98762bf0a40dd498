"""What all tests share: CPU only, eight virtual devices, strict dtypes."""

import os
import pathlib
import tempfile

# Before the first import of jax: the backend reads these once.
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ.setdefault(
  'JAX_COMPILATION_CACHE_DIR',
  str(pathlib.Path(tempfile.gettempdir()) / 'decoupled_diloco_jax_cache'),
)
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.2')

import jax
from hypothesis import settings

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')

# Compiling inside a property makes its first example slow, not wrong.
settings.register_profile('default', deadline=None, max_examples=50)
settings.load_profile('default')
