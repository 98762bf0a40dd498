"""The words for where a run, and where a learner, stands: one place for all.

Table, lines, metrics and summary show them as they are here.
"""

# Phases of a run.
GATHERING = 'gathering'  # Learners join and compile.
RUNNING = 'running'
DRAINING = 'draining'  # The budget is met; every fragment once more.
FINISHED = 'finished'

PHASES = (GATHERING, RUNNING, DRAINING, FINISHED)

# States of a learner; it drains when the run does.
JOINING = 'joining'  # Admitted; it compiles, or lacks fragments.
COMPILING = 'compiling'
TRAINING = 'training'
WAITING = 'waiting'
ABSENT = 'absent'  # Never seen, or lost.
DONE = 'done'  # It has said farewell, or the run is over.

STATES = (JOINING, COMPILING, TRAINING, WAITING, DRAINING, ABSENT, DONE)
