"""What bench_gpu_memory predicts and measures."""
