"""What ``bench_cache`` measures, and how."""
