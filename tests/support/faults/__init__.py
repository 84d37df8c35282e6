"""The fault-injection kit: everything a test needs to hurt a loader on purpose, and to see that nothing was left.

In:  a loader under test.
Out: kills at named points (``points``), stopped workers (``processes``), bad sockets (``connections``), full memory
     (real control groups, ``control_groups``), trainings that can be killed whole (``trainings``), a device made of
     memory (``simulated_device``), and what must not be left (``leaks``).
Runs in: test processes and the workers they start.

The product has no hooks for this. Under fork a fault is patched into the test's own process before ``iter()`` and the
workers inherit it; under spawn and forkserver it travels with the dataset and is patched in when a worker unpickles it.
"""
