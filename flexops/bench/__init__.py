"""Measurements that show what flexops claims: both sides of every comparison in one run, on this machine."""
