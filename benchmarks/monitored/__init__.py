"""bench_monitor's child: a training with and without the monitor, in turns."""
