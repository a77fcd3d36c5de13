"""Plans become artifacts: ninja, NVRTC in child processes, diagnosis of what failed."""
