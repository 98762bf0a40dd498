"""The jitted scan of inner steps, on eight virtual devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax.sharding import PartitionSpec

from decoupled_diloco.models.transformer import TransformerOptions
from decoupled_diloco.tasks import jax_task, language_model_task, linen_task
from decoupled_diloco.training import inner, step
from decoupled_diloco.training import mesh as meshes
from tests.training.compilations import compilations

MODEL = TransformerOptions(
  vocab_size=32, width=32, layers=2, heads=4, kv_heads=2, sequence_length=16
)
INNER = inner.InnerOptions(warmup_steps=2, decay_steps=20)
RNG = jax.random.key(0)
K = 4


def make_batches(seed: int):
  tokens = np.random.default_rng(seed).integers(0, 32, (K, 8, 17), np.int32)
  return {'tokens': tokens}


@functools.cache
def make_scan(data=1, fsdp=1, tensor=1):
  return step.make_train_scan(
    language_model_task(MODEL),
    inner.inner_optimizer(INNER),
    meshes.make_mesh(meshes.MeshOptions(data, fsdp, tensor)),
    steps_per_scan=K,
    learning_rate=functools.partial(inner.learning_rate, INNER),
  )


def eight_losses(train):
  state = train.init_state(RNG)
  losses = []
  for round_number in range(2):
    state, metrics = train.scan(
      state, make_batches(round_number), round_number * K
    )
    losses.append(np.array(metrics['losses']))
  return np.concatenate(losses), np.array(metrics['grad_norm'])


@pytest.mark.parametrize('shape', [(8, 1, 1), (2, 2, 2), (1, 4, 2)])
def test_meshes_train_alike(shape):
  with jax.default_matmul_precision('highest'):
    expected, expected_norm = eight_losses(make_scan())
    losses, norm = eight_losses(make_scan(*shape))
  np.testing.assert_allclose(losses, expected, rtol=1e-5)
  np.testing.assert_allclose(norm, expected_norm, rtol=1e-5)


def test_state_lies_where_the_shardings_say():
  train = make_scan(1, 4, 2)
  state = train.init_state(RNG)
  adam = state.opt_state[1]
  for tree in (state.params, adam.mu, adam.nu):
    leaf = tree['layers']['0']['mlp']['up']['kernel']
    assert leaf.sharding.spec == PartitionSpec('fsdp', 'tensor')
    # 32 x 128 on 4 x 2 devices.
    assert leaf.addressable_shards[0].data.shape == (8, 64)
  assert adam.count.sharding.spec == PartitionSpec()
  state, _ = train.scan(state, make_batches(0), 0)
  assert jax.tree.all(
    jax.tree.map(
      lambda leaf, sharding: leaf.sharding.is_equivalent_to(
        sharding, leaf.ndim
      ),
      state,
      train.state_shardings,
    )
  )


def test_training_is_that_of_a_plain_loop():
  train, task = make_scan(), language_model_task(MODEL)
  state = train.init_state(RNG)
  params = jax.tree.map(np.array, state.params)
  tx = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(
      lambda count: inner.learning_rate(INNER, jnp.asarray(count) + 8),
      b2=0.99,
      weight_decay=0.1,
    ),
  )
  with jax.numpy_dtype_promotion('standard'):
    opt_state = tx.init(params)
  batches = make_batches(0)

  @jax.jit
  def plain_step(params, opt_state, batch):
    loss, gradient = jax.value_and_grad(lambda p: task.loss(p, batch, RNG)[0])(
      params
    )
    with jax.numpy_dtype_promotion('standard'):
      updates, opt_state = tx.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  expected = []
  for i in range(K):
    batch = jax.tree.map(lambda leaf, i=i: leaf[i], batches)
    params, opt_state, loss = plain_step(params, opt_state, batch)
    expected.append(loss)
  # A scan that begins at global step 8, like the schedule above.
  state, metrics = train.scan(state, batches, 8)
  np.testing.assert_allclose(metrics['losses'], expected, rtol=1e-5)
  np.testing.assert_allclose(metrics['loss'], np.mean(expected), rtol=1e-5)
  np.testing.assert_allclose(metrics['last_loss'], expected[-1], rtol=1e-5)
  np.testing.assert_allclose(
    metrics['learning_rate'], inner.learning_rate(INNER, 11), rtol=1e-6
  )
  # Adam's step is about lr = 3e-3 an entry, whatever the gradient: where that
  # is nearly zero, its sign is rounding. So the tolerance is absolute.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4),
    state.params,
    params,
  )


def test_state_is_donated():
  train = make_scan(1, 4, 2)
  state = train.init_state(RNG)
  new, _ = train.scan(state, make_batches(0), 0)
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
  assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new))
  memory = train.compile(make_batches(0)).memory_analysis()
  assert memory is not None
  on_one_device = sum(
    leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(new)
  )
  assert memory.alias_size_in_bytes >= on_one_device


def test_nothing_is_compiled_again():
  traces = []

  def loss_fn(params, batch, rng):
    traces.append(1)
    return jnp.mean((batch - params[None]) ** 2)

  train = step.make_train_scan(
    jax_task(lambda rng: jnp.zeros((3,)), loss_fn),
    inner.inner_optimizer(INNER),
    meshes.make_mesh(meshes.MeshOptions(data=2)),
    steps_per_scan=K,
    learning_rate=functools.partial(inner.learning_rate, INNER),
  )
  batches = np.ones((K, 2, 3), np.float32)
  train.compile(jax.ShapeDtypeStruct(batches.shape, batches.dtype))
  state = train.init_state(RNG)
  traced = len(traces)
  with compilations() as found:
    losses = []
    for round_number in range(10):
      given = batches if round_number % 2 else train.place(batches)
      global_step = round_number * K
      if round_number > 5:
        global_step = np.int32(global_step)
      state, metrics = train.scan(state, given, global_step)
      losses.append(float(metrics['loss']))
  assert len(traces) == traced
  assert found == []
  assert losses == sorted(losses, reverse=True)


def test_init_from_copies_and_makes_a_fresh_optimizer_state():
  train = make_scan(1, 4, 2)
  trained, _ = train.scan(train.init_state(RNG), make_batches(0), 0)
  on_host = jax.tree.map(np.array, trained.params)
  for given in (on_host, trained.params):
    before = jax.tree.map(np.array, given)
    state = train.init_from(given, RNG, rejoin_step=40)
    jax.tree.map(np.testing.assert_array_equal, state.params, before)
    assert state.rejoin_step == 40
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(state.opt_state[1]))
    # The scan donates the state, and writes over its buffers.
    train.scan(state, make_batches(1), 40)
    jax.tree.map(np.testing.assert_array_equal, given, before)


def test_a_rejoined_learner_warms_up():
  train = make_scan()
  state = train.init_from(train.init_state(RNG).params, RNG, rejoin_step=8)
  _, metrics = train.scan(state, make_batches(0), 8)
  # The scan's last step is the fourth of a hundred since the rejoin.
  assert INNER.rejoin_warmup_steps == 100
  expected = 0.04 * inner.learning_rate(INNER, 11)
  np.testing.assert_allclose(metrics['learning_rate'], expected, rtol=1e-6)


def test_other_parameters_are_refused():
  train = make_scan()
  params = train.init_state(RNG).params
  params['embed']['embedding'] = params['embed']['embedding'][:4]
  params['extra'] = jnp.zeros(())
  with pytest.raises(
    ValueError,
    match=r'2 leaves: embed.embedding: \(4, 32\) instead of \(32, 32\); '
    r'extra: \(\) instead of nothing',
  ):
    train.init_from(params, RNG)


def test_batches_are_checked():
  train = make_scan(8, 1, 1)
  wrong = {'tokens': np.zeros((K + 1, 8, 17), np.int32)}
  with pytest.raises(ValueError, match=r'steps_per_scan=4, .* \(5, 8, 17\)'):
    train.compile(wrong)
  with pytest.raises(ValueError, match='data x fsdp = 8; nearest: 8, 16'):
    train.compile({'tokens': np.zeros((K, 12, 17), np.int32)})
  with pytest.raises(ValueError, match='steps_per_scan=0'):
    step.make_train_scan(
      train.task, optax.sgd(1.0), train.mesh, steps_per_scan=0
    )


def test_random_streams_differ_between_steps_and_scans():
  train = step.make_train_scan(
    # The loss is a random number: what the stream gives.
    jax_task(
      lambda rng: jnp.zeros(()),
      lambda params, batch, rng: jax.random.uniform(rng) + 0.0 * params,
    ),
    optax.sgd(1.0),
    meshes.make_mesh(meshes.MeshOptions()),
    steps_per_scan=K,
  )
  batches = np.zeros((K, 1), np.float32)
  state, first = train.scan(train.init_state(RNG), batches, 0)
  _, second = train.scan(state, batches, 0)
  assert len({*first['losses'].tolist(), *second['losses'].tolist()}) == 2 * K
  _, again = train.scan(train.init_state(RNG), batches, 0)
  np.testing.assert_array_equal(again['losses'], first['losses'])
  assert 'learning_rate' not in first


@pytest.mark.parametrize(
  'tx',
  [
    optax.adafactor(1e-2),
    optax.sgd(1e-2, momentum=0.9),
    optax.inject_hyperparams(optax.adam)(learning_rate=7.0),
  ],
  ids=['adafactor', 'sgd', 'injected_adam'],
)
def test_any_optax_transformation_and_linen_module(tx):
  class Model(linen.Module):
    @linen.compact
    def __call__(self, x):
      # Names that the mesh does not know; and a width of 128, from which on
      # Adafactor factors its second moment.
      init = linen.with_partitioning(
        linen.initializers.lecun_normal(), ('model', None)
      )
      return linen.Dense(1)(linen.tanh(linen.Dense(128, kernel_init=init)(x)))

  batch = np.random.default_rng(0).normal(size=(8, 128)).astype(np.float32)
  train = step.make_train_scan(
    linen_task(
      Model(), lambda apply, x, _: jnp.mean((apply(x) - 1.0) ** 2), batch
    ),
    tx,
    meshes.make_mesh(meshes.MeshOptions(fsdp=4)),
    steps_per_scan=K,
    learning_rate=lambda step, rejoin_step: jnp.float32(1e-3),
  )
  state, metrics = train.scan(train.init_state(RNG), np.stack([batch] * K), 0)
  assert metrics['losses'][-1] < metrics['losses'][0]
  kernel = state.params['Dense_0']['kernel']
  assert kernel.sharding.spec == PartitionSpec('fsdp')
