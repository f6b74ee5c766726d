"""CANN's phase one, implemented a second time in Python, and random calls that compare it with the host NPU.

The rules are those of CANN's documents and sources, which are named where they are used. Nothing here was taken from
``host-npu/csrc``, and only its C interface is called. See ``python -m tests.phase_one --help``.
"""
