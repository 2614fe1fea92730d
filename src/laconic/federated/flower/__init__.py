"""The two ends of Flower (Beutel et al. 2020, arXiv:2007.14390): a client mod, and a grid under a strategy.

Only these files import `flwr`.
"""
