"""A learner's arrays: its training state, and what it knows of the global one.

Threads share them as follows. The training thread alone touches the training
state; at scan boundaries it captures fragments and adopts new versions. Other
threads encode what was captured (`encode`) and decode what came in (`stage`).
Arrays are immutable, so passing references needs no copies; but whatever
outlives a boundary must have buffers of its own, because the next scan donates
the training state's.
"""

import enum
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from decoupled_diloco.ops import payloads
from decoupled_diloco.ops.adopt import AdoptOptions, adopt
from decoupled_diloco.ops.array_types import Params
from decoupled_diloco.ops.fragments import FragmentPlan
from decoupled_diloco.runtime.wire_format import WireFormat
from decoupled_diloco.training.inner import NEVER
from decoupled_diloco.training.step import Metrics, TrainScan, TrainState

Values = tuple[jax.Array, ...]
Payload = bytes | bytearray | memoryview


class Staging(enum.Enum):
  """What became of a publication."""

  STAGED = enum.auto()  # It can be adopted.
  OLD = enum.auto()  # What is here is as new.
  GAP = enum.auto()  # It updates a version that is not here.


class Captured(NamedTuple):
  """A fragment as it was at a scan boundary, with the base of its delta."""

  fragment: int
  round: int
  local: Values
  base: Values


class _Flight(NamedTuple):
  """What is kept of a hand-over until its fate is known.

  Attributes:
    seen: what the syncer can make of it: base - decode(encode(delta)).
    residual: the error feedback's state, if it is merged.
    shift: how far the base has moved since, if it has.
  """

  round: int
  seen: Values | None
  residual: Any
  shift: Values | None = None


class LocalModel:
  """The arrays of one learner.

  Args:
    plan: the fragments.
    trainer: the compiled training functions.
    wire: the codecs.
    options: how newer versions are adopted.
  """

  def __init__(
    self,
    plan: FragmentPlan,
    trainer: TrainScan,
    *,
    wire: WireFormat,
    options: AdoptOptions,
  ):
    self.plan = plan
    self.trainer = trainer
    self._wire = wire
    self._options = options
    P = plan.num_fragments
    self._state: TrainState | None = None
    self._lock = threading.Lock()
    self._bases: list[Values | None] = [None] * P
    self._base_versions = [-1] * P
    self._staged: list[dict[int, Values]] = [{} for _ in range(P)]
    self._flights: list[_Flight | None] = [None] * P
    self._residuals: list[Any] = [None] * P
    self._piece_shardings: list[tuple[jax.sharding.Sharding, ...] | None]
    self._piece_shardings = [None] * P
    self._take = jax.jit(self._take_fragment, static_argnums=1)
    self._adopt = jax.jit(
      self._adopt_fragment, static_argnums=1, donate_argnums=0
    )
    self._encode = jax.jit(self._encode_fragment)
    self._decode_update = jax.jit(
      lambda base, encoded: _add(base, wire.down.decode(encoded))
    )
    self._decode_value = jax.jit(wire.value.decode)

  # The jitted functions.

  def _take_fragment(self, params: Params, p: int) -> Values:
    # A whole leaf would otherwise be handed through without a copy, and lost
    # when the next scan donates it.
    return tuple(jnp.copy(value) for value in self.plan.take(params, p))

  def _adopt_fragment(
    self, params: Params, p: int, published: Values, base: Values, seen: Any
  ) -> Params:
    local = self.plan.take(params, p)
    adopted = adopt(
      self._options.rule,
      local,
      published,
      base,
      seen,
      alpha=self._options.alpha,
    )
    # Copied for the same reason: the base must survive the next scan.
    return self.plan.put(params, p, tuple(jnp.copy(x) for x in adopted))

  def _encode_fragment(
    self, local: Values, base: Values, residual: Any
  ) -> tuple[Any, Any, Any]:
    delta = tuple(
      (b - l).astype(jnp.float32) for b, l in zip(base, local, strict=True)
    )
    encoded, residual = self._wire.up.encode(delta, residual)
    seen = None
    if self.keeps_progress:
      decoded = self._wire.up.decode(encoded)
      seen = tuple(b - d for b, d in zip(base, decoded, strict=True))
    return encoded, residual, seen

  # The training thread.

  @property
  def keeps_progress(self) -> bool:
    """Whether adoption leaves in place what no merge has seen."""
    return self._options.rule == 'rebase'

  @property
  def params(self) -> Params:
    """The learner's parameters; valid until the next scan or adoption."""
    assert self._state is not None
    return self._state.params

  def begin(
    self, versions: Sequence[int], rng: jax.Array, rejoin_step: int = NEVER
  ) -> None:
    """Makes the training state from staged versions of all fragments.

    Args:
      versions: per fragment, which staged version to start from.
      rng: key of the learner's random stream.
      rejoin_step: the run's global step, if it has begun without this learner.
    """
    with self._lock:
      values = [
        self._staged[p].pop(version) for p, version in enumerate(versions)
      ]
      for p, version in enumerate(versions):
        self._bases[p] = values[p]
        self._base_versions[p] = version
    shapes = jax.eval_shape(self.trainer.task.init, jax.random.key(0))
    params = self.plan.assemble(values, shapes)
    self._state = self.trainer.init_from(params, rng, rejoin_step)
    for p in range(self.plan.num_fragments):
      taken = self._take(self._state.params, p)
      self._piece_shardings[p] = tuple(value.sharding for value in taken)
      self._bases[p] = self._place(p, values[p])
      self._residuals[p] = self._wire.up.init(self.base(p))

  def train(self, batches: Any, global_step: int) -> Metrics:
    """One scan; returns its metrics, which may still be being computed."""
    assert self._state is not None
    self._state, metrics = self.trainer.scan(self._state, batches, global_step)
    return metrics

  def capture(self, fragment: int, round_: int) -> Captured:
    """Copies a fragment, so that it can be encoded while training goes on."""
    base = self._bases[fragment]
    assert base is not None
    return Captured(fragment, round_, self._take(self.params, fragment), base)

  def adopt(self, fragment: int, version: int, merged_round: int) -> None:
    """Adopts a staged version.

    Args:
      fragment: which one.
      version: which of its staged versions.
      merged_round: round of the learner's own hand-over that was merged since
        it last adopted this fragment; -1 if none was.
    """
    assert self._state is not None
    with self._lock:
      published = self._staged[fragment][version]
      base = self._bases[fragment]
      flight = self._flights[fragment]
      self._staged[fragment] = {
        staged: values
        for staged, values in self._staged[fragment].items()
        if staged > version
      }
      self._bases[fragment] = published
      self._base_versions[fragment] = version
      assert base is not None
      seen = None
      if flight is not None and flight.round == merged_round:
        self._residuals[fragment] = flight.residual
        seen = flight.seen
        if seen is not None and flight.shift is not None:
          seen = _add(seen, flight.shift)
        self._flights[fragment] = None
      elif flight is not None and self.keeps_progress:
        moved = _subtract(published, base)
        shift = moved if flight.shift is None else _add(flight.shift, moved)
        self._flights[fragment] = flight._replace(shift=shift)
    params = self._adopt(self._state.params, fragment, published, base, seen)
    self._state = self._state._replace(params=params)

  def forget(self, fragment: int, round_: int) -> None:
    """Lets go of what was kept for a hand-over that will not be merged."""
    with self._lock:
      flight = self._flights[fragment]
      if flight is not None and flight.round == round_:
        self._flights[fragment] = None

  # Other threads.

  def encode(self, captured: Captured) -> bytes:
    """The payload of a hand-over."""
    p = captured.fragment
    encoded, residual, seen = self._encode(
      captured.local, captured.base, self._residuals[p]
    )
    payload = payloads.to_bytes(encoded)
    with self._lock:
      self._flights[p] = _Flight(captured.round, seen, residual)
    return payload

  def stage(
    self, fragment: int, version: int, form: str, payload: Payload
  ) -> Staging:
    """Decodes a publication, to be adopted at a scan boundary.

    Args:
      fragment: which one.
      version: the version that it makes.
      form: 'update' or 'value'.
      payload: its bytes.

    Raises:
      ValueError: if the payload has not the length of this fragment's.
    """
    shapes = self.plan.shapes(fragment)
    with self._lock:
      newest = max([self._base_versions[fragment], *self._staged[fragment]])
      before = self._staged[fragment].get(newest, self._bases[fragment])
    if version <= newest:
      return Staging.OLD
    if form == 'value':
      encoded = payloads.from_bytes(self._wire.value, shapes, payload)
      values = self._decode_value(encoded)
    elif version == newest + 1 and before is not None:
      encoded = payloads.from_bytes(self._wire.down, shapes, payload)
      values = self._decode_update(before, encoded)
    else:
      return Staging.GAP
    values = self._place(fragment, values)
    with self._lock:
      self._staged[fragment][version] = values
    return Staging.STAGED

  def base(self, fragment: int) -> Values:
    """The version of a fragment that was adopted last."""
    base = self._bases[fragment]
    assert base is not None
    return base

  def warm_up(self) -> None:
    """Compiles what boundaries need, by doing it once without any effect."""
    assert self._state is not None
    for p in range(self.plan.num_fragments):
      base = self.base(p)
      captured = self.capture(p, -1)
      encoded, _, seen = self._encode(captured.local, base, self._residuals[p])
      payloads.to_bytes(encoded)
      if self._wire.form == 'update':
        zeros = bytes(
          payloads.encoded_nbytes(self._wire.down, self.plan.shapes(p))
        )
        nothing = payloads.from_bytes(
          self._wire.down, self.plan.shapes(p), zeros
        )
        self._place(p, self._decode_update(base, nothing))
      # The learner has just begun: its copy is the base, and stays so.
      for reference in [None, base] if seen is not None else [None]:
        params = self._adopt(self._state.params, p, base, base, reference)
        self._state = self._state._replace(params=params)

  def _place(self, fragment: int, values: Values) -> Values:
    """Lays values out like the learner's own copy of the fragment."""
    shardings = self._piece_shardings[fragment]
    return values if shardings is None else jax.device_put(values, shardings)


def _add(left: Values, right: Values) -> Values:
  return tuple(a + b for a, b in zip(left, right, strict=True))


def _subtract(left: Values, right: Values) -> Values:
  return tuple(a - b for a, b in zip(left, right, strict=True))
