"""A learner's computation: K inner steps in one jitted, donated scan."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, PRNGKeyArray

from decoupled_diloco.ops.array_types import Params, ShapeTree
from decoupled_diloco.tasks import Batch, Task
from decoupled_diloco.training import inner
from decoupled_diloco.training import mesh as meshes


class TrainState(NamedTuple):
  """What a learner carries from scan to scan, and has to snapshot.

  The same tuple holds shapes or shardings instead of arrays, too.

  Attributes:
    params: the parameters.
    opt_state: the inner optimizer's state.
    rng: uint32 [key], raw key data of the random stream (dropout). Plain
      integers, so that every array in the state can be stored as it is.
    rejoin_step: int32 scalar, the global step at which the optimizer state
      was made afresh in the middle of the run, else `inner.NEVER`.
  """

  params: Any
  opt_state: Any
  rng: Any
  rejoin_step: Any


Metrics = dict[str, Array]


@dataclasses.dataclass(frozen=True, eq=False)
class TrainScan:
  """The jitted functions of one learner; made by `make_train_scan`.

  Attributes:
    task: what is trained.
    mesh: where.
    steps_per_scan: K.
    state_shardings: a `TrainState` of shardings.
    batch_sharding: of stacked batches [K, batch, ...].
    jitted_scan: `scan` before it is compiled, to be transformed further.
  """

  task: Task
  mesh: Mesh
  steps_per_scan: int
  state_shardings: TrainState
  batch_sharding: NamedSharding
  jitted_scan: Any
  _rules: meshes.Rules
  _state_shapes: TrainState
  _init: Any
  _init_from: Any
  _compiled: dict[Any, jax.stages.Compiled] = dataclasses.field(
    default_factory=dict
  )

  @property
  def abstract_state(self) -> TrainState:
    """Shapes and dtypes of a state, and where its arrays lie."""
    return jax.tree.map(
      lambda leaf, sharding: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=sharding
      ),
      self._state_shapes,
      self.state_shardings,
    )

  def init_state(self, rng: PRNGKeyArray) -> TrainState:
    """A fresh state, every array made where it will lie."""
    return self._init(rng)

  def init_from(
    self,
    params: Params,
    rng: PRNGKeyArray,
    rejoin_step: int = inner.NEVER,
  ) -> TrainState:
    """A state with copies of these parameters and a fresh optimizer state.

    Args:
      params: arrays of any placement, or numpy arrays; they stay valid.
      rng: key of the random stream.
      rejoin_step: the run's global step, if it has begun without this
        learner; it then warms up shortly.

    Raises:
      ValueError: if the parameters are not shaped like the task's.
    """
    _check_shapes(params, self._state_shapes.params)
    # A scan donates its state: it must not share a buffer with the caller.
    copies = jax.device_put(
      params, self.state_shardings.params, may_alias=False
    )
    return self._init_from(copies, rng, np.int32(rejoin_step))

  def place(self, batches: Batch) -> Batch:
    """Puts this process's part of [K, batch, ...] arrays on the mesh."""
    return jax.tree.map(
      lambda leaf: jax.make_array_from_process_local_data(
        self.batch_sharding, leaf
      ),
      batches,
    )

  def scan(
    self,
    state: TrainState,
    batches: Batch,
    global_step: int | np.integer | Array,
  ) -> tuple[TrainState, Metrics]:
    """Trains for K steps. Donates `state`: its arrays are gone afterwards.

    Args:
      state: from `init_state`, `init_from` or the last scan.
      batches: arrays [K, batch, ...]; numpy, or placed by `place`.
      global_step: the run's step before these K.

    Returns:
      The new state, and metrics: `loss` (mean over the K steps), `last_loss`,
      `losses` [K], `grad_norm` (mean, before clipping), `learning_rate` of
      the last step, and the means of the task's own metrics.

    Raises:
      ValueError: if the batches do not fit K or the mesh.
    """
    # An executable takes exactly the types that it was compiled for.
    if not isinstance(global_step, jax.Array):
      global_step = np.int32(global_step)
    return self.compile(batches)(state, batches, global_step)

  def compile(self, batches: ShapeTree) -> jax.stages.Compiled:
    """The executable for batches of these shapes, compiled at most once.

    A learner calls it before it joins, so that the first scan does not keep
    the others waiting.

    Args:
      batches: arrays or `jax.ShapeDtypeStruct`s, [K, batch, ...].
    """
    leaves, treedef = jax.tree.flatten(batches)
    key = (treedef, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves))
    if key not in self._compiled:
      self._check_batches(leaves)
      shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batches
      )
      # The model's constraints on activations need the mesh and the rules.
      with (
        jax.set_mesh(self.mesh),
        nnx.logical_axis_rules(tuple(self._rules)),  # pyright: ignore
      ):
        self._compiled[key] = self.jitted_scan.lower(
          self._state_shapes, shapes, jax.ShapeDtypeStruct((), jnp.int32)
        ).compile()
    return self._compiled[key]

  def _check_batches(self, leaves: list[Any]) -> None:
    for leaf in leaves:
      if len(leaf.shape) < 2 or leaf.shape[0] != self.steps_per_scan:
        raise ValueError(
          f'Batches must be [steps_per_scan={self.steps_per_scan}, batch, ...] '
          f'but one is {tuple(leaf.shape)}; stack {self.steps_per_scan} '
          'batches along a new first axis.'
        )
      meshes.check_batch(leaf.shape[1], self.mesh)


def make_train_scan(
  task: Task,
  tx: optax.GradientTransformation,
  mesh: Mesh,
  *,
  steps_per_scan: int,
  learning_rate: inner.LearningRate | None = None,
  rules: meshes.Rules = meshes.DEFAULT_RULES,
) -> TrainScan:
  """Builds the functions with which a learner trains.

  Args:
    task: what is trained.
    tx: inner optimizer: any optax transformation.
    mesh: from `make_mesh`.
    steps_per_scan: K, the inner steps of one scan.
    learning_rate: `learning_rate(global_step, rejoin_step)`, jit-able; sets
      what `optax.inject_hyperparams` has injected as `learning_rate` in `tx`.
      A transformation without one is used as it is, with its own schedule.
    rules: logical axis -> mesh axis.

  Raises:
    ValueError: if the task's parameters do not fit the mesh.
  """
  if steps_per_scan < 1:
    raise ValueError(
      f'steps_per_scan={steps_per_scan} must be at least 1; it is '
      'sync_every / num_fragments.'
    )

  def fresh(params: Params, rng: Array, rejoin_step: Array) -> TrainState:
    with jax.numpy_dtype_promotion('standard'):
      opt_state = tx.init(params)
    return TrainState(params, opt_state, jax.random.key_data(rng), rejoin_step)

  def init(rng: PRNGKeyArray) -> TrainState:
    own, stream = jax.random.split(rng)
    return fresh(task.init(own), stream, jnp.asarray(inner.NEVER, jnp.int32))

  def train_step(
    state: TrainState, batch: Batch, step: Array
  ) -> tuple[TrainState, Metrics]:
    stream, rng = jax.random.split(jax.random.wrap_key_data(state.rng))
    (loss, metrics), grads = jax.value_and_grad(task.loss, has_aux=True)(
      state.params, batch, rng
    )
    # Gradients lie like parameters, so that data parallelism over fsdp
    # scatters their sum instead of summing whole copies.
    grads = jax.lax.with_sharding_constraint(grads, params_shardings)
    opt_state = state.opt_state
    metrics = {**metrics, 'loss': loss, 'grad_norm': optax.tree.norm(grads)}
    if learning_rate is not None:
      rate = learning_rate(step, state.rejoin_step)
      opt_state = inner.set_learning_rate(opt_state, rate)
      metrics['learning_rate'] = rate
    # Optax, like most of what is written for it, multiplies int32 counters
    # with floats.
    with jax.numpy_dtype_promotion('standard'):
      updates, opt_state = tx.update(grads, opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    rng = jax.random.key_data(stream)
    return TrainState(params, opt_state, rng, state.rejoin_step), metrics

  def scan(
    state: TrainState, batches: Batch, global_step: Array
  ) -> tuple[TrainState, Metrics]:
    steps = global_step + jnp.arange(steps_per_scan, dtype=jnp.int32)
    state, history = jax.lax.scan(
      lambda carry, xs: train_step(carry, *xs), state, (batches, steps)
    )
    metrics = {name: jnp.mean(values) for name, values in history.items()}
    metrics['losses'] = history['loss']
    metrics['last_loss'] = history['loss'][-1]
    if 'learning_rate' in history:
      metrics['learning_rate'] = history['learning_rate'][-1]
    return state, metrics

  key = jax.random.key(0)
  state_shapes = jax.eval_shape(init, key)
  params_shardings = meshes.shardings(task, mesh, rules)
  everywhere = meshes.replicated(mesh)
  state_shardings = TrainState(
    params_shardings,
    meshes.opt_state_shardings(tx, state_shapes.params, params_shardings),
    everywhere,
    everywhere,
  )
  batch_sharding = meshes.batch_sharding(mesh, stacked=True)
  return TrainScan(
    task=task,
    mesh=mesh,
    steps_per_scan=steps_per_scan,
    state_shardings=state_shardings,
    batch_sharding=batch_sharding,
    _rules=rules,
    _state_shapes=state_shapes,
    _init=jax.jit(init, out_shardings=state_shardings),
    _init_from=jax.jit(fresh, donate_argnums=0, out_shardings=state_shardings),
    jitted_scan=jax.jit(
      scan,
      donate_argnums=0,
      in_shardings=(state_shardings, batch_sharding, everywhere),
      out_shardings=(state_shardings, everywhere),
    ),
  )


def _check_shapes(params: Params, expected: ShapeTree) -> None:
  def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
      jax.tree_util.keystr(path, simple=True, separator='.'): leaf.shape
      for path, leaf in flat
    }

  have, want = shapes(params), shapes(expected)
  wrong = [
    f'{name}: {have.get(name, "missing")} instead of '
    f'{want.get(name, "nothing")}'
    for name in sorted({*have, *want})
    if have.get(name) != want.get(name)
  ]
  if wrong:
    raise ValueError(
      'The parameters must be those of the task, but differ in '
      f'{len(wrong)} leaves: {"; ".join(wrong[:5])}. Build the task with the '
      'options the parameters were made with.'
    )
