"""Artifacts become operators and kernels of this process; the fallback to plain PyTorch."""
