"""Tests of the Triton kernels without a GPU: in Triton's interpreter, and by offline compilation."""
