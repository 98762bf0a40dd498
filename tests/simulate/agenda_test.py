"""The virtual clock."""

import math

from decoupled_diloco.simulate.agenda import Agenda


def test_actions_happen_in_order_of_time_and_then_of_arrival():
  agenda = Agenda()
  seen = []
  agenda.at(2.0, lambda: seen.append(('c', agenda.now)))
  agenda.at(1.0, lambda: seen.append(('a', agenda.now)))
  agenda.at(1.0, lambda: seen.append(('b', agenda.now)))
  agenda.at(math.inf, lambda: seen.append('never'))
  agenda.at(1.5, lambda: agenda.at(agenda.now, lambda: seen.append('now')))
  agenda.run(until=1.0)
  assert seen == [('a', 1.0), ('b', 1.0)]
  agenda.run()
  assert seen[2:] == ['now', ('c', 2.0)]
  assert agenda.now == 2.0
