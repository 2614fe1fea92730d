"""Integration with Flower (Beutel et al. 2020, arXiv:2007.14390): a client mod, and a grid for strategies.

Only these files import `flwr`.
"""
