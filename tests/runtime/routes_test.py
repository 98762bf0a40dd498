"""Which connection is whose, when learners come again before they are lost."""

from decoupled_diloco.runtime.routes import Route, Routes


def test_a_learner_is_reached_where_it_was_welcomed_last():
  routes = Routes()
  assert routes.get(0) is None and not routes.is_of(0, 10)
  routes.add(0, 10, 1)
  routes.add(1, 11, 2)
  assert routes.is_of(0, 10) and not routes.is_of(0, 11)
  routes.add(0, 20, 3)
  assert routes.get(0) == Route(20, 3)
  assert not routes.is_of(0, 10)
  assert dict(routes.peers()) == {0: 20, 1: 11}


def test_losing_a_connection_that_was_replaced_means_nothing():
  routes = Routes()
  routes.add(0, 10, 1)
  routes.add(0, 20, 2)
  assert routes.lose(10) is None
  assert routes.lose(99) is None  # It was never welcomed.
  assert routes.lose(20) == (0, 2)
  assert routes.get(0) is None
  assert routes.lose(20) is None


def test_losing_a_connection_that_was_dropped_means_nothing():
  routes = Routes()
  routes.add(0, 10, 1)
  routes.drop(0)
  assert routes.get(0) is None and not dict(routes.peers())
  assert routes.lose(10) is None
