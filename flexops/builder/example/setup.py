from setuptools import setup

from flexops import builder

setup(ext_modules=builder.extensions("mylib"), cmdclass=builder.commands())
