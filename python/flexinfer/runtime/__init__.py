"""Runtime: this process and machine: device, threads, OpenMP, torch's settings, weight files."""
