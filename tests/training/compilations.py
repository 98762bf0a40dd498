"""What is compiled while something else is done."""

import contextlib

import jax.monitoring


@contextlib.contextmanager
def compilations():
  """A list of what is compiled meanwhile."""
  found = []

  def listen(event, duration_secs, **_):
    del duration_secs
    if event == '/jax/core/compile/backend_compile_duration':
      found.append(event)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield found
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
