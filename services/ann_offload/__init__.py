"""Attends where the bytes lie: takes units of attention from gpu_worker, and leaves their sums in shared memory."""
