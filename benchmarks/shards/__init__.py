"""What ``bench_tar`` measures, and how."""
