"""The version, which is that of the flexops beside this folder, which is required."""

import runpy
from pathlib import Path

from setuptools import setup

VERSION = runpy.run_path(str(Path(__file__).parents[1] / "flexops/_version.py"))["__version__"]

setup(version=VERSION, install_requires=[f"flexops-torch=={VERSION}", "docker>=7"])
