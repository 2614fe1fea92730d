"""Integration with Flower (Beutel et al. 2020, arXiv:2007.14390). Only these modules import `flwr`."""
