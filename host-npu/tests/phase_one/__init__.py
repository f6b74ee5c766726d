"""What CANN's phase one answers, written once more in Python, and random calls that ask the host NPU the same.

The rules are those of CANN's documents and sources, each named where it is used; nothing here was taken from
``host-npu/csrc``, and nothing of it is called but its C interface. ``python -m tests.phase_one --help`` says how to
run it.
"""
